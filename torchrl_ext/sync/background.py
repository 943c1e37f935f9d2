"""A call that runs beside a block and is waited for at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["in_background"]


@contextmanager
def in_background(call: Callable[..., None], info: Any, abort: Callable[[], None]) -> Iterator[None]:
    """Run ``call(info, abort)`` in a thread beside the block.

    Whichever side fails first aborts the other, so that neither waits for a party that has given up. The first cause
    is raised, the other one chained to it. ``call`` must have a deadline of its own.

    Args:
        call: takes ``info`` and a callable for failures that it sees early.
        info: handed to ``call``.
        abort: unblocks the block; may run in either thread, more than once.
    """
    failures: list[BaseException] = []
    foreseen = threading.Event()

    def early() -> None:
        foreseen.set()
        abort()

    def run() -> None:
        try:
            call(info, early)
        except BaseException as error:  # noqa: BLE001 - carried over to the waiting thread
            failures.append(error)
            abort()

    thread = threading.Thread(target=run, name="torchrl-ext-load", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        late = not failures and not foreseen.is_set()
        abort()
        thread.join()
        if failures and not late:
            raise failures[0] from error
        raise
    thread.join()
    if failures:
        raise failures[0]
