"""Hundreds of generations through a real router while weights change twenty times."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict

import pytest
import torch

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import PROMPT, tiny_checkpoint, tiny_model
from tests.processes import WAIT_S
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.control.serving.routing import Routing

pytestmark = pytest.mark.engine

REQUESTS, SYNCS, SESSIONS = 512, 20, 64


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folders = [tiny_checkpoint(tmp_path_factory.mktemp("model") / name) for name in ("first", "second")]
    with (
        EmbeddedServer(folders[0], dtype="float32", threads=1) as first,
        EmbeddedServer(folders[1], dtype="float32", threads=1) as second,
    ):
        yield first, second


@pytest.mark.parametrize("mode", ["keep", pytest.param("abort", marks=pytest.mark.exhaustive)])
def test_requests_under_load_keep_versions_and_sessions(engines, tmp_path, mode):
    """512 requests in flight at a time, from before the first sync to after the last: a prompt is asked for again as
    soon as it is answered. Answers differ in length; a sync waits for the first token of the version before it."""
    urls = [engine.url for engine in engines]
    model = tiny_model(1)
    done, answers, seen, models = threading.Event(), [], set(), defaultdict(set)
    with Routing.over(*urls, **settings_for_router("vllm")) as routing:
        client = RemoteInferenceClient.of(routing, timeout_s=300)
        fleet = client.fleet(pause_mode=mode)
        sender = tx.WeightSender(tx.make_transport("disk", root=str(tmp_path)), fleet)
        sender.register_model(model)
        update = routing.following(sender.update_weights)
        first = update().version

        async def asks(i):
            """One of the requesters: generations of its session, and who answers that session."""
            session = f"session-{i % SESSIONS}"
            count = 0
            while not done.is_set() or not count:
                batch = {
                    "prompt_token_ids": [[*PROMPT[:4], i % 500]],
                    "sampling_params": {
                        "max_tokens": 6 + i % 24,
                        "temperature": 1.0,
                        "ignore_eos": True,
                        "logprobs": 0,
                    },
                    "session_ids": [session],
                }
                answers.append((6 + i % 24, await client.generate(batch)))
                seen.update(answers[-1][1]["weight_versions"][0])
                body = {"token_ids": PROMPT[:2], "sampling_params": {"max_tokens": 1}, "session_id": session}
                told = await client._post(client._requests, "/inference/v1/generate", body)
                models[session].add(told["model"])
                count += 1

        async def everybody():
            await asyncio.gather(*(asks(i) for i in range(REQUESTS)))

        failures = []

        def roll_out():
            try:
                asyncio.run(asyncio.wait_for(everybody(), 600))
            except Exception as error:  # noqa: BLE001 - failed below, in the test's own thread
                failures.append(error)

        rollouts = threading.Thread(target=roll_out)
        rollouts.start()
        last = first
        for _ in range(SYNCS):
            until = time.monotonic() + WAIT_S
            while last not in seen and rollouts.is_alive() and time.monotonic() < until:
                threading.Event().wait(0.01)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            last = update().version
        done.set()
        rollouts.join(timeout=600)
        assert not rollouts.is_alive() and not failures, failures
        sender.shutdown()
        client.close()

    assert last == first + SYNCS
    assert len(answers) >= REQUESTS
    for length, answer in answers:
        (tokens,), (versions,), (logprobs,) = (
            answer[name] for name in ("response_ids", "weight_versions", "response_logprobs")
        )
        assert len(tokens) == len(versions) == len(logprobs) == length
        assert versions == sorted(versions) and first <= versions[0] and versions[-1] <= last
    assert seen >= set(range(first, last))  # they did run beside each of the syncs
    assert len(models) == SESSIONS and all(len(where) == 1 for where in models.values())
    assert len(set.union(*models.values())) == 2
    print(f"{mode}: {len(answers)} generations, versions {min(seen)}..{max(seen)}, {len(seen)} seen")
