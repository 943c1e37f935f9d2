"""Versions that requests demand: what servers admit, where clients go with them, and when they give up."""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace

import httpx
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from tensordict import TensorDict
from torchrl.modules.llm.policies import Tokens

import torchrl_ext as tx
from tests.embedded import served_here
from tests.models import PROMPT, tiny_checkpoint, tiny_model
from tests.plugins.stand_ins import VLLM, SGLang, add_sglang
from tests.processes import WAIT_S
from tests.rpc import sockets
from torchrl_ext.deadline import Deadline
from torchrl_ext.embedded.engine import Engine
from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError
from torchrl_ext.plugins.vllm.endpoint import UpdateFromDisk
from torchrl_ext.rollout import requests
from torchrl_ext.rollout.client import InferenceClient
from torchrl_ext.rollout.demands import Admission, Demand
from torchrl_ext.rollout.generation import version_number

MIN, EXACT = "x-torchrl-ext-min-version", "x-torchrl-ext-exact-version"
ROUTE = "/inference/v1/generate"
BODY = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
LONG = 400
LABELS = st.sampled_from(["default", "0", "1", "2", "3", "step-2", ""])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def engines(checkpoint, tmp_path_factory):
    """Three embedded engines; ``update`` brings one of them to a version by a whole update."""
    model = tiny_model(1, max_position_embeddings=2048)
    with ExitStack() as ends:
        found = []
        for _ in range(3):
            served = ends.enter_context(served_here(Engine(str(checkpoint), dtype="float32")))
            transport = tx.make_transport("disk", root=tmp_path_factory.mktemp("updates"))
            sender = tx.WeightSender(transport, tx.make_engine("embedded", url=served.url))
            ends.callback(sender.shutdown)

            def update(version, served=served, sender=sender):
                sender._attempted = version - 1  # versions of before were lost
                assert sender.update_weights(model).version == version
                served.version = version

            served.update = update
            found.append(served)
        yield found


@pytest.fixture
def of(engines):
    """Brings the engines to versions, the last ones to none, and returns a client for as many."""
    with ExitStack() as ends:

        def made(*versions, **settings):
            for served, version in zip(engines, versions, strict=False):
                if str(version) != served.engine.scheduler.version:
                    served.update(version)
            urls = [served.url for served in engines[: len(versions)]]
            return ends.enter_context(InferenceClient(urls, kind="embedded", **settings))

        yield made


def versions_of(answers):
    return {version for one in answers for version in one.token_versions()}


def posted(url, **headers):
    return httpx.post(f"{url}{ROUTE}", json=BODY, headers=headers, timeout=WAIT_S)


# what a demand is


@given(version=st.integers(0, 10**18 - 1), exact=st.booleans(), other=st.integers(-1, 5))
def test_a_demand_travels_in_one_header(version, exact, other):
    demand = Demand(version=version, exact=exact)
    ((name, text),) = demand.headers.items()
    assert name == (EXACT if exact else MIN)
    assert Demand.of_headers([(b"host", b"\xff"), (name.title().encode(), text.encode())]) == demand
    small = Demand(version=version % 4, exact=exact)
    assert small.met_by(other) == (other == small.version if exact else other >= small.version)


@given(value=st.binary(max_size=24).filter(lambda value: not (value.isdigit() and len(value) <= 18)))
def test_a_header_that_is_no_number_is_refused(value):
    with pytest.raises(ConfigError, match=f"header {MIN} is"):
        Demand.of_headers([(MIN.encode(), value)])


def test_a_demand_is_one_whole_number():
    assert Demand.of(None, None) is None and Demand.of_headers([(b"x-other", b"1")]) is None
    for given_, words in (((1, 1), "both"), ((-1, None), "-1"), ((None, True), "True"), ((1.5, None), "1.5")):
        with pytest.raises(ConfigError, match=words):
            Demand.of(*given_)
    with pytest.raises(ConfigError, match="both"):
        Demand.of_headers([(MIN.encode(), b"1"), (EXACT.encode(), b"1")])
    with pytest.raises(ConfigError, match="is '2'"):
        Demand.of_headers([(MIN.encode(), b"1"), (MIN.encode(), b"2")])


# what servers admit


@example(before="1", after="2", version=1, exact=True)
@given(before=LABELS, after=LABELS, version=st.integers(0, 3), exact=st.booleans())
def test_an_answer_that_passes_was_admitted_and_an_exact_one_began_at_the_same_version(before, after, version, exact):
    """The label may change while the application makes its answer, as during an update."""
    label, demand = [before], Demand(version=version, exact=exact)

    async def application(scope, receive, send):
        label[0] = after
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"tokens"})

    async def now():
        return label[0]

    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "headers": [(name.encode(), text.encode()) for name, text in demand.headers.items()],
    }
    asyncio.run(Admission(application, now)(scope, None, send))
    admitted = demand.met_by(version_number(before))
    met = admitted and (not exact or demand.met_by(version_number(after)))
    start, body = sent
    assert start["status"] == (200 if met else 409) and label[0] == (after if admitted else before)
    if not met:
        told = json.loads(body["body"])
        assert told["weight_version"] == (after if admitted else before)
        assert told["error"]["code"] == 409 and "this engine is at" in told["error"]["message"]


