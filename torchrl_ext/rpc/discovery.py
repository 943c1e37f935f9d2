"""Find out which engine runs behind an address, and make the client for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

from torchrl_ext.deadline import in_thread
from torchrl_ext.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineRefusedError,
    EngineUnreachableError,
    WeightSyncError,
    why,
)
from torchrl_ext.registry import engines
from torchrl_ext.rpc.engines.base import HTTPEngine
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.rpc.http import HTTPSession, normalise_urls
from torchrl_ext.rpc.router import refuse_router
from torchrl_ext.rpc.server_info import is_sglang_info, parse_server_info
from torchrl_ext.types import EngineInfo

__all__ = ["connect", "discover"]

_TIMEOUT_S = 30.0
_SHORTEST_S = 0.05  # a call gets this long, however near the deadline is
_GRACE_S = 0.5  # calls end by themselves at the deadline, with errors that say more
_MAX_BODY_BYTES = 16 << 20
_WANTS_KEY, _UNAVAILABLE = {401, 403}, 501


def discover(
    *addresses: str, timeout_s: float = _TIMEOUT_S, api_key: str | tuple[str, ...] | None = None
) -> list[EngineInfo]:
    """Ask the engines at ``addresses``, all at the same time, what they are; return the answers in that order.

    Args:
        addresses: ``host:port``, ``[ipv6]:port`` or URLs of engines, not of routers.
        timeout_s: deadline of all questions together, in seconds.
        api_key: sent as a bearer token; see `HTTPSession` for several.

    Raises:
        ConfigError: no address, one twice, one that is none, or one of a router.
        EngineUnreachableError: nobody listens at an address.
        EngineRefusedError: what listens there describes no engine; the message has the answers of both routes.
        DeadlineError: no answer in time.
        EngineError: several addresses fail, for different reasons. The message of any error has every address that
            fails.
    """
    answers = _answers(addresses, timeout_s, api_key)
    _raise(answers)
    return [answer for answer in answers.values() if isinstance(answer, EngineInfo)]


def _answers(
    addresses: Sequence[str], timeout_s: float, api_key: str | tuple[str, ...] | None
) -> dict[str, EngineInfo | WeightSyncError]:
    """Return what each engine is, or why it does not say so, by its base address and in the order given."""

    def ask(url: str) -> EngineInfo:
        session = HTTPSession(url, timeout_s=timeout_s, api_key=api_key, max_body_bytes=_MAX_BODY_BYTES)
        return _describe(session, api_key, time.monotonic() + timeout_s)

    jobs = {url: in_thread(partial(ask, url), f"discover {url}") for url in normalise_urls(addresses)}
    until = time.monotonic() + timeout_s + _GRACE_S
    found: dict[str, EngineInfo | WeightSyncError] = {}
    for url, job in jobs.items():
        if not wait([job], max(0.0, until - time.monotonic())).done:
            found[url] = DeadlineError(
                f"no answer within {timeout_s:g} s from {url} to what it is",
                hint="look at the engine's log, or raise timeout_s",
            )
            continue
        try:
            found[url] = job.result()
        except (EngineError, DeadlineError) as error:
            found[url] = error
    return found


def _raise(answers: Mapping[str, EngineInfo | WeightSyncError]) -> None:
    """Raise one error that names every address that failed; nothing where none did."""
    failed = [answer for answer in answers.values() if isinstance(answer, WeightSyncError)]
    if len(failed) > 1:
        kinds = {type(error) for error in failed}
        first, kind = failed[0], kinds.pop() if len(kinds) == 1 else EngineError
        causes = "; ".join(map(why, failed))
        what = f"{causes}; {len(failed)} of {len(answers)} engines do not say what they are"
        raise kind(what, expected=first.expected, hint=first.hint)
    if failed:
        raise failed[0]


def connect(
    *addresses: str,
    timeout_s: float = _TIMEOUT_S,
    api_key: str | tuple[str, ...] | None = None,
    data_parallel_size: int = 1,
    missing: str = "raise",
    **settings: Any,
) -> Fleet:
    """Return one client for the engines at ``addresses``, whatever their kinds.

    Args:
        addresses: as for `discover`.
        timeout_s: deadline of each short call, in seconds.
        api_key: sent as a bearer token; see `HTTPSession` for several.
        data_parallel_size: how many addresses in a row are servers of one deployment; see `Fleet`.
        missing: ``"raise"``, or ``"lose"``: engines that do not answer belong to the fleet as lost, and come back when
            they answer, as in `Fleet`. They are taken to be of the others' kind; where these are of several kinds, or
            none answers, the error is raised.
        settings: for the client of each engine, such as ``pause_mode``.

    Raises:
        ConfigError: an engine of a kind that has no client, or settings that it does not take.
        EngineError, DeadlineError: as for `discover`.
    """
    if missing not in ("raise", "lose"):
        raise ConfigError(f"there is no missing={missing!r}", expected="'raise' or 'lose'")
    answers = _answers(addresses, timeout_s, api_key)
    kinds = {answer.kind for answer in answers.values() if isinstance(answer, EngineInfo)}
    if missing == "raise" or len(kinds) != 1 or any(isinstance(one, EngineRefusedError) for one in answers.values()):
        _raise(answers)
    settings = {"timeout_s": timeout_s, "api_key": api_key, **settings}
    made = [
        engines.make(answer.kind if isinstance(answer, EngineInfo) else min(kinds), url=url, **settings)
        for url, answer in answers.items()
    ]
    fleet = Fleet(made, data_parallel_size=data_parallel_size)
    silent = zip(made, answers.values(), strict=True)
    fleet._lose({engine: error for engine, error in silent if isinstance(error, WeightSyncError)})
    return fleet


def _describe(session: HTTPSession, api_key: str | tuple[str, ...] | None, until: float) -> EngineInfo:
    """Read ``/server_info`` in its structured form, or else ``/get_server_info``, its name in other servers."""
    answers, statuses = [], set()

    def get(route: str, query: Any = None) -> Any:
        return session.get(route, query=query, timeout_s=max(_SHORTEST_S, until - time.monotonic()))

    def client(kind: str) -> HTTPEngine:
        left_s = max(_SHORTEST_S, until - time.monotonic())
        return engines.make(kind, url=session.url, api_key=api_key, timeout_s=left_s, load_timeout_s=left_s)

    for route, query in (("/server_info", {"config_format": "json"}), ("/get_server_info", None)):
        try:
            told = get(route, query)
            refuse_router(session)  # it would describe one engine of many, under its own address
            if is_sglang_info(told):
                return client("sglang").info()
            return parse_server_info(
                session.url,
                told,
                world_size=_optional(lambda: get("/get_world_size")["world_size"]),
                weight_version=_optional(lambda: str(get("/weight_info")["weight_version"])) or "",
                followed=lambda: client("vllm").followed(),
            )
        except (EngineUnreachableError, DeadlineError):
            raise
        except EngineRefusedError as error:
            answers.append(why(error))
            statuses.add(error.status)
    if statuses & _WANTS_KEY:
        what, hint = "wants a key before it says what it is", "give its key as api_key"
        hint += ": it does not accept the one that it got" if api_key else ""
    elif _UNAVAILABLE in statuses:
        what = "does not implement what it is asked"
        hint = "is another kind of server, or a frontend without these routes, in front of the engine?"
    else:
        what = "does not say what engine it is"
        hint = "give the engine's own address, not a router's; vLLM answers only with VLLM_SERVER_DEV_MODE=1"
    raise EngineRefusedError(
        f"{'; '.join(answers)}; {session.url} {what}",
        expected="an answer to GET /server_info or GET /get_server_info",
        hint=hint,
        status=next(iter(statuses)) if len(statuses) == 1 else None,
    )


def _optional(read: Callable[[], Any]) -> Any:
    """Return what ``read`` finds, or None: an engine may lack this fact."""
    try:
        return read()
    except (EngineRefusedError, KeyError, TypeError, ValueError):
        return None
