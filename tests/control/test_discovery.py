"""Discovery against servers that are slow, strange or hostile: a clear error within the deadline, or the facts."""

import socket
import traceback
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchrl_ext as tx
from tests.control.servers import CONFIG
from tests.control.sockets import drip, serving
from tests.fakes import FakeEngine
from torchrl_ext.base.errors import DeadlineError, EngineError, EngineRefusedError, EngineUnreachableError
from torchrl_ext.control.makes.server_info import read_server_info
from torchrl_ext.control.serving.processes import free_port

FLAT = {
    "engine": "embedded",
    "version": "0.1.0",
    "model": "/m",
    "parallel_config": {"tensor_parallel_size": 1},
    "transports": ["disk"],
}
SGLANG = {"model_path": "/m", "disaggregation_mode": "null", "tp_size": 2, "version": "0.5.23"}


@contextmanager
def scripted(script):
    """A server that answers by path; ``server.script`` has status, body and headers of each."""
    with serving(lambda asked: script.get(asked.path, (404, {"detail": "Not Found"}))) as server:
        server.script = script
        yield server


def endless(stopped):
    yield b'"'
    while not stopped.is_set():
        yield b"x" * (1 << 20)


def refused(server, timeout_s=10.0):
    with pytest.raises(EngineRefusedError) as caught:
        tx.discover(server.url, timeout_s=timeout_s)
    return str(caught.value)


def test_discovery_tries_the_second_route_when_the_first_fails():
    for first in ((404, {}), (200, b"<html>a proxy</html>"), (200, [1, 2]), (200, {"hello": "world"})):
        with scripted({"/server_info": first, "/get_server_info": (200, FLAT)}) as server:
            (info,) = tx.discover(server.url)
            assert (info.kind, info.model, info.transports) == ("embedded", "/m", ("disk",))
            asked = [path for _, path, _ in server.calls]
            assert [path for path in asked if "server_info" in path][:2] == ["/server_info", "/get_server_info"]
            server.script["/get_server_info"] = 503, {"error": "warming up"}
            text = refused(server)
            assert "/get_server_info answered 503: warming up" in text and "VLLM_SERVER_DEV_MODE=1" in text


@pytest.mark.parametrize(
    "answer",
    [
        (200, b"<html>a page</html>"),
        (200, b""),
        (200, b"[" * 100_000),
        (200, b"\xff\xfe\x00 no text"),
        (200, []),
        (200, {"vllm_config": CONFIG | {"parallel_config": {"data_parallel_size": 1e300}}}),
        (200, b'{"engine": "embedded", "parallel_config": {"tensor_parallel_size": NaN}}'),
        (200, SGLANG | {"tp_size": 10**12}),
        (200, SGLANG | {"tp_size": 0}),
        (302, b"", {"location": "http://127.0.0.1:1/server_info"}),
        (200, endless),
    ],
    ids=lambda answer: str(answer[1])[:24],
)
def test_what_is_no_engines_answer_is_refused_by_name(answer):
    with scripted({"/server_info": answer}) as server:
        text = refused(server)
        assert server.url in text and "/get_server_info answered 404" in text


def test_strange_world_size_is_refused_or_left_out():
    with FakeEngine("vllm") as fake:
        fake.answers["GET /get_world_size"] = {"world_size": 10**9}
        with pytest.raises(EngineRefusedError, match="world_size is '1000000000'"):
            tx.discover(fake.url)
        fake.answers |= {"GET /get_world_size": ["?"], "GET /weight_info": "?"}
        (info,) = tx.discover(fake.url)
        assert (info.world_size, info.weight_version) == (1, "")


def test_discovery_of_all_engines_has_one_deadline():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        scripted({"/server_info": (200, drip)}) as slow,
        scripted({"/server_info": (200, SGLANG), "/model_info": (200, drip)}) as slow_at_last,
        scripted({"/server_info": (200, FLAT)}) as well,
    ):
        urls = [f"http://127.0.0.1:{silent.getsockname()[1]}", slow.url, slow_at_last.url]
        for late in urls:
            with pytest.raises(DeadlineError, match=late):
                tx.discover(well.url, late, timeout_s=0.5)


def dead(count):
    """Addresses where nobody listens."""
    return [f"http://127.0.0.1:{free_port()}" for _ in range(count)]