def test_a_server_answers_409_with_its_version_and_400_to_what_it_cannot_read(engines, of):
    of(2)
    url = engines[0].url
    for headers in ({MIN: "2"}, {MIN: "0"}, {EXACT: "2"}, {}):
        assert posted(url, **headers).status_code == 200
    for headers, expected in (({MIN: "3"}, "3 or newer"), ({EXACT: "1"}, "version 1"), ({EXACT: "3"}, "version 3")):
        answer = posted(url, **headers)
        told = answer.json()
        assert (answer.status_code, told["weight_version"], told["error"]["code"]) == (409, "2", 409)
        assert "weight version 2" in told["error"]["message"] and expected in told["error"]["message"]
    for headers in ({MIN: "two"}, {EXACT: "-1"}, {MIN: "1", EXACT: "1"}, {MIN: ""}):
        answer = posted(url, **headers)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "BadRequestError"
    assert httpx.get(f"{url}/weight_info", headers={MIN: "9"}).json()["weight_version"] == "2"  # it generates nothing


@pytest.fixture(params=["vllm", "sglang", "several API servers"])
def plugged(request, monkeypatch, tmp_path):
    """Our plugin in the parts of a server that it calls; ``asked`` counts questions to the engine."""
    held = {"weight": torch.zeros(2)}
    if request.param == "sglang":
        add_sglang(monkeypatch)
        engine = SGLang(held, tmp_path)
        app, change = engine.app(), lambda label: setattr(engine, "label", label)
    else:
        engine = VLLM(held, tmp_path)
        count = 1 if request.param == "vllm" else 4
        engine.vllm_config.parallel_config = SimpleNamespace(_api_process_count=count)
        app = engine.app()

        def change(label):
            asyncio.run(engine.update_weight_version(label))

    asked, read = [], getattr(engine, "get_weight_version", None)

    async def get_weight_version():
        asked.append(engine.label)
        return await read()

    engine.get_weight_version = get_weight_version

    async def generate(request):
        return JSONResponse({})

    app.add_route("/generate", generate, methods=["POST"])
    with TestClient(app) as http:
        yield SimpleNamespace(kind=request.param, http=http, change=change, asked=asked, engine=engine)


def test_the_plugins_refuse_by_the_label_in_service_in_their_servers_form(plugged):
    def ask(**headers):
        return plugged.http.post("/generate", json={}, headers=headers)

    plugged.change("6")
    assert ask().status_code == 200 and plugged.asked == []  # who demands nothing pays nothing
    for _ in range(3):
        assert ask(**{MIN: "6"}).status_code == 200
        refused = ask(**{MIN: "7"})
        assert refused.status_code == 409 and refused.json()["weight_version"] == "6"
    row = refused.json() if plugged.kind == "sglang" else refused.json()["error"]
    assert (row["code"], row["type"]) == (409, "ConflictError") and "weight version 6" in row["message"]
    assert len(plugged.asked) == {"vllm": 1, "sglang": 0}.get(plugged.kind, 6)
    plugged.change("7")
    assert ask(**{MIN: "7"}).status_code == 200 and ask(**{EXACT: "6"}).json()["weight_version"] == "7"
    assert ask(**{MIN: "x"}).status_code == 400


def test_a_question_that_a_change_of_label_overtakes_is_not_remembered(monkeypatch, tmp_path):
    engine = VLLM({"weight": torch.zeros(2)}, tmp_path)
    engine.vllm_config.parallel_config = SimpleNamespace(_api_process_count=1)
    engine.label = "6"

    async def overtaken():
        plugin, asked, change = UpdateFromDisk(), asyncio.Event(), asyncio.Event()

        async def slow():
            label = engine.label
            asked.set()
            await change.wait()
            return label

        engine.get_weight_version = slow
        models = SimpleNamespace(lora_requests={}, is_base_model=lambda name: False)
        args = SimpleNamespace(model=engine.model, api_key=None)
        await plugin.init_state(engine, SimpleNamespace(openai_serving_models=models), args)
        first = asyncio.ensure_future(plugin._label())
        await asked.wait()
        await engine.update_weight_version("7")
        change.set()
        return await first, await plugin._label()

    assert asyncio.run(overtaken()) == ("6", "7")


# where clients go


