"""TorchRL's vLLM engines (`RLvLLMEngine`) as engines of ours: the vLLM inside is driven, and none of their methods."""

from __future__ import annotations

import asyncio
import json

import pytest
from torchrl.modules.llm.backends.vllm import LocalLLMWrapper, RLvLLMEngine

import torchrl_ext as tx
from tests.processes import python
from tests.sync.ends import made
from tests.sync.vllm_objects import LLM, Online, says
from tests.sync.vllm_objects import net as talker
from torchrl_ext.base.errors import ConfigError, UpdateError
from torchrl_ext.control.discovery import as_engine


class Other(RLvLLMEngine):
    """Implements TorchRL's interface, and counts how often anything of it is called."""

    calls = 0

    def _count(self, *args):
        self.calls += 1

    get_tp_size = get_model_metadata = get_master_address = get_master_port = _count
    init_weight_update_group = update_weights = reset_prefix_cache = _count


class Busy(LLM):
    """Never joins: it says so whenever it is asked."""

    def _rpc(self, method, timeout=None, args=(), kwargs=None):
        return [{"working": True}]


class Replicas(Online):
    """Two of them, over the workers of one; ``first`` is what the first says of a version, None if nobody hears it."""

    first = None

    def __init__(self, *args):
        super().__init__(*args)
        self.vllm_config.parallel_config.data_parallel_size = 2

    def _rpc(self, method, timeout=None, args=(), kwargs=None):
        found = super()._rpc(method, timeout, args, kwargs)
        if json.loads(args[0])["kind"] != "finish":
            return [*found, *found]
        return found if self.first is None else [self.first, *found]


@pytest.mark.parametrize("make", [as_engine, lambda engine: tx.make_engine("ray", engine=engine)])
def test_other_rlvllmengine_implementation_is_refused(make):
    with pytest.raises(ConfigError, match="Other implements RLvLLMEngine"):
        make(engine := Other())
    assert engine.calls == 0


def test_without_ray_its_names_say_what_to_install():
    python(
        "import sys; sys.modules['ray'] = None\n"
        "import torchrl_ext as tx\n"
        "try:\n"
        "    tx.make_engine('ray', engine=object())\n"
        "except tx.errors.ConfigError as error:\n"
        "    assert 'torchrl_ext[ray]' in str(error), error\n"
        "else:\n"
        "    raise AssertionError"
    )


def test_deadlines_reach_an_llm_in_torchrls_wrapper():
    wrapped = LocalLLMWrapper(Busy(talker(0)), 1, "net")
    engine = tx.make_engine("ray", engine=wrapped, timeout_s=50.0, load_timeout_s=0.3)
    with pytest.raises(UpdateError, match=r"within 0\.3 s"):
        tx.WeightSender(tx.MemoryTransport(), engine).update_weights(talker(1))


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (None, r"1 worker\(s\) of .* say that they hold"),
        ({"version": 1, "digest": "another", "workers": 1}, "does not confirm version 1: .*another"),
    ],
)
def test_replica_without_the_version_fails_the_update(first, words, tmp_path):
    async def switch():
        llm = type("AsyncLLM", (Replicas,), {"__module__": "vllm.v1.engine.async_llm"})(talker(0))
        llm.first = first
        engine = tx.make_engine("inprocess", engine=llm, loop=asyncio.get_running_loop())
        sender = tx.WeightSender(tx.DiskTransport(tmp_path), engine)
        with pytest.raises(UpdateError, match=words):
            await asyncio.to_thread(sender.update_weights, talker(1))

    asyncio.run(switch())


@pytest.mark.parametrize("transport", ["collective", "delta", "disk", "ipc"])
def test_an_llm_in_torchrls_wrapper_says_what_the_trainer_says(transport, tmp_path):
    llm = LLM(talker(0))
    with tx.WeightSender(made(transport, tmp_path), as_engine(LocalLLMWrapper(llm, 1, "net"))) as sender:
        for version in (1, 2):
            policy = talker(version)
            assert says(llm.model, 3, 8) != says(policy, 3, 8)
            report = sender.update_weights(policy)
            assert (report.version, report.verified, llm.version) == (version, True, str(version))
            assert says(llm.model, 3, 8) == says(policy, 3, 8) and llm.dropped == version


@pytest.mark.parametrize("name", ["ray", "inprocess"])
def test_engine_without_our_plugin_gets_an_install_hint(name, tmp_path):
    llm = LLM(talker(0), plugin=False)
    engine = tx.make_engine(name, engine=LocalLLMWrapper(llm, 1, "net"))
    with pytest.raises(UpdateError, match=r"without our plugin.*install this package beside vLLM.*VLLM_PLUGINS"):
        tx.WeightSender(tx.DiskTransport(tmp_path), engine).update_weights(talker(1))
    assert says(llm.model, 3, 8) == says(talker(0), 3, 8)
