"""``python -m tests.bench calls``: processor time of control calls from many threads, on the loop that they share."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.processes import running_python
from torchrl_ext.bench.runner import ratio, rounds
from torchrl_ext.rpc.http import HTTPSession

_SERVER = """
from torchrl_ext.testing import FakeEngine
with FakeEngine("vllm") as fake:
    print(fake.url, flush=True)
    input()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the settings."""
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--calls", type=int, default=20, help="of each thread")


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Calls on the shared loop, beside calls that have an event loop each; the server is another process."""
    with running_python(_SERVER, fresh=True) as server:
        session = HTTPSession(server.stdout.readline().strip())

        def spent(call: Callable[[], Any]) -> float:
            def calls() -> None:
                for _ in range(args.calls):
                    call()

            threads = [threading.Thread(target=calls) for _ in range(args.threads)]
            began = time.process_time()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return (time.process_time() - began) / (args.threads * args.calls)

        say(f"{args.threads} threads of {args.calls} calls")
        ways = {
            "shared loop": lambda: spent(lambda: session.get("/is_paused")),
            "loop per call": lambda: spent(lambda: asyncio.run(session.exchange("GET", "/is_paused"))),
        }
        seconds = rounds(ways, args.repeats)
    middle = {way: statistics.median(found) for way, found in seconds.items()}
    return {"seconds": middle, "ratio": ratio(seconds["shared loop"], seconds["loop per call"])}
