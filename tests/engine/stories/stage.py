"""The stage of a story: its engines, its policy, and the list of what was seen there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torchrl_ext.cli.demo.policy import MAX_TOKENS, Policy
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.errors import ConfigError
from torchrl_ext.registry import engines
from torchrl_ext.rollout.client import InferenceClient
from torchrl_ext.rpc.discovery import discover
from torchrl_ext.serving.server import start
from torchrl_ext.testing.tiny import make_tiny_lm
from torchrl_ext.types import Info, SyncReport

__all__ = ["Check", "Stage"]

_MAX_MODEL_LEN = 512


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was seen on engines, beside what it had to be.

    Attributes:
        what: what was looked at.
        held: whether it was as it had to be.
        seen: what was seen instead, where it was not.
    """

    what: str
    held: bool
    seen: str = ""


class Stage:
    """Gives a story its engines and its policy, and keeps what was checked; a context manager that ends the engines.

    Args:
        kind: of the engines to start: ``"embedded"``, ``"vllm"`` or ``"sglang"``.
        urls: engines that run already, to be used in place of started ones.
        model: checkpoint directory to start from; None makes a random tiny Qwen3.
        seed: of weights and changes.
        folder: for files, seen by engines too.

    Attributes:
        kind: of the engines.
        given: whether they ran already.
        folder: as given.
        checks: what was checked, in order.
        syncs: the report of every update.
    """

    def __init__(self, *, kind: str, urls: Sequence[str], model: str | None, seed: int, folder: Path) -> None:
        found = discover(*urls) if urls else []
        self._urls, self._model, self._seed = [info.url for info in found], model, seed
        self.kind = found[0].kind if found else kind
        self._served = found[0].model if found else ""
        self.folder, self.given = folder, bool(urls)
        if model is None:
            torch.set_num_threads(1)  # products this small lose more to waiting threads than they gain
        self.checks: list[Check] = []
        self.syncs: list[SyncReport] = []
        self._console, self._ends = Console(stderr=True), contextlib.ExitStack()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: Any) -> None:
        self._ends.close()

    @property
    def verified(self) -> bool:
        """Whether everything that was checked held, and there was something to check."""
        return bool(self.checks) and all(check.held for check in self.checks)

    @cached_property
    def model_dir(self) -> str:
        """The checkpoint that engines and policy start from.

        Raises:
            ConfigError: engines are given, and what they serve is no directory here.
        """
        if self._model is not None:
            return self._model
        if self.given:
            if not (Path(self._served) / "config.json").is_file():
                raise ConfigError(
                    f"{self._urls[0]} serves {self._served!r}, which is no checkpoint directory on this machine",
                    hint="name the directory that it was started from with --model",
                )
            return self._served
        return str(make_tiny_lm(self.folder / "model", seed=self._seed, max_position_embeddings=_MAX_MODEL_LEN))

    def other_model(self, name: str, **config: Any) -> str:
        """Return another checkpoint; ``config`` as for `make_tiny_lm`."""
        return str(make_tiny_lm(self.folder / name, **{"max_position_embeddings": _MAX_MODEL_LEN, **config}))

    @cached_property
    def policy(self) -> Policy:
        """The policy that the engines follow."""
        return Policy(self.model_dir, seed=self._seed)

    @cached_property
    def environment(self) -> Info:
        """The settings with which the stage's engines start in an environment that has them."""
        return settings_for(self.kind, report=self.say)

    def engines(self, count: int) -> list[str]:
        """Return the addresses of running engines: those that were given, or ``count`` that are started here."""
        if self.given:
            return list(self._urls)
        self.say(f"starting {count} {self.kind} engine(s)")
        make = engines.part(self.kind, "server")
        wanted: Info = {"dtype": "float32", "max_model_len": _MAX_MODEL_LEN, **self.environment}
        if self._model is None and "threads" in make.settings():
            wanted["threads"] = 1
        with ThreadPoolExecutor(count) as pool:
            started = [pool.submit(start, make(self.model_dir, **wanted)) for _ in range(count)]
            for one in started:
                one.exception()  # all have started or failed before any is used, so that each is ended
        servers = [one.result() for one in started if one.exception() is None]
        for server in servers:
            self._ends.enter_context(server)
        for one in started:
            one.result()
        return [server.url for server in servers]

    def say(self, what: str) -> None:
        """Show what goes on now."""
        self._console.print(what, soft_wrap=True, highlight=False)

    def check(self, what: str, seen: Any, expected: Any = True) -> None:
        """Note whether ``seen`` equals ``expected``, and go on."""
        held = bool(seen == expected)
        self.checks.append(Check(what=what, held=held, seen="" if held else f"{seen!r}, not {expected!r}"[:500]))
        mark = "[green]yes[/]" if held else "[bold red]NO[/]"
        self._console.print(f"{mark}  {what}", soft_wrap=True, highlight=False)

    def refuses(self, what: str, call: Any, *words: str) -> None:
        """Note whether ``call()`` is refused with a `ConfigError` that has these words."""
        try:
            call()
        except ConfigError as error:
            self.check(what, [word for word in words if word not in str(error)], [])
        else:
            self.check(what, "it was not refused", "a ConfigError")

    def synced(self, what: str, report: SyncReport) -> SyncReport:
        """Note an update: every engine has to serve its version, proved."""
        self.syncs.append(report)
        rows = [(row.state, row.version) for row in report.engines]
        self.check(
            f"{what}: version {report.version} is served, verified",
            (report.verified, rows),
            (True, [("serving", report.version)] * len(rows)),
        )
        return report

    def says_the_same(self, who: str, urls: Sequence[str]) -> None:
        """Note whether each engine continues every prompt as the policy does."""
        for url in urls:
            client = InferenceClient(url, kind=self.kind)
            settings: Info = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
            found = client.generate(self.policy.prompts, **settings)
            client.close()
            self.check(f"{who}: its tokens are the policy's", [one.token_ids for one in found], self.policy.says())

    def conclude(self) -> None:
        """Show whether everything held."""
        held = sum(check.held for check in self.checks)
        verdict = "[bold green]verified[/]" if self.verified else "[bold red]NOT verified[/]"
        self._console.print(f"{held} of {len(self.checks)} checks held: {verdict}")

    def to_json(self, story: str, seconds: float) -> Info:
        """Return the document of ``demo --json``."""
        return {
            "verified": self.verified,
            "demo": story,
            "transport": ", ".join(dict.fromkeys(report.transport for report in self.syncs)),
            "engine": self.kind,
            "engines": self._urls,
            "seed": self._seed,
            "checks": [asdict(check) for check in self.checks],
            "syncs": [report.to_json() for report in self.syncs],
            "seconds": seconds,
        }
