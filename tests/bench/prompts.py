"""``python -m tests.bench prompts``: the time from `InferenceClient.generate` to the first byte at an engine."""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.deadline import in_thread
from torchrl_ext.errors import EngineError
from torchrl_ext.rollout import client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the settings."""
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192, help="of each prompt")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Prompts that are read at once, as they are, beside a loop that reads token by token."""
    prompts = [torch.randint(0, 150_000, (args.tokens,)) for _ in range(args.prompts)]

    def one_by_one() -> float:
        with mock.patch.object(client, "checked_prompt", lambda prompt, index: tuple(int(token) for token in prompt)):
            return _first_byte_s(prompts)

    say(f"{args.prompts} prompts of {args.tokens} tokens")
    seconds = rounds({"at once": lambda: _first_byte_s(prompts), "token by token": one_by_one}, args.repeats)
    middle = {way: statistics.median(found) for way, found in seconds.items()}
    return {"seconds": middle, "ratio": ratio(seconds["at once"], seconds["token by token"])}


def _first_byte_s(prompts: list[Any]) -> float:
    with socket.create_server(("127.0.0.1", 0)) as engine:

        def first_byte() -> float:
            with engine.accept()[0] as connection:
                connection.recv(1)
                return time.perf_counter()

        arrived = in_thread(first_byte, "first-byte")
        began = time.perf_counter()
        asking = client.InferenceClient(f"127.0.0.1:{engine.getsockname()[1]}", max_concurrency=1)
        with contextlib.suppress(EngineError), contextlib.closing(asking):
            asking.generate(prompts)
        return arrived.result(60) - began
