"""An engine of a page that processes its weights as real ones do, and a saboteur that loads a second time wrongly."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn

from torchrl_ext.engines.loader import EngineLoader, StandIns, swapped
from torchrl_ext.engines.runtime import reachable

SIZE, EXPERTS = 8, 3


class Fused(nn.Module):
    """Three checkpoint tensors in one parameter, which is multiplied as it was loaded."""

    names, shape = ("q", "k", "v"), (3 * SIZE, SIZE)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(self.shape), requires_grad=False)

    def place(self, name):
        """Where a checkpoint tensor goes in the parameter as it is loaded."""
        return self.weight.data.view(len(self.names), SIZE, SIZE)[self.names.index(name)]

    def process(self):
        return None

    def forward(self, x):
        return sum((x @ self.weight.T).split(SIZE, -1)) / 3


class Shuffled(Fused):
    """Experts in an order of the kernel's own: equal shape, other places."""

    names, shape = tuple(f"experts.{e}" for e in range(EXPERTS)), (EXPERTS, SIZE, SIZE)
    order = torch.tensor([3, 1, 7, 0, 5, 2, 6, 4])

    def process(self):
        self.weight.data = self.weight.data[:, :, self.order]

    def forward(self, x):
        return torch.einsum("bi,eoi->bo", x[:, self.order], self.weight) / EXPERTS


class Packed(Fused):
    """A weight that is given up for a copy that only the multiplying function holds."""

    names, shape = ("down",), (SIZE, SIZE)

    def process(self):
        packed = self.weight.data.T.contiguous()
        self.multiply = lambda x: x @ packed
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x):
        return self.multiply(x)


class Absorbed(Fused):
    """A weight that stays, beside a product of it that is multiplied in its place."""

    names, shape = ("kv",), (SIZE, SIZE)

    def process(self):
        self.absorbed = 0.25 * self.weight.data.T.contiguous()

    def forward(self, x):
        return x @ self.absorbed


KINDS = (Fused, Shuffled, Packed, Absorbed)


class Model(nn.Module):
    """Two blocks of one layer of each kind, a norm, and a table that nothing loads."""

    def __init__(self, norm=torch.float32):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({kind.__name__: kind() for kind in KINDS}) for _ in range(2))
        self.norm = nn.Parameter(torch.empty(SIZE, dtype=norm), requires_grad=False)
        self.register_buffer("cos_sin_cache", torch.randn(16, SIZE), persistent=False)
        self.sabotage, self.late = None, []

    def forward(self, x):
        for block in self.blocks:
            for layer in block.values():
                x = x + torch.tanh(layer(x))
        return x * self.norm

    def layers(self):
        """Path and layer, in order."""
        for i, block in enumerate(self.blocks):
            for kind, layer in block.items():
                yield f"blocks.{i}.{kind}", layer

    def load_weights(self, pairs):
        for name, tensor in pairs:
            if self.sabotage is not None and not tensor.is_meta:
                name, tensor = self.sabotage.loaded(name, tensor)
            if ".Fused." in str(name) and not tensor.is_meta:
                self.late.append((name, tensor))  # as vLLM's padded layers
            elif name is not None:
                self.write(name, tensor)

    def write(self, name, tensor):
        for path, layer in self.layers():
            if name.startswith(f"{path}."):
                layer.place(name.removeprefix(f"{path}.")).copy_(tensor)
        if name == "norm":
            self.norm.data.copy_(tensor)


