"""What the fields of messages may be: a type of Python's, and the rule that the value in JSON obeys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any

from torchrl_ext.errors import ConfigError
from torchrl_ext.types import Info, ParamMeta

__all__ = [
    "Count", "Digests", "Fate", "Flag", "How", "ListOrNone", "Object", "ObjectOrNone", "Params", "Rule", "Text",
    "TextOrNone", "WorldSize", "check_offered", "refused", "rule_of",
]  # fmt: skip

_LONGEST_S = 86_400.0
_MOST = 2**62


@dataclass(frozen=True)
class Rule:
    """What a field may be.

    Attributes:
        kinds: exact types of the value in JSON.
        expected: the rule in words.
        valid: further bounds.
        read: makes the field of the JSON value.
        write: makes the JSON value of the field.
    """

    kinds: tuple[type, ...]
    expected: str
    valid: Callable[[Any], bool] = lambda value: True
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value

    def accepts(self, value: Any) -> bool:
        """Whether a value of JSON obeys the rule."""
        return type(value) in self.kinds and self.valid(value)


def _read_params(rows: list[Any]) -> tuple[ParamMeta, ...]:
    return tuple(ParamMeta.from_json(row) for row in rows)


def _write_params(params: tuple[ParamMeta, ...]) -> list[Any]:
    return [meta.to_json() for meta in params]


def _short(value: Any) -> bool:
    return value is None or len(value) <= 4096


def rule_of(hint: Any) -> Rule:
    """The rule of an annotated type."""
    return hint.__metadata__[0]


Text = Annotated[str, Rule((str,), "text", _short)]
TextOrNone = Annotated[str | None, Rule((str, NoneType), "text, or null", _short)]
Count = Annotated[int, Rule((int,), "a whole number from 0", lambda value: 0 <= value < _MOST)]
Flag = Annotated[bool, Rule((bool,), "true or false")]
Object = Annotated[Info, Rule((dict,), "an object")]
ObjectOrNone = Annotated[Info | None, Rule((dict, NoneType), "an object, or null")]
ListOrNone = Annotated[list[Any] | None, Rule((list, NoneType), "a list, or null")]
WorldSize = Annotated[
    int | None, Rule((int, NoneType), "1 or more, or null", lambda value: value is None or 1 <= value <= 1 << 20)
]
How = Annotated[str, Rule((str,), "'once', 'never' or 'always'", lambda value: value in ("once", "never", "always"))]
Fate = Annotated[str, Rule((str,), "'gone' or 'reloaded'", lambda value: value in ("gone", "reloaded"))]
Digests = Annotated[
    Mapping[str, str],
    Rule((dict,), "digests by name", lambda value: all(isinstance(digest, str) for digest in value.values())),
]
Params = Annotated[
    tuple[ParamMeta, ...], Rule((list,), "[[name, dtype, [sizes]], ...]", read=_read_params, write=_write_params)
]

_OFFERED: dict[str, Rule] = {
    **dict.fromkeys(("root", "probe", "run_id", "host", "master_address", "backend"), rule_of(Text)),
    **dict.fromkeys(("base", "local_dir"), rule_of(TextOrNone)),
    **dict.fromkeys(("version", "bucket_bytes"), rule_of(Count)),
    "master_port": Rule((int,), "1 to 65535", lambda value: 1 <= value <= 65535),
    "timeout_s": Rule((int, float), f"seconds, above 0, at most {_LONGEST_S:g}", lambda value: 0 < value <= _LONGEST_S),
    "needs_base": rule_of(Flag),
    "wire": rule_of(Object),
    "params": Rule((list,), "a list"),
}
"""What the fields that several transports have may be, where they are there."""


def refused(what: str, name: str, value: Any, expected: str) -> ConfigError:
    """The error that names a field."""
    return ConfigError(f"{name} of {what} is {value!r:.80}", expected=expected, state="unchanged")


def check_offered(what: str, info: Mapping[str, Any]) -> None:
    """Hold the fields that several transports have against their rules.

    Raises:
        ConfigError: names the first that is something else.
    """
    for name in info.keys() & _OFFERED.keys():
        if not _OFFERED[name].accepts(info[name]):
            raise refused(what, name, info[name], _OFFERED[name].expected)
    if "wire" in info:
        check_offered(what, info["wire"])