@pytest.mark.parametrize("ask", [tx.discover, tx.connect])
def test_one_error_lists_every_address_that_failed(ask):
    gone = dead(2)
    with FakeEngine("vllm") as well, scripted({"/server_info": (200, {})}) as strange:
        with pytest.raises(EngineUnreachableError, match="; 2 of 3 engines did not describe themselves") as caught:
            ask(gone[0], well.url, gone[1], timeout_s=5)
        assert all(url in caught.value.what for url in gone) and well.url not in caught.value.what
        assert "GET" not in caught.value.what  # nobody asked for the first route that is tried
        told = "".join(traceback.format_exception(caught.value))
        assert "direct cause" not in told and "aiohttp" not in told
        with pytest.raises(EngineError, match=f"(?s){gone[0]}.*{strange.url} does not describe an engine"):
            ask(gone[0], well.url, strange.url, timeout_s=5)


def test_sglangs_server_info_alone_is_enough():
    with scripted({"/server_info": (200, SGLANG)}) as server:
        (info,) = tx.discover(server.url)
        assert (info.kind, info.model, info.tp_size, info.transports) == ("sglang", "/m", 2, ("disk", "native"))
        server.script["/model_info"] = (200, {"model_path": "/now", "weight_version": "3"})
        (info,) = tx.discover(server.url)
        assert (info.model, info.weight_version) == ("/now", "3")


@pytest.mark.parametrize("status", [401, 503])
def test_sglang_server_with_closed_control_routes_is_described(status):
    with scripted({"/server_info": (200, SGLANG)}) as server:
        for route in ("/model_info", "/weights_checker"):
            server.script[route] = (status, {"error": "not for you"})
        (info,) = tx.discover(server.url)
        assert (info.kind, info.model, info.transports) == ("sglang", "/m", ())
        engine = tx.make_engine("sglang", url=server.url)
        with pytest.raises(EngineRefusedError, match=r"not for you.*did not join the transport") as met:
            engine.join({"transport": "disk", "params": [], "offer": {}})
        assert met.value.status == status
        engine.close()


def test_error_names_a_refused_api_key_or_absent_routes():
    for status, words in (
        (401, "requires an API key"),
        (403, "requires an API key"),
        (501, "has no route that describes an engine"),
    ):
        script = {route: (status, {"error": "no"}) for route in ("/server_info", "/get_server_info")}
        with scripted(script) as server:
            with pytest.raises(EngineRefusedError, match=words) as caught:
                tx.discover(server.url, api_key="secret")
            assert set(server.keys) == {"Bearer secret"}
        text = str(caught.value)
        assert f"{status}: no" in text and "does not describe an engine" not in text and "secret" not in text
        assert ("api_key" in text) == (status != 501)


@given(
    st.sampled_from(["vllm", "sglang"]),
    st.sampled_from(["prefill", "decode", "regular"]),
    st.integers(1, 65535) | st.none(),
)
def test_only_prefill_engines_of_sglang_have_a_bootstrap_port(kind, role, port):
    if kind == "vllm":
        named = {"prefill": "kv_producer", "decode": "kv_consumer", "regular": "kv_both"}[role]
        config = {**CONFIG, "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": named}}
        answer, port = {"vllm_config": config}, None
    else:
        answer = {**SGLANG, "disaggregation_mode": role, "disaggregation_bootstrap_port": port}
    info = read_server_info("http://host:1", answer).info
    assert (info.kind, info.worker_type, info.bootstrap_port) == (kind, role, port if role == "prefill" else None)
    assert (info.tp_size, info.dp_size, info.pp_size) == (2, 3 if kind == "vllm" else 1, 1) and info.model


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(st.data())
def test_an_answer_with_any_fields_is_described_or_refused(data):
    fields = {
        "vllm_config": ["parallel_config", "model_config", "kv_transfer_config", "load_config"],
        "engine": ["engine", "version", "model", "worker_type", "dtype", "weight_version"],
        "model_path": ["tp_size", "dp_size", "disaggregation_mode", "weight_cache_mode", "enable_dp_attention"],
    }
    of = data.draw(st.sampled_from(sorted(fields)))
    drawn = {name: data.draw(JSON | st.dictionaries(st.just("tensor_parallel_size"), JSON)) for name in fields[of]}
    answer = {"vllm_config": drawn} if of == "vllm_config" else {**(SGLANG if of == "model_path" else FLAT), **drawn}
    try:
        found = read_server_info("http://host:1", answer)
    except EngineRefusedError as error:
        assert "http://host:1" in str(error)
    else:
        assert found.info.world_size >= 1 and isinstance(found.kv_connector, str)


def test_an_engine_of_a_make_that_nobody_brought_is_refused():
    with scripted({"/server_info": (200, FLAT | {"engine": "dove"})}) as server:
        assert "of an unknown make. Expected: one of vllm, sglang, embedded" in refused(server)