def checkpoint(seed):
    """Random weights by name."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"{path}.{name}" for path, layer in Model().layers() for name in layer.names]
    found = {name: torch.randn(SIZE, SIZE, generator=generator) for name in names}
    return found | {"norm": torch.ones(SIZE) if seed == 0 else torch.rand(SIZE, generator=generator) + 0.5}


def outputs(weights):
    """What a cold start from these weights answers."""
    model = Model(weights["norm"].dtype)
    model.load_weights(weights.items())
    ProcessedModel(model).close([layer for _, layer in model.layers()])
    return model(PROBE)


PROBE = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(99))


def processed(folder, *, sabotage=None, lacks=(), **how):
    """A loader of an engine that was started with `checkpoint` 0; arguments of `ProcessedModel`."""
    file = folder / "model.safetensors"
    if not file.exists():
        save_file(checkpoint(0), file)
    started = ProcessedModel(Model(), folder, **how)
    started.module.load_weights(checkpoint(0).items())
    started.close([layer for _, layer in started.module.layers()])
    started.lacks, started.module.sabotage = frozenset(lacks), sabotage
    return EngineLoader(started)


class Unprocessed:
    """What a loader sees of a model that computes with its weights as they are loaded, in an engine's only worker.

    Attributes:
        copied: as of `StandIns`.
    """

    group, alone, shared, by_layer, kept, repairs = SimpleNamespace(size=lambda: 1), True, False, False, (), {}
    dtype, dummy, rejection, tied, asleep, copied = torch.float32, None, None, False, False, ()

    def __init__(self, module, checkpoint):
        self.module, self.checkpoint = module, str(checkpoint)

    @contextmanager
    def stand_ins(self):
        def form(layer):
            own = {name: tensor for name, tensor in layer._parameters.items() if tensor is not None}
            return {name: nn.Parameter(torch.empty_like(tensor, device="meta")) for name, tensor in own.items()}, {}

        with swapped(self.module, form) as tensors:
            yield StandIns(tensors, {name: tensor.numel() for name, tensor in tensors.items()}, self.copied)

    def open(self, layers):
        return ()

    def close(self, layers):
        """Process nothing."""

    def readings(self):
        return reachable(self.module)


class ProcessedModel(Unprocessed):
    """A `Model` as loaders of engines see theirs.

    Args:
        module: the `Model`.
        checkpoint: what it was started with.
        knows: names of layer kinds whose processing the engine's own reload leaves out, and a repair makes.
        careless: take a weight for one that can be written in place although a product of it is multiplied.
        opaque: nobody knows what the model's loader writes to.
        dummy: fills the model in the place of a checkpoint.

    Attributes:
        lacks: names of layer kinds whose processing the engine's own reload leaves out.
    """

    by_layer, lacks = True, frozenset()

    def __init__(self, module, checkpoint="/nowhere", *, knows=(), careless=False, opaque=False, dummy=None):
        super().__init__(module, checkpoint)
        self.dummy = dummy
        self._careless, self._opaque = careless, opaque
        self.repairs = {f"{kind}.process": self._processes(kind) for kind in knows}

    @contextmanager
    def stand_ins(self):
        def form(layer):
            parameters = {name: torch.empty_like(own, device="meta") for name, own in layer._parameters.items()}
            if isinstance(layer, Fused):
                parameters["weight"] = torch.empty(layer.shape, device="meta")
            return parameters, dict(layer._buffers)

        if self._opaque:
            yield None
            return
        multiplied = [layer.weight.data_ptr() for _, layer in self.module.layers() if type(layer) is Absorbed]
        with swapped(self.module, form) as tensors:
            needed = {name: tensor.numel() for name, tensor in tensors.items() if tensor.is_meta}
            yield StandIns(tensors, needed, () if self._careless else multiplied)

    def open(self, layers):
        if layers is not None and self.module.sabotage is not None:
            self.module.sabotage.committed(self.module)
        opened = [layer for path, layer in self.module.layers() if layers is None or path in layers]
        for layer in opened:
            if layer.weight.numel() == 0:
                layer.weight = nn.Parameter(torch.empty(layer.shape), requires_grad=False)
        return opened

    def close(self, layers):
        for name, tensor in self.module.late:
            self.module.write(name, tensor)
        self.module.late = []
        for kind in KINDS:
            if kind.__name__ not in self.lacks:
                self._processes(kind.__name__)(self.module, layers)

    def _processes(self, kind):
        def process(module, layers):
            stale = [layer for path, layer in module.layers() if module.sabotage and module.sabotage.stale(path)]
            due = [layer for layer in layers if type(layer).__name__ == kind and not any(layer is one for one in stale)]
            for layer in due:
                layer.process()
            return due

        return process


class Sabotage:
    """One wrong thing, about one tensor, whenever the engine loads after its start; both are chosen by a seed."""

    WAYS = ("drop", "swap", "transpose", "part", "stale", "shift", "misplace")

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)

        def pick(options):
            return options[int(torch.randint(len(options), (), generator=generator))]

        self.way = pick(self.WAYS)
        names = [name for name in checkpoint(0) if name != "norm"]
        self.name, self.other = pick(names), pick(names)
        while self.other == self.name:
            self.other = pick(names)
        self.path = pick([path for path, layer in Model().layers() if type(layer) in (Packed, Absorbed, Shuffled)])

    def loaded(self, name, tensor):
        if name == self.name and self.way in ("drop", "transpose", "part", "shift"):
            part = torch.cat([tensor[: SIZE // 2], torch.zeros_like(tensor[SIZE // 2 :])])
            turned = {"transpose": tensor.T, "part": part, "shift": tensor.roll(1, 0)}
            return (None, tensor) if self.way == "drop" else (name, turned[self.way])
        swapped = {self.name: self.other, self.other: self.name}
        return (swapped.get(name, name), tensor) if self.way == "swap" else (name, tensor)

    def stale(self, path):
        return self.way == "stale" and path == self.path

    def committed(self, model):
        if self.way == "misplace":
            weight = model.blocks[0]["Fused"].weight.data
            weight[0], weight[1] = weight[1].clone(), weight[0].clone()