def test_prompts_go_to_the_engines_that_meet_the_demand(of, engines):
    client = of(3, 2, 1)
    many = {"prompts": [PROMPT] * 8, "max_tokens": 2}
    assert versions_of(client.generate(**many, min_version=3)) == {3}
    assert versions_of(client.generate(**many, exact_version=1)) == {1}
    assert versions_of(client.generate(**many, min_version=2)) <= {2, 3}
    assert not client._requests._retired  # 409 is no complaint


def test_a_target_that_was_just_seen_behind_is_not_asked_again(monkeypatch):
    monkeypatch.setattr(requests, "_SEEN_S", WAIT_S)
    with ExitStack() as ends:
        behind, newer = (ends.enter_context(scripted(lambda _, v=v: [v, v])) for v in (5, 6))
        client = ends.enter_context(InferenceClient([behind.url, newer.url]))
        for _ in range(5):
            assert versions_of(client.generate([PROMPT], min_version=6)) == {6}
        assert len(behind.calls) == 1 and len(newer.calls) == 5
        assert versions_of(client.generate([PROMPT])) == {5}  # without a demand, ties go to the first
        monkeypatch.setattr(requests, "_SEEN_S", 0.0)
        client.generate([PROMPT], min_version=6)
        assert len(behind.calls) == 3  # it may have been updated since


def test_an_update_that_is_under_way_is_waited_for(of, engines):
    client = of(4, 4)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, [PROMPT] * 4, max_tokens=2, min_version=5, timeout_s=WAIT_S)
        Deadline(WAIT_S).poll(lambda: client._requests._seen)
        assert not waiting.done()
        engines[1].update(5)
        assert versions_of(waiting.result(WAIT_S)) == {5}


def test_without_an_update_the_deadline_names_the_version_of_each_engine(of, engines):
    client = of(7, 6)
    with pytest.raises(DeadlineError) as late:
        client.generate([PROMPT] * 3, min_version=8, timeout_s=0.5)
    for served, version in zip(engines, (7, 6), strict=False):
        assert f"{served.url} is at weight version {version}" in str(late.value)
    assert "version 8 or newer" in str(late.value)


def test_engines_beyond_an_exact_version_are_an_error_at_once(of, engines):
    client, began = of(9, 10), time.monotonic()
    with pytest.raises(EngineRefusedError) as refused:
        client.generate([PROMPT], exact_version=8, timeout_s=10 * WAIT_S)
    assert refused.value.status == 409 and "version 8" in str(refused.value) and "newer" not in str(refused.value)
    for served, version in zip(engines, (9, 10), strict=False):
        assert f"{served.url} is at weight version {version}" in str(refused.value)
    assert time.monotonic() - began < WAIT_S
    with pytest.raises(DeadlineError, match="weight version 9"):
        client.generate([PROMPT], exact_version=11, timeout_s=0.3)  # it may come
    with pytest.raises(ConfigError, match="both"):
        client.generate([PROMPT], exact_version=9, min_version=9)


@pytest.mark.parametrize("demand", ["min_version", "exact_version"])
def test_an_update_in_the_middle_of_a_generation_mixes_versions_only_where_the_demand_allows_it(of, engines, demand):
    first = engines[0].engine.scheduler.version
    first = (int(first) if first.isdecimal() else 0) + 1
    client, elsewhere = of(first), of(first, first)
    settings = {"max_tokens": LONG, "ignore_eos": True, demand: first}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, [PROMPT], **settings)
        Deadline(WAIT_S).poll(lambda: engines[0].engine.scheduler.running)
        engines[0].engine.pause("keep", WAIT_S)  # or it may end before the update has begun
        engines[0].update(first + 1)
        engines[0].engine.resume()
        if demand == "min_version":
            (answer,) = running.result(WAIT_S)
            assert versions_of([answer]) == {first, first + 1} and len(answer.token_ids) == LONG
            return
        with pytest.raises(EngineRefusedError, match=f"weight version {first + 1}"):
            running.result(WAIT_S)
        assert versions_of(elsewhere.generate([PROMPT], **settings)) == {first}


# engines without our plugin


@contextmanager
def scripted(versions):
    """A server that ignores headers: ``versions(i)`` gives the versions of the tokens of its i-th answer."""

    def answer(asked):
        labels = versions(len(server.calls) - 1)
        spans = [{"version": str(v), "start": i, "end": i + 1} for i, v in enumerate(labels) if v is not None]
        choice = {"token_ids": [5] * len(labels), "finish_reason": "length", "weight_versions": spans}
        return 200, {"choices": [choice]}

    with sockets.serving(answer) as server:
        yield server


