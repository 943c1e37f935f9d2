"""Bytes from outside, made worse: what a parser has to answer with an error of ours, or with what is right anyway."""

from __future__ import annotations

import copy
import json
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl_ext.base.errors import WeightSyncError

HOSTILE = [
    None, True, -1, 0, 1, 7, 2**31, 2**40, 2**63, 10**400, 0.5, float("nan"), float("inf"), "", "x", "7", "../x",
    "complex128", "int4", "float32", "quint8", "Tensor", "nn.Module", "\0", "²", "9" * 5000, [], [1], [[]], [2**40],
    [2**62, 4], [-1], [True], ["2"], [float("inf")], {}, {"name": "auto"}, {"name": []},
    {"name": "ulp", "block_log2": "x"}, {"name": "auto", "level": "x"}, {"name": "auto", "level": None},
    {"name": "bitmap", "level": True}, [[[[[[]]]]]],
]  # fmt: skip


@contextmanager
def at_most_more_bytes(count: int) -> Iterator[None]:
    """Let this process map ``count`` bytes more than now and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused_or_right(parse: Callable[..., Any], *given: Any, right: Callable[[Any], bool] = lambda found: True) -> bool:
    """Whether ``parse(*given)`` raised an error of ours; where it returned, what it returned has to be right."""
    try:
        found = parse(*given)
    except WeightSyncError as error:
        assert str(error)
        return True
    assert right(found)
    return False


def worse_bytes(data: bytes, chance: random.Random) -> bytes:
    """A few bits or bytes changed, the end lost, or something more."""
    bad = bytearray(data)
    kind = chance.randrange(4)
    if kind == 0:
        return bytes(bad[: chance.randrange(len(bad) + 1)])
    if kind == 1:
        return bytes(bad) + chance.randbytes(chance.randrange(1, 20))
    for _ in range(chance.randrange(1, 4)):
        if bad:
            bad[chance.randrange(len(bad))] = chance.randrange(256)
    return bytes(bad)


def worse_json(value: Any, chance: random.Random) -> Any:
    """One value, somewhere within, replaced, removed, repeated or moved."""
    value = copy.deepcopy(value)
    spots = list(_spots(value))
    if not spots:
        return chance.choice(HOSTILE)
    place, key = chance.choice(spots)
    kind = chance.randrange(5)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, list):
        place.insert(key, copy.deepcopy(place[key]))
    elif kind == 1:
        place[chance.choice(["x", "", "../x"])] = place.pop(key)
    else:
        place[key] = chance.choice(HOSTILE)
    return value


def worse_text(value: Any, chance: random.Random) -> bytes:
    """JSON of a value made worse; at times the text itself is."""
    if chance.random() < 0.1:
        return worse_bytes(json.dumps(value).encode(), chance)
    return json.dumps(worse_json(value, chance)).encode()


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _spots(inner)
