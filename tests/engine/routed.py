"""What the inference client does with two real servers behind a router: one suite, over both makes of either.

A subclass has module fixtures ``routing`` and ``now`` (the trainer's ``model`` and the ``version`` that all serve), and
says how to look at one server.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch

import torchrl_ext as tx
from tests.engine.served import forked_children
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model, tiny_tokenizer
from tests.rollout.aborts import through_aborts
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.errors import ConfigError
from torchrl_ext.types import EngineRow, SyncReport

TEXT = "the trainer sends weights"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@contextmanager
def two_servers(served, tmp_path_factory, **settings):
    """Two servers of one model, whose tokenizer has a chat template; gives their addresses."""
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("model") / "seed0")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(checkpoint)

    def serve(i):
        log = tmp_path_factory.mktemp("log") / f"{served.kind}-{i}.log"
        return served.start(checkpoint, max_model_len=256, dtype="float32", log_path=log, **settings)

    with ThreadPoolExecutor(2) as pool, ExitStack() as ends:
        with forked_children():
            started = list(pool.map(serve, range(2)))
        for server in started:
            ends.callback(server.stop)
        yield [server.url for server in started]


def asked(count, length=8, **sampling):
    """A batch of greedy requests, each of a session of its own."""
    return {
        "prompt_token_ids": [[*PROMPT, i] for i in range(count)],
        "sampling_params": {"max_tokens": length, "temperature": 0, "ignore_eos": True, "logprobs": 0, **sampling},
        "session_ids": [f"session-{i}" for i in range(count)],
    }


async def every(calls):
    """What all of ``calls`` return."""
    return await asyncio.gather(*calls)


class Routed:
    """Requests go by way of the router, and control calls to every server."""

    model_name = None  # what requests call the model, where they have to

    async def busy(self, url):
        """Whether the server generates."""
        raise NotImplementedError

    def paused(self, url):
        """Whether the server says that it is paused."""
        raise NotImplementedError

    @pytest.fixture
    def client(self, routing):
        made = RemoteInferenceClient.of(routing, timeout_s=120, control_timeout_s=60, model_name=self.model_name)
        yield made
        made.run(made.resume())
        made.close()

    def aborted(self, client, call, times=2):
        async def any_busy():
            return any(await every(self.busy(url) for url in client.server_urls))

        return client.run(through_aborts(client, call, any_busy, times))

    def test_text_and_tokens_go_by_way_of_the_router(self, client, now):
        own = tiny_tokenizer()
        (ids,) = client.run(client.tokenize([TEXT], add_special_tokens=False))
        assert ids == own(TEXT, add_special_tokens=False)["input_ids"]
        assert client.run(client.detokenize([ids])) == [TEXT]
        found = client.run(client.generate(asked(3)))
        assert found["response_ids"] == [greedy(now.model, [*PROMPT, i], 8) for i in range(3)]
        assert found["responses"] == client.run(client.detokenize(found["response_ids"]))
        assert found["weight_versions"] == [[now.version] * 8] * 3
        assert all(len(row) == 8 and max(row) <= 0 for row in found["response_logprobs"])

    def test_chats_and_completions_go_by_way_of_the_router(self, client):
        chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "session_id": "a"}
        answer = client.run(client.chat_completion({"json": chat}))
        assert answer["choices"][0]["message"]["role"] == "assistant"
        answer = client.run(client.completion({"json": {"prompt": TEXT, "max_tokens": 4, "temperature": 0}}))
        assert answer["usage"]["completion_tokens"] <= 4
        assert "session_id" in chat  # what the caller gave is not changed

    def test_generations_go_on_after_aborts_with_the_same_tokens(self, client, now):
        found = self.aborted(client, lambda: client.generate(asked(6, length=150)))
        whole = client.run(client.generate(asked(6, length=150)))
        assert found["response_ids"] == whole["response_ids"]
        assert found["stop_reasons"] == ["length"] * 6 and found["weight_versions"] == [[now.version] * 150] * 6

    def test_control_calls_are_refused_at_the_router_and_reach_every_server(self, client, routing):
        (kind,) = {info.kind for info in routing.engines}
        with pytest.raises(ConfigError, match="is a router"):
            tx.make_engine(kind, url=routing.url).pause()
        with pytest.raises(ConfigError, match="is a router"):
            tx.discover(routing.url)
        assert set(client.run(client.pause(mode="abort"))) == set(client.server_urls)
        assert all(map(self.paused, client.server_urls))
        client.run(client.resume())
        assert not any(map(self.paused, client.server_urls))
        assert client.run(client.get_world_size()) == (2, 1)

    def test_an_engine_that_fell_behind_is_out_until_it_caught_up(self, routing, client):
        first, second = client.server_urls

        def report(*rows):
            engines = [EngineRow(engine=url, kind="", state="serving", version=number) for url, number in rows]
            return SyncReport(version=9, transport="disk", engines=tuple(engines))

        def listed():
            return {worker.url for worker in routing.router.workers()}

        assert routing.follow(report((first, 9), (second, 8))).removed == (second,)
        assert listed() == {first}
        assert len(client.run(client.generate(asked(8)))["response_ids"]) == 8
        assert routing.follow(report((first, 9), (second, 9))).added == (second,)
        assert listed() == {first, second}

    def test_rollouts_run_beside_syncs_and_every_token_has_its_version(self, client, routing, now, tmp_path):
        model, answers = tiny_model(1), []
        sender = tx.WeightSender(tx.make_transport("disk", root=str(tmp_path)), client.fleet())
        sender.register_model(model)
        update = routing.following(sender.update_weights)
        first = update().version

        async def rollouts():
            over = asyncio.Event()

            async def ask(i):
                while not over.is_set() or i not in made:
                    batch = {**asked(1, length=24), "session_ids": [f"session-{i % 16}"]}
                    answers.append(await client.generate(batch))
                    made.add(i)

            made: set[int] = set()
            requesters = [asyncio.ensure_future(ask(i)) for i in range(48)]
            for _ in range(4):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter), alpha=1e-2)
                last = (await asyncio.to_thread(update)).version
            over.set()
            await asyncio.gather(*requesters)
            return last

        last = client.run(rollouts(), timeout_s=400)
        sender.shutdown()
        now.model, now.version = model, last
        assert last == first + 4
        assert client.run(client.weight_versions()) == dict.fromkeys(client.server_urls, str(last))
        seen = set()
        for answer in answers:
            (tokens,), (versions,) = answer["response_ids"], answer["weight_versions"]
            assert len(tokens) == len(versions) == 24
            assert versions == sorted(versions) and first <= versions[0] and versions[-1] <= last
            seen |= set(versions)
        assert len(seen) > 2
        (tokens,) = client.run(client.generate(asked(1, length=32)))["response_ids"]
        assert tokens == greedy(model, [*PROMPT, 0], 32)
