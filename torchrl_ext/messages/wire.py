"""`Wire`: what one end of a transport says to the other, checked as it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from torchrl_ext.errors import ConfigError
from torchrl_ext.types import Info

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Wire"]


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen struct of JSON-safe fields; fields that it does not know are passed over."""

    def to_json(self) -> Info:
        """Return its fields as a JSON object."""
        return dict(msgspec.to_builtins(self))

    @classmethod
    def from_json(cls, info: Info, what: str) -> Self:
        """Make the struct of a JSON object that another process sent.

        Args:
            info: the object.
            what: names it in an error: ``"the offer of a disk transport"``.

        Raises:
            ConfigError: a field is missing, or of another type; it is named.
        """
        try:
            return msgspec.convert(info, type=cls, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{what} cannot be read: {error}", state="unchanged", hint="use one release of torchrl_ext on both ends"
            ) from error
