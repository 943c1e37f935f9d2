"""Serve LoRA adapters by name and version in a stock SGLang, so that each request keeps the version it began with.

SGLang keeps adapters by name, and refuses to load a name twice: to replace one, a trainer has to unload it first, which
waits for its last request while new ones are refused. So every version is loaded under a label of its own
(``policy-lora@7``), and the name that requests use is pointed at a label where SGLang looks names up: each request
keeps the version that it began with, and its response names it (``meta_info.adapter``). Cached keys and values belong
to the `lora_id`, which is drawn anew at each load (`sglang.srt.managers.schedule_batch.Req`): no version uses those
of another.

Messages travel as the ``action`` of ``/weights_checker``, like our others, but these stay in the process that looks
names up (`TokenizerManager`). The workers are asked about layers.

What SGLang 0.5.23 passes over in silence is refused when a version is staged: it scales every layer by
``lora_alpha / r``, whatever ``use_rslora``, ``alpha_pattern`` and ``rank_pattern`` say, and skips tensors that it has
no layer for (``up_proj`` without ``gate_proj``, for one), which the workers are asked about before a version serves.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from torchrl_ext.errors import ConfigError, EngineError, NotConnectedError
from torchrl_ext.messages import CheckAdapter, Message, ServeAdapter, StageAdapter, State, UnloadAdapter, read
from torchrl_ext.plugins.adapters import AdapterTable, check_adapter, refuse_layers
from torchrl_ext.routes import CHANNEL, ListAdapters
from torchrl_ext.types import Info, Text
from torchrl_ext.weights.peft import adapter_version

__all__ = ["HOOKS", "CheckLoaded", "check_worker"]

_NOT_HERE = {"use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none"}
"""Settings of PEFT that change what an adapter computes and that SGLang ignores, with their neutral values."""

_HINT = (
    "adapt gate_proj with up_proj, and q_proj with v_proj; or name the layer in --lora-target-modules when you start "
    "the server"
)


class CheckLoaded(Message, frozen=True, kw_only=True):
    """Asks workers whether each tensor of the adapter that was loaded under ``label`` has a layer that applies it."""

    label: Text


@final
class Adapters(AdapterTable):
    """Keeps which version each adapter name stands for in one server, and switches it.

    Args:
        manager: SGLang's `TokenizerManager`.
        ask_workers: sends a message to the workers; returns success, and what they say.
    """

    def __init__(self, manager: Any, ask_workers: Callable[[Message], Awaitable[tuple[bool, str]]]) -> None:
        self._manager, self._ask_workers = weakref.proxy(manager), ask_workers
        self._served: dict[str, str] = {}
        self._before: dict[str, str] = {}

    @property
    def served(self) -> dict[str, str]:
        return self._served

    def label(self, name: str | None) -> str | None:
        """Return the label of the version that serves requests by ``name``; other names are their own label."""
        return self._served.get(name, name) if isinstance(name, str) else name

    async def check(self, message: CheckAdapter) -> None:
        from sglang.srt.runtime_context import get_lora

        started = get_lora()
        check_adapter(message, enabled=started.enable_lora, max_rank=started.max_lora_rank)
        await self._ask(CheckAdapter(params=message.params))

    async def stage(self, name: str, label: str, path: str) -> None:
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        config = json.loads((Path(path) / "adapter_config.json").read_bytes())
        wrong = {name: config[name] for name, plain in _NOT_HERE.items() if config.get(name) not in (None, plain)}
        if wrong:
            raise ConfigError(
                f"SGLang does not support {', '.join(f'{name}={value!r}' for name, value in wrong.items())}",
                expected="plain LoRA, scaled by lora_alpha / r",
                hint="train the adapter without these settings, or send merged weights",
            )
        kept = {self._served.get(name), self._before.get(name)}
        await self._drop(name, keep=kept)
        told = await self._manager.load_lora_adapter(LoadLoRAAdapterReqInput(lora_name=label, lora_path=path))
        if not told.success:  # of a KeyError SGLang hands on the key alone
            missing = told.error_message.startswith("'base_model.")
            raise EngineError(
                f"there is no tensor {told.error_message}" if missing else told.error_message,
                hint="SGLang packs q_proj, k_proj and v_proj: adapt q_proj with v_proj" if missing else None,
            )
        try:
            await self._ask(CheckLoaded(label=label))
        except EngineError:
            await self._drop(name, keep=kept)
            raise

    def serve(self, name: str, label: str) -> Info:
        if label not in self._manager.lora_registry.get_all_adapters():
            raise NotConnectedError(f"{label} is not staged", hint="load the adapter again")
        if name in self._served:
            self._before[name] = self._served[name]
        self._served[name] = label
        return {}

    async def unload(self, name: str) -> None:
        del self._served[name]
        self._before.pop(name, None)
        await self._drop(name, keep=set())

    async def _ask(self, message: Message) -> None:
        able, words = await self._ask_workers(message)
        if not able:
            raise EngineError(words)

    async def _drop(self, name: str, keep: set[str | None]) -> None:
        """Unload versions that no request uses; for one in use SGLang would wait, and load nothing meanwhile."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        registry = self._manager.lora_registry
        for label, reference in registry.get_all_adapters().items():
            ours = label.rpartition("@")[0] == name and adapter_version(label) is not None
            if ours and label not in keep and registry._counters[reference.lora_id].value() == 0:
                await self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=label))
                self._manager.lora_ref_cache.pop(label, None)  # SGLang would load it again for a request by its label


