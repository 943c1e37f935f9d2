"""Engines for a test, a notebook or a first try: started by one call, ended by one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.base.registry import engines as makes
from torchrl_ext.control.serving.processes import GuardedProcess, stop_all, wait_until_healthy
from torchrl_ext.testing.environments import settings_for
from torchrl_ext.testing.tiny import make_tiny_lm

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Engines", "engines"]


class Engines(tuple[str, ...]):
    """The addresses of running engines, which end with a ``with`` block, with `close`, or with this process.

    Attributes:
        model: checkpoint directory that they started from.
        processes: the engines, in the order of the addresses.
    """

    model: Path
    processes: tuple[GuardedProcess, ...]
    _stack: ExitStack

    def close(self) -> None:
        """End these engines, and remove the model if it was made for them. May be called twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def engines(
    n: int = 1, *, kind: str = "embedded", model: str | Path | None = None, dtype: str = "float32", **settings: Any
) -> Engines:
    """Start ``n`` engines in processes of their own, at free ports of 127.0.0.1, and wait until they are healthy.

    ::

        with tx.testing.engines(2) as (a, b):
            sender = tx.WeightSender(tx.make_transport("disk", root="updates"), tx.connect(a, b))

    Args:
        n: number of engines.
        kind: ``"embedded"``, ``"vllm"``, ``"sglang"`` or another kind that has a server. A vLLM or SGLang that this
            environment lacks runs in the one of `torchrl-ext serve`, which is installed once, for a CPU.
        model: checkpoint directory; None makes a tiny one (`make_tiny_lm`).
        dtype: dtype of the served weights.
        settings: further fields of the kind's `EngineSpec`, such as ``threads``; others become the server's arguments.

    Returns:
        Their addresses, a tuple with `Engines.model` and `Engines.close`.

    Raises:
        ConfigError: there is no such kind, or it does not take these settings; nothing was started.
        EngineError, DeadlineError: an engine did not start; the others were ended.
    """
    make = makes.part(kind, "server")
    if n < 1:
        raise ConfigError(f"{n} engines cannot be started", expected="1 or more")
    with ExitStack() as stack:
        chosen = {"dtype": dtype, **settings_for(kind)}
        if model is None:
            model = make_tiny_lm(stack.enter_context(TemporaryDirectory(prefix="torchrl-ext-")))
            chosen |= {"threads": 1} if "threads" in make.settings() else {}  # of a model this small
        processes: list[GuardedProcess] = []
        stack.callback(stop_all, processes)
        for _ in range(n):
            processes.append(GuardedProcess(make.of(model, {**chosen, **settings})))
        wait_until_healthy(processes)
        running = Engines(process.url for process in processes)
        running.model, running.processes, running._stack = Path(model), tuple(processes), stack.pop_all()
    return running
