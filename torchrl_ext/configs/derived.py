"""Config dataclasses read off constructors: a parameter, its default and its help are written once, at the class.

The types are those that OmegaConf can check: a path is a string, and what may have several simple types is `Any`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar

from torchrl_ext.registry import transports

__all__ = ["Parameter", "TransportConfig", "make_config", "parameters", "transport_config"]

_SIMPLE = (bool, int, float, str)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a constructor.

    Attributes:
        name: its name.
        type: what OmegaConf checks.
        default: `dataclasses.MISSING` where there is none.
        help: what the docstring says of it, as one line.
    """

    name: str
    type: Any
    default: Any = MISSING
    help: str = ""

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING

    @property
    def type_name(self) -> str:
        """The type as one writes it."""
        return self.type.__name__ if isinstance(self.type, type) else str(self.type).replace("typing.", "")


@dataclass(kw_only=True)
class TransportConfig:
    """Settings of one transport: `transport_config` makes a subclass per name."""

    name: ClassVar[str]

    def make(self, **settings: Any) -> Any:
        """The transport.

        Args:
            settings: further ones, or others than the fields have.

        Raises:
            ConfigError: settings that cannot work.
        """
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return transports.make(self.name, **{**own, **settings})


def transport_config(name: str) -> type[TransportConfig]:
    """The config dataclass of a transport: one keyword-only field per parameter, required where that is.

    Raises:
        ConfigError: no such transport, or the imports of its class fail.
    """
    return _transport_config(transports.load(name))


@functools.cache
def _transport_config(cls: type[Any]) -> type[TransportConfig]:
    return make_config(
        _title(cls.name), parameters(cls), bases=(TransportConfig,), name=cls.name, __doc__=inspect.getdoc(cls)
    )


def make_config(title: str, fields: Iterable[Parameter], *, bases: tuple[type, ...] = (), **space: Any) -> type[Any]:
    """A dataclass with a field per parameter; each has its help in ``metadata["help"]``.

    Args:
        title: its name.
        fields: the parameters.
        bases: dataclasses that it extends.
        space: attributes of the class.
    """
    rows = [
        (field.name, field.type, dataclasses.field(default=field.default, metadata={"help": field.help}))
        for field in fields
    ]
    return dataclasses.make_dataclass(
        title, rows, bases=bases, namespace={"__module__": __name__, **space}, kw_only=True
    )


def parameters(call: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The named parameters of a class or a function, in order."""
    hints = typing.get_type_hints(call.__init__ if inspect.isclass(call) else call)
    texts = _help(call)
    return tuple(
        Parameter(
            name,
            _checkable(hints.get(name, Any)),
            MISSING if parameter.default is inspect.Parameter.empty else parameter.default,
            texts.get(name, ""),
        )
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def _checkable(hint: Any) -> Any:
    """The part of a type that OmegaConf can check; it cannot merge a mapping into an optional typed one."""
    if typing.get_origin(hint) in (Mapping, dict):
        return dict[str, Any]
    members = (hint,) if typing.get_origin(hint) is typing.Literal else typing.get_args(hint) or (hint,)
    simple = {member for member in members if member in _SIMPLE}
    simple |= {type(typing.get_args(member)[0]) for member in members if typing.get_origin(member) is typing.Literal}
    if len(simple) != 1:
        return Any
    (kind,) = simple
    return kind | None if type(None) in members else kind


def _help(call: Callable[..., Any]) -> dict[str, str]:
    """Parameter -> what the ``Args:`` of the docstring say of it, as one line."""
    block = re.search(r"^Args:\n((?: +.*\n?)+)", inspect.getdoc(call) or "", re.MULTILINE)
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", block[1] if block else ""):
        names, _, text = entry.partition(":")
        texts |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return texts


def _title(name: str) -> str:
    return f"{''.join(part.title() for part in name.split('_'))}TransportConfig"


def __getattr__(name: str) -> Any:
    """The generated classes by their names, so that instances can be pickled."""
    for known in transports.names():
        if name == _title(known):
            return transport_config(known)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
