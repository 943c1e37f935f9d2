"""Collectors that count the versions of a policy."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

__all__ = ["Collectors", "bump"]

log = logging.getLogger("torchrl_ext")


class Collectors:
    """Collectors of one sender, held weakly, each once."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []

    def add(self, collector: Any) -> None:
        """Count with ``collector`` too, unless it is known."""
        if all(known() is not collector for known in self._references):
            self._references.append(weakref.ref(collector))

    def bump(self) -> None:
        """Bump each; see `bump`."""
        bump(reference() for reference in self._references)


def bump(collectors: Iterable[Any]) -> None:
    """Increment the policy version of each collector once; None stands for one that is gone.

    The engines have the weights, whatever a collector makes of it: one that raises is logged, and the others are told.
    """
    seen: set[int] = set()
    for collector in list(collectors):
        if collector is None or id(collector) in seen:  # its truth would be its length, and an endless one has none
            continue
        seen.add(id(collector))
        try:
            collector.increment_version()
        except Exception:
            log.error("a collector did not take note of new weights, which are in service", exc_info=True)
