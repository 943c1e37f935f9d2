"""Clients for LoRA adapters over real sockets; what real engines do is in tests/engine."""

import re
from itertools import count

import pytest

from tests.rpc.adapter_servers import serving_adapters, told_of
from torchrl_ext import make_engine
from torchrl_ext.errors import ConfigError, EngineRefusedError, WeightSyncError
from torchrl_ext.routes import ADAPTERS_ROUTE
from torchrl_ext.rpc.makes.vllm import embedded_engine, vllm_engine
from torchrl_ext.rpc.pool import Pool

JOIN = {"transport": "disk", "root": "/root/a", "params": []}


def client(fake, **settings):
    return make_engine(fake.kind, url=fake.url, timeout_s=5.0, **settings).adapter("a")


def update(adapter, version):
    adapter.connect(JOIN)
    adapter.prefetch(version)
    with adapter.updating(version):
        adapter.load({"version": version, "path": f"/root/a/weight_v{version:06}"})


@pytest.mark.parametrize("make", ["vllm", "sglang"])
def test_a_version_is_staged_then_served_and_the_engine_is_neither_paused_nor_flushed(make):
    with serving_adapters(make) as fake:
        fake.adapters.in_use = [2, 3]
        adapter = client(fake)
        update(adapter, 3)
        assert told_of(fake) == [
            {"kind": "check_adapter", "root": {"root": "/root/a"}},
            {"kind": "stage_adapter", "name": "a", "version": 3, "path": "/root/a/weight_v000003"},
            {"kind": "serve_adapter", "name": "a", "version": 3},
            *([{"kind": "list_adapters"}] if make == "sglang" else []),
        ]
        routes = {"sglang": {"POST /weights_checker"}, "vllm": {f"GET {ADAPTERS_ROUTE}", f"POST {ADAPTERS_ROUTE}"}}
        assert set(fake.counts) == routes[make]
        (row,) = adapter.rows()
        assert (row.engine, row.state, row.version, row.pause_s) == (fake.url, "serving", 3, 0)
        assert adapter.oldest(3) == 2, "requests are at work with version 2"
        adapter.unload()
        assert fake.adapters.served == {}


@pytest.mark.parametrize("fault", ["fail", "cut", "lose", "hang", "junk", "twice"])
@pytest.mark.parametrize("make", ["vllm", "sglang"])
def test_one_request_of_an_update_goes_wrong(make, fault):
    """The name stands for the version from before, or for the new one, and the engine serves; the next update heals."""
    with serving_adapters(make) as fake:
        for number in count():
            fake.adapters.served["a"] = 1
            adapter = client(fake, **({"load_timeout_s": 0.3} if fault == "hang" else {}))
            fake.inject(fault, after=number)
            before = len(fake.calls)
            error = None
            try:
                update(adapter, 2)
            except WeightSyncError as failure:
                error = str(failure)
            fake.heal()
            assert fake.serving and fake.adapters.served["a"] in ((1, 2) if error else (2,)), (number, error)
            assert error is None or (fake.url in error and re.search("did not .*(still serves|are unchanged)", error))
            made = len(fake.calls) - before
            update(client(fake), 3)
            assert fake.serving and fake.adapters.served["a"] == 3
            if made <= number:
                break


def test_a_version_counts_only_when_the_engine_says_that_it_serves_it():
    with serving_adapters() as fake:
        fake.adapters.served["a"] = 2
        fake.adapters.serve = lambda body: (200, {})
        adapter = client(fake)
        with pytest.raises(EngineRefusedError, match=r"(?s)serves version 2 of 'a'.*a@3"):
            adapter.commit(3)
        (row,) = adapter.rows()
        assert row.version is None and "serves version 2" in row.error


@pytest.mark.parametrize(
    ("make", "answer", "hint"),
    [
        ("vllm", (404, {"detail": "Not Found"}), "VLLM_PLUGINS"),
        ("vllm", (400, {"error": "ConfigError: LoRA is not enabled"}), "--enable-lora"),
        ("vllm", (400, {"error": "Call to init method failed: LoRA rank 16 is greater"}), ""),
        ("sglang", (400, {"message": "Unsupported action: torchrl_ext"}), "install torchrl_ext"),
        ("sglang", (400, {"message": "ConfigError: LoRA is not enabled"}), "--lora-target-modules"),
    ],
)
def test_a_server_that_serves_no_adapters_is_told_apart(make, answer, hint):
    with serving_adapters(make) as fake:
        fake.answers = {f"POST {ADAPTERS_ROUTE}": answer, "POST /weights_checker": answer}
        adapter = client(fake)
        with pytest.raises(EngineRefusedError, match=f"(?s)did not join the transport.*{hint}") as error:
            adapter.connect(JOIN)
        assert "Call to" not in str(error.value), "the words of vLLM's executors"
        assert adapter.rows()[0].state == "serving"


def test_an_unknown_name_cannot_be_unloaded():
    with (
        serving_adapters() as fake,
        pytest.raises(EngineRefusedError, match="no adapter 'a' is loaded") as error,
    ):
        client(fake).unload()
    assert "VLLM_PLUGINS" not in str(error.value), "the plugin is there"


@pytest.mark.parametrize("name", ["", "../a", "a b", "a@7", ".a", "a" * 200])
def test_names_are_checked_before_anything_is_asked(name):
    with pytest.raises(ConfigError, match="not a valid name"):
        vllm_engine("host:1").adapter(name)


def test_other_engines_serve_no_adapters():
    fleet = Pool([vllm_engine("host:1"), embedded_engine("host:2")])
    with pytest.raises(ConfigError, match="embedded engines serve no LoRA adapters"):
        fleet.adapter("a")
    with pytest.raises(ConfigError, match="unload adapters only"):
        vllm_engine("host:1").unload()
