"""SkyRL's inference architecture: tokens through a router, control calls to every engine, by one client."""

from __future__ import annotations

import asyncio
import copy
import re
from typing import Any

import torchrl_ext as tx
from torchrl_ext.cli.demo.policy import MAX_TOKENS
from torchrl_ext.cli.demo.stage import Stage
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.serving.routing import Routing

__all__ = ["run"]

_WAIT_S = 120.0
_LONG = 200  # tokens of a generation that is still under way when something happens to its engine
_SESSIONS = 4
_TRIES = 30
_RUNNING = re.compile(r"^vllm:num_requests_running\S* (\S+)", re.MULTILINE)
_BUSY_S = 0.005


def run(stage: Stage) -> None:
    """Pause, resume, update and put to sleep two engines behind a router while rollouts are in flight."""
    urls = stage.engines(2)
    with Routing.over(*urls, **settings_for_router(stage.kind, stage.say)) as routing:
        client = RemoteInferenceClient.of(routing, timeout_s=_WAIT_S)
        wrong = RemoteInferenceClient(proxy_url=routing.url, server_urls=[routing.url], kind=stage.kind)
        stage.refuses(
            "a router among server_urls is refused: it would pass a pause on to one engine",
            lambda: asyncio.run(wrong.pause()),
            routing.url,
        )
        asyncio.run(_update_under_way(stage, client))
        asyncio.run(_pauses(stage, copy.copy(client)))
        asyncio.run(_colocated(stage, client))
        asyncio.run(_sessions(stage, client))
    stage.says_the_same("an engine, at the end", urls)


async def _pauses(stage: Stage, client: RemoteInferenceClient) -> None:
    """Pause in each mode while a generation runs; greedily, so that what it would have said is known."""
    expected = await _generated(client, stage.policy.prompts[0], _LONG)
    for mode, ended in (("keep", False), ("wait", True), ("abort", False)):
        for _ in range(_TRIES):  # how fast an engine is, and how late a pause comes, is luck
            running = asyncio.ensure_future(_generated(client, stage.policy.prompts[0], _LONG))
            met = await _busy(client, running)
            await client.pause(mode=mode)
            if ended and met:
                await asyncio.wait_for(asyncio.shield(running), _WAIT_S)
            if met and running.done() is ended:
                break
            await client.resume()
            await running
        what = "has ended before anything is resumed" if ended else "waits for resume"
        stage.check(f"pause {mode!r}: what runs {what}", running.done(), ended)
        await client.resume()
        stage.check(f"pause {mode!r}: it has the tokens of a generation without a pause", await running, expected)


async def _update_under_way(stage: Stage, client: RemoteInferenceClient) -> None:
    """Update while generations are frozen, which then go on at the same token with the new weights."""
    sender = tx.WeightSender(tx.make_transport("collective"), client.fleet())
    sender.register_model(stage.policy.model)
    try:
        old = stage.synced("a broadcast", await asyncio.to_thread(sender.update_weights)).version
        prompts, met = stage.policy.prompts, False
        for _ in range(_TRIES):  # a pause that comes before the first token or after the last one is luck
            stage.policy.train()
            running = asyncio.ensure_future(_answered(client, prompts, _LONG, ["one"] * len(prompts)))
            await _busy(client, running)
            await client.pause(mode="keep")
            updated = await asyncio.to_thread(sender.update_weights)
            report = stage.synced("a broadcast while rollouts are frozen", updated)
            await client.resume()
            versions = (await running)["weight_versions"]
            whole = [len(one) for one in versions] == [_LONG] * len(prompts)
            stage.check("rollouts in flight lose no token", whole)
            known = all(one == sorted(one) and {*one} <= {old, report.version} for one in versions)
            stage.check("each of their tokens has its version, the old one first", known)
            met = any({*one} == {old, report.version} for one in versions)
            if met:
                break
            old = report.version
        stage.check("some of them began with the old version and ended with the new one", met)
        labels = {*(await client.weight_versions()).values()}
        stage.check("every engine was reached, not one per call", labels, {str(report.version)})
    finally:
        sender.shutdown()


async def _colocated(stage: Stage, client: RemoteInferenceClient) -> None:
    """Take SkyRL's order of a colocated step: sleep, train, wake the weights, update, wake the cache."""
    sender = tx.WeightSender(tx.make_transport("ipc"), client.fleet())
    sender.register_model(stage.policy.model)
    try:
        await client.sleep(level=2)
        stage.policy.train()
        await client.wake_up(tags=["weights"])
        stage.synced("shared memory, between sleep and wake_up", await asyncio.to_thread(sender.update_weights))
        await client.wake_up(tags=["kv_cache"])
        prompts = stage.policy.prompts
        found = (await _answered(client, prompts, MAX_TOKENS))["response_ids"]
        stage.check(
            "after sleep and wake_up tokens are the policy's", found, [list(one) for one in stage.policy.says()]
        )
    finally:
        sender.shutdown()


async def _sessions(stage: Stage, client: RemoteInferenceClient) -> None:
    """Give each engine a version of its own for a moment, which tells who answered."""
    for url in client.server_urls:
        sender = tx.WeightSender(tx.make_transport("disk", root=stage.folder / "sessions"), tx.connect(url))
        try:
            stage.synced("one engine alone", await asyncio.to_thread(sender.update_weights, stage.policy.model))
        finally:
            sender.shutdown()
    prompts = [stage.policy.prompts[0]] * _SESSIONS
    by_session = []
    for session in range(_SESSIONS):
        found = await _answered(client, prompts, 1, [f"trajectory-{session}"] * len(prompts))
        by_session.append({version for one in found["weight_versions"] for version in one})
    stage.check("requests of one session stay on one engine", [len(one) for one in by_session], [1] * _SESSIONS)


async def _answered(client: RemoteInferenceClient, prompts: Any, count: int, sessions: Any = None) -> Any:
    sampling = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
    batch = {"prompt_token_ids": prompts, "sampling_params": sampling, "session_ids": sessions}
    return await client.generate(batch)


async def _generated(client: RemoteInferenceClient, prompt: list[int], count: int) -> Any:
    return (await _answered(client, [prompt], count))["response_ids"][0]


async def _busy(client: RemoteInferenceClient, running: asyncio.Future[Any]) -> bool:
    """Wait until some engine generates for ``running``; whether one did before it was over."""
    sessions = [HTTPSession(url, timeout_s=_WAIT_S) for url in client.server_urls]
    while not running.done():
        if any([await asyncio.to_thread(_generates, client.kind, session) for session in sessions]):
            return True
        await asyncio.sleep(_BUSY_S)
    return False


def _generates(kind: str, session: HTTPSession) -> bool:
    """Return whether an engine works on a request. ``/load`` of vLLM counts only where it was told to."""
    if kind == "embedded":
        return bool(session.get("/load")["server_load"])
    counts = _RUNNING.findall(session.call("GET", "/metrics").text)
    return any(float(count) for count in counts)
