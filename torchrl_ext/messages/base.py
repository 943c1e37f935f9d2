"""What every message is: frozen, written to one JSON object, and read back with every field checked."""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self, get_type_hints

import torchrl_ext
from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.messages.fields import Rule, refused, rule_of
from torchrl_ext.types import Info

__all__ = ["FORMAT", "Message", "read"]

FORMAT = 1
"""The number of this protocol; `docs/formats.md` says what changed with each."""

_UNNUMBERED = "without a number, as earlier releases of torchrl_ext and programs of others send them,"
_KINDS: dict[str, type[Message]] = {}


@functools.cache
def _rules(kind: type[Message]) -> dict[str, Rule]:
    """The rule of each field."""
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: rule_of(hints[one.name]) for one in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class Message(ABC):
    """One step of an update, or a question.

    Attributes:
        kind: the name of the message in JSON.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        _KINDS[cls.kind] = cls

    def to_json(self) -> Info:
        """The message as a JSON object."""
        written = {name: rule.write(getattr(self, name)) for name, rule in _rules(type(self)).items()}
        return {"format": FORMAT, "release": torchrl_ext.__version__, "kind": self.kind, **written}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Inverse of `to_json` for a message of this class.

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
        """Hold against their bounds what a field has inside.

        Raises:
            ConfigError: it does not fit.
        """


def read(told: Any) -> Message:
    """The message that a JSON object is.

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