def test_tokens_of_engines_without_our_plugin_are_held_to_the_demand():
    answers = [[5, 5], [5, 6], [6, 6], [6, 7]]
    with scripted(lambda i: answers[min(i, 3)]) as server, closing(InferenceClient(server.url)) as client:
        assert versions_of(client.generate([PROMPT], min_version=6)) == {6} and len(server.calls) == 3
        assert versions_of(client.generate([PROMPT], min_version=6)) == {6, 7}
        with pytest.raises(EngineRefusedError, match="weight version 7"):  # of which a part came too late
            client.generate([PROMPT], exact_version=6)


def test_tokens_of_no_known_version_meet_no_demand():
    with scripted(lambda i: [6, None]) as server, closing(InferenceClient(server.url)) as client:
        for demand in ({"min_version": 0}, {"exact_version": 6}):
            with pytest.raises(DeadlineError, match=f"{server.url} is at an unknown weight version"):
                client.generate([PROMPT], timeout_s=0.3, **demand)
        assert versions_of(client.generate([PROMPT])) == {6, -1}


def test_a_409_whose_body_a_router_has_replaced_is_waited_out_as_well():
    answers = iter([(409, "conflict"), (409, [1]), (409, {"weight_version": None})])
    with sockets.serving(lambda asked: next(answers, (409, {"weight_version": "9"}))) as server:
        with closing(InferenceClient(server.url)) as client, pytest.raises(EngineRefusedError, match="version 9"):
            client.generate([PROMPT], exact_version=8)
        assert len(server.calls) == 4
        with closing(InferenceClient(server.url)) as client, pytest.raises(EngineRefusedError, match="answered 409"):
            client.generate([PROMPT])  # who demands nothing is refused


def test_engines_of_several_versions_under_load_answer_every_demand(of, engines):
    """Three engines go through updates at their own pace, and 60 calls demand what is there or comes."""
    first = 20
    client, failures = of(first, first + 1, first + 2), []

    def update():
        try:
            for version in range(first + 1, first + 5):
                for served in engines:
                    if served.version < version:
                        served.update(version)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    def ask(i):
        version = first + i % 5
        for_exact = i % 3 == 0
        demand = {"exact_version" if for_exact else "min_version": version}
        try:
            return for_exact, version, client.generate([[*PROMPT, i]], max_tokens=1 + i % 7, timeout_s=WAIT_S, **demand)
        except EngineRefusedError as error:
            return for_exact, version, error

    updating = threading.Thread(target=update)
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, i) for i in range(60)]
        updating.start()
        answers = [one.result(WAIT_S) for one in asked]
    updating.join(WAIT_S)
    assert not failures and not updating.is_alive()
    for for_exact, version, answer in answers:
        if isinstance(answer, EngineRefusedError):
            assert for_exact and answer.status == 409  # every engine had gone on
        else:
            assert all(v == version if for_exact else v >= version for v in versions_of(answer))


# a policy


def newest(versions):
    """The trainer's newest version."""
    return versions[0]


def test_a_policy_demands_what_its_lag_allows_also_in_another_process(of, engines):
    client, versions = of(30), [31]
    policy = tx.RemoteLLMPolicy(
        client,
        input_mode="tokens",
        generate_kwargs={"max_new_tokens": 2},
        max_lag=1,
        version=functools.partial(newest, versions),
        timeout_s=0.3,
    )
    prompts = TensorDict({"tokens": Tokens(prompt=torch.tensor([PROMPT]), batch_size=1)}, batch_size=1)
    for made in (policy, pickle.loads(pickle.dumps(policy)), policy.get_new_version(seed=3)):
        versions[0] = 31
        assert set(made(prompts.copy())["token_versions", "response"].flatten().tolist()) == {30}
    versions[0] = 32
    with pytest.raises(DeadlineError, match=r"weight version 30.*version 31 or newer"):
        policy(prompts.copy())
    versions[0] = 0  # before the first update any version will do
    policy(prompts.copy())
    policy.state_dict()
    for settings in ({"max_lag": 1}, {"version": lambda: 1}, {"max_lag": -1, "version": lambda: 1}):
        with pytest.raises(ConfigError, match="max_lag"):
            tx.RemoteLLMPolicy(client, input_mode="tokens", **settings)


@pytest.mark.parametrize("session", [None, "s"])
def test_each_attempt_of_a_demanded_request_without_a_session_may_reach_another_engine_of_a_router(session):
    """A router sends equal requests, and those of one session, to one engine."""
    heard = []

    def answer(asked):
        heard.append(asked.headers["x-session-id"])
        told = {"finish_reason": {"type": "length"}, "weight_version": str(len(heard) // 2)}
        return 200, {"output_ids": [1], "meta_info": told}

    with sockets.serving(answer) as router, InferenceClient(router.url, kind="sglang") as client:
        client.generate([[1, 2]], min_version=1, session_ids=None if session is None else [session])
    assert len(heard) == 2 and len(set(heard)) == (2 if session is None else 1)
