"""A device whose streams run nothing before somebody waits: whoever reads what another stream makes reads poison.

Its tensors are kept in host memory. What a tensor of the device is an argument of works in every thread; making one
from nothing or from the host only within `Lagging`, in each thread, on a stream that is the thread's own in it.
"""

from __future__ import annotations

import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchrl_ext.data.weights import source

__all__ = ["DEVICE", "Lagging", "Stream", "install"]

DEVICE = torch.device("lazy:0")  # torch knows the name, and here nobody implements it
_POISON = 0xA5
_here = threading.local()


class Stream:
    """Tasks in their order, all of which run when somebody waits for the last one."""

    def __init__(self):
        self._tasks, self._lock = [], threading.RLock()

    def queue(self, task):
        self._tasks.append(task)

    def synchronize(self):
        self._run(len(self._tasks))

    def record_event(self):
        return self, len(self._tasks)

    def wait_event(self, event):
        stream, count = event
        self.queue(lambda: stream._run(count))

    def _run(self, count):
        with self._lock:
            for at in range(count):
                task, self._tasks[at] = self._tasks[at], None
                if task is not None:
                    task()


_DEFAULT = Stream()


def current_stream(device=None):
    """The stream of this thread, as `torch.accelerator.current_stream` has it: the default one but in `Lagging`."""
    return getattr(_here, "stream", _DEFAULT)


class _Tensor(torch.Tensor):
    """A tensor of the device."""

    @staticmethod
    def __new__(cls, memory):
        layout = {"strides": memory.stride(), "storage_offset": memory.storage_offset()}
        self = cls._make_wrapper_subclass(cls, memory.shape, dtype=memory.dtype, device=DEVICE, **layout)
        self.memory = memory
        return self

    def data_ptr(self):
        return self.memory.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _launch(func, args, kwargs or {})


class Lagging(TorchDispatchMode):
    """This thread works on a stream of the device, by default on one of its own, and makes tensors there."""

    def __init__(self, stream=None):
        super().__init__()
        self._stream, self._kept = stream or Stream(), []

    def __enter__(self):
        self._kept.append(current_stream())
        _here.stream = self._stream
        return super().__enter__()

    def __exit__(self, *error):
        _here.stream = self._kept.pop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _launch(func, args, kwargs or {})


def install(monkeypatch):
    """Have torch find the device, and its streams."""
    answers = {"is_available": True, "current_accelerator": DEVICE, "current_device_index": DEVICE.index}
    for name, answer in {**answers, "set_device_index": None, "empty_cache": None}.items():
        monkeypatch.setattr(torch.accelerator, name, lambda *_, answer=answer: answer, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    refuse = source.require_memory  # tensors of a real device are no subclass
    monkeypatch.setattr(
        source, "require_memory", lambda name, tensor: isinstance(tensor, _Tensor) or refuse(name, tensor)
    )


def _launch(func, args, kwargs):
    mine = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Tensor)]
    target = kwargs.get("device")
    if target == DEVICE:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if not mine:
        made = func(*args, **kwargs)
        return _Tensor(made) if target == DEVICE else made
    args, kwargs = tree_map(lambda leaf: leaf.memory if isinstance(leaf, _Tensor) else leaf, (args, kwargs))
    stream, returns = current_stream(), func._schema.returns
    wrapped = lambda found: tree_map(lambda leaf: _Tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, found)  # noqa: E731
    if any(one.alias_info is not None and not one.alias_info.is_write for one in returns):
        return wrapped(func(*args, **kwargs))  # a view
    to_host = target is not None and target.type == "cpu"
    written = [arg for arg, own in zip(args, func._schema.arguments, strict=False) if own.is_write]
    if written and any(own is one.memory for own in written for one in mine):
        args, kwargs = _kept(args, kwargs, mine)
        stream.queue(lambda: func(*args, **kwargs))
        return next(one for one in mine if one.memory is written[0])
    if not written and not to_host:
        try:
            like = _on("meta", func, args, kwargs)
        except (NotImplementedError, RuntimeError):  # its shape is known from values alone
            like = None
        if tree_leaves(like) and all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(like)):
            made = tree_map(_poisoned, like)
            args, kwargs = _kept(args, kwargs, mine)

            def deliver():
                for into, found in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
                    into.copy_(found)

            stream.queue(deliver)
            return wrapped(made)
    stream.synchronize()
    found = func(*args, **kwargs)
    return found if to_host or written else wrapped(found)


def _on(device, func, args, kwargs):
    args, kwargs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
    return func(*args, **kwargs)


def _kept(args, kwargs, mine):
    """The arguments, with copies of what lies on the host."""
    own = {id(one.memory) for one in mine}
    copied = lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) and id(leaf) not in own else leaf  # noqa: E731
    return tree_map(copied, (args, kwargs))


def _poisoned(like):
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    made.untyped_storage().fill_(_POISON)
    return made
