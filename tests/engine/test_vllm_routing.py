"""The inference client with two real vLLM servers behind a real router."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
import torch

import torchrl_ext as tx
from tests.engine.served import forked_children
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model, tiny_tokenizer
from tests.rollout.aborts import through_aborts
from torchrl_ext.errors import ConfigError
from torchrl_ext.launch.engines.vllm import VLLMServer
from torchrl_ext.rollout.routing import Routing
from torchrl_ext.rpc.engines.vllm import VLLMEngine

pytestmark = pytest.mark.engine

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXT = "the trainer sends weights"


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Servers of one model whose tokenizer has a chat template."""
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("model") / "seed0")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(checkpoint)

    def serve(i):
        log = tmp_path_factory.mktemp("log") / f"vllm-{i}.log"
        return VLLMServer(checkpoint, max_model_len=256, dtype="float32", log_path=log)

    with ThreadPoolExecutor(2) as pool, ExitStack() as ends:
        with forked_children():
            started = list(pool.map(serve, range(2)))
        for server in started:
            ends.callback(server.stop)
        yield [server.url for server in started]


@pytest.fixture(scope="module")
def routing(urls):
    with Routing.over(*urls) as made:
        yield made


@pytest.fixture
def client(routing):
    made = routing.client(timeout_s=120, control_timeout_s=60, model_name="policy")
    yield made
    made.run(made.resume())
    made.close()


def asked(count, length=8, **sampling):
    return {
        "prompt_token_ids": [[*PROMPT, i] for i in range(count)],
        "sampling_params": {"max_tokens": length, "temperature": 0, "ignore_eos": True, "logprobs": 0, **sampling},
        "session_ids": [f"session-{i}" for i in range(count)],
    }


async def busy(client):
    """Whether some server generates."""
    async with httpx.AsyncClient() as http:
        told = [(await http.get(f"{url}/metrics")).text for url in client.server_urls]
    counts = [count for text in told for count in re.findall(r"^vllm:num_requests_running\S* (\S+)", text, re.M)]
    return any(float(count) for count in counts)


def aborted(client, call, times=2):
    return client.run(through_aborts(client, call, lambda: busy(client), times))


def test_text_and_tokens_go_by_way_of_the_router(client):
    own = tiny_tokenizer()
    (ids,) = client.run(client.tokenize([TEXT], add_special_tokens=False))
    assert ids == own(TEXT, add_special_tokens=False)["input_ids"]
    assert client.run(client.detokenize([ids])) == [TEXT]
    found = client.run(client.generate(asked(3)))
    assert found["response_ids"] == [greedy(tiny_model(0), [*PROMPT, i], 8) for i in range(3)]
    assert found["responses"] == client.run(client.detokenize(found["response_ids"]))
    assert found["weight_versions"] == [[0] * 8] * 3


def test_chats_and_completions_go_by_way_of_the_router(client):
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "session_id": "a"}
    answer = client.run(client.chat_completion({"json": chat}))
    assert answer["choices"][0]["message"]["role"] == "assistant" and answer["model"] == "policy"
    rendered = client.run(client.render({"json": {"messages": chat["messages"]}}))
    assert (
        tiny_tokenizer()(f"user: {TEXT}\nassistant: ", add_special_tokens=False)["input_ids"] == rendered["token_ids"]
    )
    answer = client.run(client.completion({"json": {"prompt": TEXT, "max_tokens": 4, "temperature": 0}}))
    assert answer["usage"]["completion_tokens"] <= 4
    assert "session_id" in chat  # what the caller gave is not changed


def test_generations_go_on_after_aborts_with_the_same_tokens(client):
    found = aborted(client, lambda: client.generate(asked(6, length=150)))
    whole = client.run(client.generate(asked(6, length=150)))
    assert found["response_ids"] == whole["response_ids"]
    assert found["stop_reasons"] == ["length"] * 6 and found["weight_versions"] == [[0] * 150] * 6


async def every(calls):
    return await asyncio.gather(*calls)


def test_completions_go_on_after_aborts_with_the_same_tokens(client):
    body = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    prompts = [[*PROMPT, i] for i in range(16)]
    answers = aborted(client, lambda: every(client.completion({"json": {**body, "prompt": one}}) for one in prompts))
    own = tiny_model(0)
    for prompt, answer in zip(prompts, answers, strict=True):
        (choice,) = answer["choices"]
        assert choice["token_ids"] == greedy(own, prompt, 200) and choice["finish_reason"] == "length"
        assert answer["usage"] == {**answer["usage"], "prompt_tokens": 9, "completion_tokens": 200}


def test_chats_go_on_after_aborts_within_their_budget(client):
    """Their text is read anew, so that tokens may come out differently; what counts is that none is lost."""
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 100, "ignore_eos": True}
    for answer in aborted(
        client, lambda: every(client.chat_completion({"json": {**body, "seed": i}}) for i in range(16)), times=1
    ):
        assert answer["usage"]["completion_tokens"] == 100 and answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["message"]["content"]


def test_control_calls_are_refused_at_the_router_and_reach_every_server(client, routing, urls):
    with pytest.raises(ConfigError, match="is a router"):
        VLLMEngine(routing.url).pause()
    assert set(client.run(client.pause(mode="keep"))) == set(urls)
    assert all(httpx.get(f"{url}/is_paused").json()["is_paused"] for url in urls)
    client.run(client.resume())
    assert client.run(client.get_world_size()) == (2, 1)


def test_rollouts_run_beside_syncs_and_every_token_has_its_version(client, routing, urls, tmp_path):
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
    assert last == first + 4 and client.run(client.weight_versions()) == dict.fromkeys(urls, str(last))
    seen = set()
    for answer in answers:
        (tokens,), (versions,) = answer["response_ids"], answer["weight_versions"]
        assert len(tokens) == len(versions) == 24
        assert versions == sorted(versions) and first <= versions[0] and versions[-1] <= last
        seen |= set(versions)
    assert len(seen) > 2
    (tokens,) = client.run(client.generate(asked(1, length=32)))["response_ids"]
    assert tokens == greedy(model, [*PROMPT, 0], 32)