_managers: weakref.WeakKeyDictionary[Any, Adapters] = weakref.WeakKeyDictionary()


def _message_in(action: Any) -> Message | None:
    """Return our message in the ``action`` of a call of ``/weights_checker``; None where it has none."""
    if isinstance(action, str) and action.startswith(CHANNEL):
        with suppress(Exception):  # what is no message is for the workers to refuse
            return read(json.loads(action.removeprefix(CHANNEL)))
    return None


async def check_weights(original: Callable[..., Any], manager: Any, request: Any, *args: Any) -> Any:
    """Wrap the server's part of ``/weights_checker``: answer messages about adapters. Of these none raises.

    To the workers' answer to `State` it adds whether the server itself is paused, which its schedulers do not know of
    every pause.
    """
    message = _message_in(request.action)
    if not isinstance(message, (CheckAdapter, ListAdapters, ServeAdapter, StageAdapter, UnloadAdapter)):
        success, words, *rest = await original(manager, request, *args)
        if success and isinstance(message, State):
            words += " | " + json.dumps({"server": True, "paused": bool(manager.is_pause)})
        return (success, words, *rest)
    held, kind = weakref.proxy(manager), type(request)

    async def ask(message: Message) -> tuple[bool, str]:
        success, words, *_ = await original(held, kind(action=CHANNEL + json.dumps(message.to_json())))
        return success, words

    try:
        adapters = _managers.setdefault(manager, Adapters(manager, ask))
        return True, json.dumps(await adapters.handle(message)), None, None
    except Exception as error:  # noqa: BLE001 - told to the caller, whatever it is
        return False, f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode(), None, None


async def resolve(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Wrap SGLang's lookup of adapters by name, for one request or a batch."""
    adapters = _managers.get(manager)
    if adapters is not None:
        parts = request.__dict__.get("_sub_obj_cache", {})  # SGLang takes a batch apart before it comes here
        for one in (request, *parts.values()):
            asked = one.lora_path
            one.lora_path = [*map(adapters.label, asked)] if isinstance(asked, list) else adapters.label(asked)
    return await original(manager, request)


def respond(original: Callable[..., Any], manager: Any, request: Any, *args: Any) -> AsyncIterator[Any]:
    """Wrap SGLang's wait for a response: put the version that made it into ``meta_info`` as ``adapter``."""
    responses, label = original(manager, request, *args), request.lora_path
    ours = isinstance(label, str) and adapter_version(label) is not None
    return _labelled(responses, label) if ours else responses


async def _labelled(responses: AsyncIterator[Any], label: str) -> AsyncIterator[Any]:
    async for response in responses:
        response["meta_info"]["adapter"] = label
        yield response


def check_worker(manager: Any, message: CheckAdapter | CheckLoaded) -> None:
    """Refuse, on a worker, an adapter with a tensor that no layer here would apply.

    Args:
        manager: the worker's `LoRAManager`.
        message: `CheckAdapter` before it is loaded, `CheckLoaded` once it is.

    Raises:
        ConfigError: names the first layer that has no LoRA here.
        EngineError: nothing of that label is loaded here.
    """
    if isinstance(message, CheckLoaded):
        _check_loaded(manager, message.label)
        return
    from sglang.srt.layers.utils import get_layer_id
    from sglang.srt.lora.utils import get_normalized_target_modules

    def applies(layer: str) -> bool:
        number = get_layer_id(layer)
        known = get_normalized_target_modules([layer]) <= manager.target_modules
        ends = number is None and layer.rpartition(".")[2] in ("embed_tokens", "lm_head")
        return known and (ends or (number or 0) < len(manager.lora_modules))

    refuse_layers((_layer(meta.name) for meta in message.params), applies, manager.target_modules, _HINT)


def _check_loaded(manager: Any, label: str) -> None:
    found = [key for key, reference in manager.lora_refs.items() if reference.lora_name == label]
    if not found:
        raise EngineError(f"{label} is not loaded on this worker")
    adapter = manager.loras[found[0]]
    layers = [
        (layer.weights, set(modules)) for layer, modules in zip(adapter.layers, manager.lora_modules, strict=True)
    ]
    ends = {"embed_tokens": manager.embed_tokens_module, "lm_head": manager.lm_head_module}
    layers.append((adapter.embedding_layers, {name for name, module in ends.items() if module is not None}))
    unapplied = [
        layer
        for weights, wrapped in layers
        for layer in map(_layer, weights)
        if not f".{layer}".endswith(tuple(f".{module}" for module in wrapped))
    ]
    refuse_layers(unapplied, lambda layer: False, manager.target_modules, _HINT)


def _layer(name: str) -> str:
    return name.partition(".lora_")[0].removeprefix("base_model.model.")


_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS: dict[str, Callable[..., Any]] = {
    f"{_TOKENIZER}.check_weights": check_weights,
    f"{_TOKENIZER}._resolve_lora_path": resolve,
    f"{_TOKENIZER}._wait_one_response": respond,
}
