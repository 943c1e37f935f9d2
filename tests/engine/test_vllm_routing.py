"""The inference client with two real vLLM servers behind a real router."""

from __future__ import annotations

import re
from types import SimpleNamespace

import httpx
import pytest

from tests.engine.routed import TEXT, Routed, every, two_servers
from tests.engine.served import ServedVLLM
from tests.models import PROMPT, greedy, tiny_model, tiny_tokenizer
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.serving.routing import Routing

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    with two_servers(ServedVLLM, tmp_path_factory) as found:
        yield found


@pytest.fixture(scope="module")
def routing(urls):
    with Routing.over(*urls, **settings_for_router("vllm")) as made:
        yield made


@pytest.fixture(scope="module")
def now():
    return SimpleNamespace(model=tiny_model(0), version=0)


class TestRouted(Routed):
    model_name = "policy"

    async def busy(self, url):
        async with httpx.AsyncClient() as http:
            told = (await http.get(f"{url}/metrics")).text
        return any(float(count) for count in re.findall(r"^vllm:num_requests_running\S* (\S+)", told, re.M))

    def paused(self, url):
        return httpx.get(f"{url}/is_paused").json()["is_paused"]

    def test_chats_are_rendered_and_name_the_model(self, client):
        messages = [{"role": "user", "content": TEXT}]
        answer = client.run(client.chat_completion({"json": {"messages": messages, "max_tokens": 4}}))
        assert answer["model"] == "policy"
        rendered = client.run(client.render({"json": {"messages": messages}}))
        expected = tiny_tokenizer()(f"user: {TEXT}\nassistant: ", add_special_tokens=False)["input_ids"]
        assert rendered["token_ids"] == expected

    def test_completions_are_whole_after_aborts(self, client, now):
        body = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        prompts = [[*PROMPT, i] for i in range(16)]

        def completions():
            return every(client.completion({"json": {**body, "prompt": one}}) for one in prompts)

        for prompt, answer in zip(prompts, self.aborted(client, completions), strict=True):
            (choice,) = answer["choices"]
            assert choice["token_ids"] == greedy(now.model, prompt, 200) and choice["finish_reason"] == "length"
            assert answer["usage"] == {**answer["usage"], "prompt_tokens": 9, "completion_tokens": 200}

    def test_a_pause_that_keeps_requests_reaches_every_server(self, client, urls):
        assert set(client.run(client.pause(mode="keep"))) == set(urls)
        assert all(map(self.paused, urls))
        client.run(client.resume())
