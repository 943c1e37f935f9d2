"""One client, several engines: the work is shared, and an engine that dies takes nothing with it."""

import threading

import httpx
import psutil
import pytest

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from tests.processes import WAIT_S
from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineUnreachableError
from torchrl_ext.control.serving.processes import free_port


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def servers(checkpoint):
    with EmbeddedServer(checkpoint, threads=1) as first, EmbeddedServer(checkpoint, threads=1) as second:
        yield [first, second]


@pytest.fixture
def client(servers):
    made = tx.InferenceClient.connect(*(server.url for server in servers), max_concurrency=4)
    yield made
    made.close()


def busy(server):
    return httpx.get(f"{server.url}/load", verify=False).json()["server_load"]


def in_background(call):
    """Run ``call`` beside the test; returns the thread and where its result or error will be."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:  # noqa: BLE001 - looked at by the test
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def until(condition):
    for _ in range(20 * WAIT_S):
        if condition():
            return
        threading.Event().wait(0.05)
    pytest.fail("it never came to that")


def test_engines_share_prompts_within_cap_and_order_is_kept(client, servers):
    """Engines share the prompts, none has more than its cap, and the answers keep their order."""
    prompts = [PROMPT[: 1 + i % 8] for i in range(16)]
    greedily = {"n": 2, "max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    thread, found = in_background(lambda: client.generate(prompts, **greedily))
    loads = []
    while thread.is_alive():
        loads.append([busy(server) for server in servers])
        thread.join(0.02)  # for the engines to get on with it
    own = tiny_model(0)
    assert [one.token_ids for one in found[0]] == [tuple(greedy(own, one, 60)) for one in prompts for _ in range(2)]
    assert all(max(seen) <= 4 for seen in loads)
    assert all(max(seen[i] for seen in loads) > 0 for i in range(2))


def test_an_engine_that_stands_still_is_named_by_the_deadline(client, servers):
    httpx.post(f"{servers[1].url}/pause", params={"mode": "keep"})
    try:
        with pytest.raises(DeadlineError, match=servers[1].url):
            client.generate([PROMPT] * 8, max_tokens=4, timeout_s=2)
    finally:
        httpx.post(f"{servers[1].url}/resume")


def test_addresses_that_cannot_work_are_refused():
    url = f"127.0.0.1:{free_port()}"
    for urls, words in (([], "no engine"), ([url, url], "twice")):
        with pytest.raises(ConfigError, match=words):
            tx.InferenceClient(urls)
    with pytest.raises(ConfigError, match=r"no engine called .steam.*sglang"):
        tx.InferenceClient(url, kind="steam")
    with pytest.raises(ConfigError, match="2 kinds for 1"):
        tx.InferenceClient([url], kind=["vllm", "vllm"])
    with pytest.raises(EngineUnreachableError, match=url):
        tx.InferenceClient.connect(url)


def test_prompts_of_a_killed_engine_go_to_the_other_engine(client, servers):
    """A killed engine's prompts go to the other engine; with none left, the error names both."""
    prompts = [PROMPT] * 8
    thread, found = in_background(lambda: client.generate(prompts, max_tokens=300, temperature=0.0, ignore_eos=True))
    until(lambda: busy(servers[0]) and busy(servers[1]))
    psutil.Process(servers[0].pid).kill()
    thread.join(WAIT_S)
    assert {one.token_ids for one in found[0]} == {tuple(greedy(tiny_model(0), PROMPT, 300))}
    assert len(client.generate(prompts, max_tokens=2)) == 8
    servers[1].stop()
    with pytest.raises(EngineUnreachableError, match=f"none of 2 engines.*{servers[0].url}.*{servers[1].url}"):
        client.generate([PROMPT], max_tokens=2)
