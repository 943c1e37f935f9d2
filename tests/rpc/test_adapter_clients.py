"""Clients for LoRA adapters over real sockets; what real engines do is in tests/engine."""

import json

import pytest

from tests.rpc.adapter_servers import actions, serving_adapters
from tests.rpc.servers import bare, running
from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.routes import ADAPTERS_ROUTE
from torchrl_ext.rpc.makes.sglang import sglang_engine
from torchrl_ext.rpc.makes.vllm import embedded_engine, vllm_engine
from torchrl_ext.rpc.pool import Pool

JOIN = {"transport": "disk", "root": "/root/a", "params": []}
HANDOFF = {"version": 3, "path": "/root/a/weight_v000003"}


def told(**versions):
    rows = {name: {"version": version} for name, version in versions.items()}
    return 200, {"success": True, "message": json.dumps({"adapters": rows})}


def test_a_version_is_staged_then_served_and_vllm_is_neither_paused_nor_flushed():
    with serving_adapters() as server:
        server.adapters.in_use = [2, 3]
        server.adapters.staged["a"] = 3  # what the load leaves behind
        server.adapters.stage = lambda body: (200, {})
        adapter = vllm_engine(server.url).adapter("a")
        adapter.connect(JOIN)
        adapter.prefetch(3)
        with adapter.updating(3):
            adapter.load(HANDOFF)
        assert [(call, body and bare(body)) for call, _, body in server.calls] == [
            (f"POST {ADAPTERS_ROUTE}", {"kind": "check_adapter", "root": {"root": "/root/a"}}),
            (f"POST {ADAPTERS_ROUTE}", {"kind": "stage_adapter", "name": "a", **HANDOFF}),
            (f"POST {ADAPTERS_ROUTE}", {"kind": "serve_adapter", "name": "a", "version": 3}),
            (f"GET {ADAPTERS_ROUTE}", None),
        ]
        (row,) = adapter.rows()
        assert (row.engine, row.state, row.version, row.pause_s) == (server.url, "serving", 3, 0)
        assert adapter.oldest(3) == 2, "requests are at work with version 2"


def test_sglang_is_told_by_messages():
    with running({"POST /weights_checker": told(a=3)}) as server:
        adapter = sglang_engine(server.url).adapter("a")
        adapter.connect(JOIN)
        with adapter.updating(3):
            adapter.load(HANDOFF)
        adapter.unload()
        assert actions(server) == [
            {"kind": "check_adapter", "root": {"root": "/root/a"}},
            {"kind": "stage_adapter", "name": "a", "version": 3, "path": HANDOFF["path"]},
            {"kind": "serve_adapter", "name": "a", "version": 3},
            {"kind": "list_adapters"},
            {"kind": "unload_adapter", "name": "a"},
        ]


def test_a_version_counts_only_when_the_engine_says_that_it_serves_it():
    with running({"POST /weights_checker": told(a=2)}) as server:
        adapter = sglang_engine(server.url).adapter("a")
        with pytest.raises(EngineRefusedError, match=r"(?s)serves version 2 of 'a'.*a@3"):
            adapter.commit(3)
        (row,) = adapter.rows()
        assert row.version is None and "serves version 2" in row.error


@pytest.mark.parametrize(
    ("kind", "answer", "hint"),
    [
        (vllm_engine, (404, {"detail": "Not Found"}), "VLLM_PLUGINS"),
        (vllm_engine, (400, {"error": "ConfigError: LoRA is not enabled"}), "--enable-lora"),
        (vllm_engine, (400, {"error": "Call to init method failed: LoRA rank 16 is greater"}), ""),
        (sglang_engine, (400, {"message": "Unsupported action: torchrl_ext"}), "install torchrl_ext"),
        (sglang_engine, (400, {"message": "ConfigError: LoRA is not enabled"}), "--lora-target-modules"),
    ],
)
def test_a_server_that_serves_no_adapters_is_told_apart(kind, answer, hint):
    with running({f"POST {ADAPTERS_ROUTE}": answer, "POST /weights_checker": answer}) as server:
        adapter = kind(server.url).adapter("a")
        with pytest.raises(EngineRefusedError, match=f"(?s)did not join the transport.*{hint}") as error:
            adapter.connect(JOIN)
        assert "Call to" not in str(error.value), "the words of vLLM's executors"
        assert adapter.rows()[0].state == "serving"


def test_an_unknown_name_cannot_be_unloaded():
    with serving_adapters() as server, pytest.raises(EngineRefusedError, match="no adapter 'a' is loaded") as error:
        vllm_engine(server.url).adapter("a").unload()
    assert "VLLM_PLUGINS" not in str(error.value), "the plugin is there"


@pytest.mark.parametrize("name", ["", "../a", "a b", "a@7", ".a", "a" * 200])
def test_names_are_checked_before_anything_is_asked(name):
    with pytest.raises(ConfigError, match="cannot be called"):
        vllm_engine("host:1").adapter(name)


def test_other_engines_serve_no_adapters():
    fleet = Pool([vllm_engine("host:1"), embedded_engine("host:2")])
    with pytest.raises(ConfigError, match="embedded engines serve no LoRA adapters"):
        fleet.adapter("a")
    with pytest.raises(ConfigError, match="unload adapters only"):
        vllm_engine("host:1").unload()
