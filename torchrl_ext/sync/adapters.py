"""`AdapterSender` sends LoRA adapters to engines without changing their base weights."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from torchrl_ext.errors import ConfigError
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.disk import DiskTransport
from torchrl_ext.transports.ranks import drives
from torchrl_ext.types import SyncReport
from torchrl_ext.weights.peft import as_adapter

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AdapterSender"]


@final
class AdapterSender:
    """Keeps engines at the newest version of one or more named LoRA adapters.

    Each name has its own `WeightSender` and `DiskTransport`, which publishes versions atomically in PEFT's format in
    ``root/NAME/weight_v000007/``. Engines load a version while they serve, and then use it for new requests to the
    name; each request ends with the version that it began with.

    Args:
        root: directory that the trainer and every engine can access under the same path. Keep it as long as engines
            serve adapters from it, because they read the files of an evicted adapter again.
        engine: client of one engine or of a fleet (`torchrl_ext.connect`).
        keep_files: never remove old versions.
        dtype: cast the adapter's tensors to this dtype before sending.
        timeout_s: deadline of every wait of the data layer, in seconds.
        rank: as in `WeightSender`. Only rank 0 talks to engines and writes files; the other ranks also call `load`.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> lora = get_peft_model(lm, LoraConfig(r=4, target_modules="all-linear"))
        >>> adapters = tx.AdapterSender(root, tx.connect(address))
        >>> adapters.load("policy-lora", lora)  # the embedded engine serves no adapters; vLLM and SGLang do
        Traceback (most recent call last):
        torchrl_ext.errors.ConfigError: ...
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        engine: EngineClient,
        *,
        keep_files: bool = False,
        dtype: torch.dtype | None = None,
        timeout_s: float = 60.0,
        rank: int | None = None,
    ) -> None:
        self._root, self._engine, self._rank = Path(root), engine, rank
        self._transport = partial(DiskTransport, adapter=True, keep_files=keep_files, timeout_s=timeout_s)
        self._sender = partial(WeightSender, dtype=dtype, verify=False, rank=rank)
        self._senders: dict[str, WeightSender] = {}

    def load(self, name: str, model: Any, *, adapter: str | None = None) -> SyncReport:
        """Publish the adapter's weights as the next version of ``name``, and put it in service.

        Args:
            name: the adapter's name in requests: ``model`` in vLLM's routes, ``lora_path`` in SGLang's.
            model: a ``PeftModel``, a module (TorchRL wrapper, DDP) around one, or a directory that PEFT has written.
            adapter: which adapter of the module; None for the active one.

        Returns:
            The report; ``version`` is the adapter's version, and each row has the version that its engine serves.

        Raises:
            ConfigError: the adapter cannot be sent, the name is invalid, or the engines do not serve adapters.
            UpdateError: at least one engine does not serve the new version; the rows say what each engine serves.
        """
        if name not in self._senders:
            engine = self._engine.adapter(name)  # raises for an invalid name
            self._senders[name] = self._sender(self._transport(self._root / name), engine)
        return self._senders[name].update_weights(as_adapter(model, adapter))

    def unload(self, name: str) -> None:
        """Unload the adapter from every engine; from then on, engines refuse requests to ``name``.

        Running requests end with the version that they began with. Files of the last version stay in the root.

        Raises:
            EngineRefusedError: an engine does not serve an adapter of that name.
            EngineError: some engines failed; the others have unloaded the adapter.
        """
        sender = self._senders.pop(name, None)
        if sender is not None:
            sender.shutdown()
        if drives(self._rank):
            self._engine.adapter(name).unload()

    def version(self, name: str) -> int:
        """Return the version of ``name`` that this sender last put in service.

        Raises:
            ConfigError: this sender has not loaded an adapter of that name.
        """
        if name not in self._senders:
            loaded = ", ".join(self._senders)
            raise ConfigError(
                f"this sender has not loaded an adapter {name!r}", expected=loaded or "load(...) before version(...)"
            )
        return self._senders[name].version

    def shutdown(self) -> None:
        """Release the root for other trainers; engines keep serving their adapters. Calling it twice is allowed."""
        for sender in self._senders.values():
            sender.shutdown()
        self._senders.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
