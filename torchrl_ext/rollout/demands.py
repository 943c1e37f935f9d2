"""Weight versions that a request demands: every returned token is of at least, or exactly, this version.

`Admission` checks demands in servers with our plugin, by headers and for the base weights only.
`torchrl_ext.rollout.requests` also checks each token, because other servers ignore the headers.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.rollout.generation import UNKNOWN_VERSION, Generation, version_number
from torchrl_ext.types import Info

__all__ = ["CONFLICT", "Admission", "Demand", "Unmet", "at"]

CONFLICT = 409
"""The HTTP status of an engine whose weights do not meet a demand."""

_MIN, _EXACT = "x-torchrl-ext-min-version", "x-torchrl-ext-exact-version"
_MOST_DIGITS = 18

_Asgi = Callable[..., Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The oldest weight version that a request accepts, or the only one if ``exact``."""

    version: int
    exact: bool = False

    @classmethod
    def of(cls, min_version: int | None, exact_version: int | None) -> Demand | None:
        """Return the demand for these versions; None without one.

        Raises:
            ConfigError: both are given, or one is not a whole number from 0 on.
        """
        if min_version is not None and exact_version is not None:
            raise ConfigError("a request demands both a min_version and an exact_version", expected="one of them")
        version = min_version if exact_version is None else exact_version
        if version is not None and (type(version) is not int or version < 0):
            raise ConfigError(f"a request demands weight version {version!r}", expected="a whole number from 0 on")
        return None if version is None else cls(version=version, exact=exact_version is not None)

    @classmethod
    def of_headers(cls, headers: Iterable[tuple[bytes, bytes]]) -> Demand | None:
        """Return the demand in a request's headers, as ASGI passes them; None without one.

        Raises:
            ConfigError: a header is repeated or not a decimal number, or both are there.
        """
        found: dict[str, int] = {}
        for name, value in ((name.decode("latin-1").lower(), value) for name, value in headers):
            if name in (_MIN, _EXACT):
                if name in found or not (value.isdigit() and len(value) <= _MOST_DIGITS):
                    what = f"the header {name} is {value.decode('latin-1')!r}"
                    raise ConfigError(what, expected="one decimal number")
                found[name] = int(value)
        return cls.of(found.get(_MIN), found.get(_EXACT))

    @property
    def headers(self) -> dict[str, str]:
        """The header that carries this demand."""
        return {_EXACT if self.exact else _MIN: str(self.version)}

    def met_by(self, version: int) -> bool:
        """Return whether weights of this version meet the demand; `UNKNOWN_VERSION` never does."""
        return version == self.version or (version > self.version and not self.exact)

    def check(self, generations: Iterable[Generation], url: str) -> None:
        """Raise `Unmet` if the engine at ``url`` returned a token that does not meet the demand."""
        for version in (version for one in generations for version in one.token_versions()):
            if not self.met_by(version):
                raise Unmet(url, self, version)

    def __str__(self) -> str:
        return f"version {self.version}" + ("" if self.exact else " or newer")


class Unmet(EngineRefusedError):
    """An engine does not meet a demand.

    Attributes:
        version: the engine's version, or `UNKNOWN_VERSION`.
        lost: whether it is beyond the only version, and can never meet the demand.
    """

    def __init__(self, who: str, demand: Demand, version: int) -> None:
        super().__init__(at(who, version), expected=str(demand), status=CONFLICT)
        self.version, self.lost = version, demand.exact and version > demand.version


def at(who: str, version: int) -> str:
    """Return a sentence that says which version an engine is at."""
    return f"{who} is at {'an unknown weight version' if version == UNKNOWN_VERSION else f'weight version {version}'}"


class Admission:
    """ASGI middleware: a ``POST`` whose demand the weights in service do not meet gets 409, and a bad header 400.

    It checks an exact demand again when the answer begins, because an update may have landed since.

    Args:
        app: the application behind it.
        label: returns the label of the weights in service.
        shape: makes an error's body, in the server's form, of its message, type, parameter and code; default: vLLM's.
            A 409 also has the label, as ``weight_version``.
    """

    def __init__(
        self,
        app: _Asgi,
        label: Callable[[], Awaitable[str | None]],
        shape: Callable[[Info], Info] = lambda row: {"error": row},
    ) -> None:
        self._app, self._label, self._shape = app, label, shape

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        try:
            posted = scope["type"] == "http" and scope["method"] == "POST"
            demand = Demand.of_headers(scope["headers"]) if posted else None
        except ConfigError as error:
            await self._refuse(send, 400, "BadRequestError", str(error))
            return
        refused = demand is not None and await self._refused(send, demand)

        async def send_if_met(message: Any) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and demand is not None and demand.exact:
                refused = await self._refused(send, demand)
            if not refused:
                await send(message)

        if not refused:
            await self._app(scope, receive, send_if_met)

    async def _refused(self, send: Any, demand: Demand) -> bool:
        """Return whether the weights in service do not meet the demand; if so, the refusal is sent."""
        label = await self._label() or ""
        version = version_number(label)
        if demand.met_by(version):
            return False
        error = Unmet("this engine", demand, version)
        await self._refuse(send, CONFLICT, "ConflictError", str(error), weight_version=label)
        return True

    async def _refuse(self, send: Any, status: int, kind: str, message: str, **more: str) -> None:
        body = {**self._shape({"message": message, "type": kind, "param": None, "code": status}), **more}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})
