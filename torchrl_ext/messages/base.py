"""The base of all messages: frozen, written to one JSON object, and read back with every field checked by its rule."""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import torchrl_ext
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.types import Info, ParamMeta, Part

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = 3
"""The number of this protocol; `docs/formats.md` says what changed with each."""

_UNNUMBERED = "without a number, as earlier releases of torchrl_ext and programs of others send them,"
_KINDS: dict[str, type[Message]] = {}

_LONGEST_S = 86_400.0
_MOST = 2**62


@dataclass(frozen=True)
class Rule:
    """The rule that a field of a message obeys, with its conversion from JSON and to it.

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
        """Return whether a value of JSON obeys the rule."""
        return type(value) in self.kinds and self.valid(value)


def _read_params(rows: list[Any]) -> tuple[ParamMeta, ...]:
    return tuple(ParamMeta.from_json(row) for row in rows)


def _write_params(params: tuple[ParamMeta, ...]) -> list[Any]:
    return [meta.to_json() for meta in params]


def _read_part(told: Any) -> Part | None:
    return None if told is None else Part.from_json(told)


def _write_part(part: Part | None) -> Any:
    return None if part is None else part.to_json()


def _short(value: Any) -> bool:
    return value is None or len(value) <= 4096


def rule_of(hint: Any) -> Rule:
    """Return the rule of an annotated type."""
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
PartOrNone = Annotated[
    Part | None, Rule((dict, NoneType), "a base and names, or null", read=_read_part, write=_write_part)
]

_OFFERED: dict[str, Rule] = {
    **dict.fromkeys(("root", "probe", "run_id", "host", "master_address", "backend"), rule_of(Text)),
    **dict.fromkeys(("base", "local_dir"), rule_of(TextOrNone)),
    **dict.fromkeys(("version", "onto", "bucket_bytes"), rule_of(Count)),
    "master_port": Rule((int,), "1 to 65535", lambda value: 1 <= value <= 65535),
    "timeout_s": Rule((int, float), f"seconds, above 0, at most {_LONGEST_S:g}", lambda value: 0 < value <= _LONGEST_S),
    "needs_base": rule_of(Flag),
    "wire": rule_of(Object),
    "params": Rule((list,), "a list"),
}
"""The rules of the fields that several transports have, by name; a transport need not have them all."""


def refused(what: str, name: str, value: Any, expected: str) -> ConfigError:
    """Return the error for a field whose value breaks its rule; it names the field."""
    return ConfigError(f"{name} of {what} is {value!r:.80}", expected=expected, state="unchanged")


def check_offered(what: str, info: Mapping[str, Any]) -> None:
    """Check the fields that several transports have against their rules.

    Raises:
        ConfigError: a field breaks its rule; it is named.
    """
    for name in info.keys() & _OFFERED.keys():
        if not _OFFERED[name].accepts(info[name]):
            raise refused(what, name, info[name], _OFFERED[name].expected)
    if "wire" in info:
        check_offered(what, info["wire"])


@functools.cache
def _rules(kind: type[Message]) -> dict[str, Rule]:
    """Return the rule of each field of a message class, by the field's name."""
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: rule_of(hints[one.name]) for one in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class Message(ABC):
    """A message to the workers of an engine: one step of an update, or a question.

    Attributes:
        kind: the name of the message in JSON.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        _KINDS[cls.kind] = cls

    def to_json(self) -> Info:
        """Return the message as a JSON object."""
        written = {name: rule.write(getattr(self, name)) for name, rule in _rules(type(self)).items()}
        return {"format": FORMAT, "release": torchrl_ext.__version__, "kind": self.kind, **written}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Make a message of this class from its JSON object; the inverse of `to_json`.

        Raises:
            ConfigError: a field is missing, unknown, of another type or out of bounds; it is named.
        """
        what, rules = f"a {cls.kind!r} message", _rules(cls)
        unknown = sorted(told.keys() - rules.keys() - {"format", "release", "kind"})
        if unknown:
            raise ConfigError(
                f"{what} has a field {unknown[0]!r:.80}", expected=f"of {', '.join(rules) or 'none'}", state="unchanged"
            )
        missing = [one.name for one in fields(cls) if one.default is MISSING and one.name not in told]
        if missing:
            raise ConfigError(f"{what} has no {missing[0]}", expected=rules[missing[0]].expected, state="unchanged")
        values = {}
        for name in rules.keys() & told.keys():
            if not rules[name].accepts(told[name]):
                raise refused(what, name, told[name], rules[name].expected)
            try:
                values[name] = rules[name].read(told[name])
            except ManifestError as error:
                raise ConfigError(
                    f"{name} of {what}: {error.what}", expected=error.expected, state="unchanged"
                ) from None
        made = cls(**values)
        made.check()
        return made

    def check(self) -> None:  # noqa: B027 - most messages are what their fields are
        """Check what the fields have inside against its bounds.

        Raises:
            ConfigError: it does not fit.
        """


def read(told: Any) -> Message:
    """Return the message that a JSON object stands for.

    Raises:
        ConfigError: it is none, one of another release, or one with a field that cannot be; the field is named.
    """
    if not isinstance(told, Mapping):
        raise ConfigError(f"a message is {told!r:.80}", expected="an object", state="unchanged")
    if type(told.get("format")) is not int or told["format"] != FORMAT:
        release = told.get("release")
        sender = f"of release {release!r:.40}, format {told.get('format')!r:.40} of torchrl_ext"
        raise ConfigError(
            f"a message {sender if release else _UNNUMBERED} came to release {torchrl_ext.__version__}, "
            f"format {FORMAT}",
            state="unchanged",
            hint="use one release of torchrl_ext on both ends",
        )
    kind = told.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(
            f"there is no message of kind {kind!r:.80}", expected=f"one of {', '.join(_KINDS)}", state="unchanged"
        )
    return _KINDS[kind].from_json(told)
