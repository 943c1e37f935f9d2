"""The names and signatures that outside code relies on."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from torchrl.weight_update import weight_sync_schemes

import torchrl_ext as tx
from tests.processes import python
from torchrl_ext.base import registry
from torchrl_ext.base.errors import ConfigError

NAMES = {
    "DeltaTransport", "DiskTransport", "EngineClient", "EngineInfo", "IPCTransport", "InferenceClient", "LoraPublisher",
    "MegatronSource", "MemoryTransport", "RemoteLLMPolicy", "ShardedTransport", "SyncReport",
    "TransportWeightSyncScheme", "TransportWeightUpdater", "VLLMCollectiveTransport", "WeightReceiver", "WeightSender",
    "WeightSource", "WeightSyncError", "WeightUpdateConfig", "__version__", "as_source", "connect", "discover",
    "engines", "errors", "make_engine", "make_transport", "recommend", "testing", "transports",
}  # fmt: skip


def parameters(call):
    return list(inspect.signature(call).parameters)


def default(call, name):
    return inspect.signature(call).parameters[name].default


def kinds(call):
    return {name: parameter.kind.name for name, parameter in inspect.signature(call).parameters.items()}


def test_the_public_names_are_these_and_each_leads_somewhere():
    assert set(tx.__all__) == set(dir(tx)) == NAMES
    assert {name for name in NAMES if getattr(tx, name) is None} == set()
    with pytest.raises(AttributeError, match="no attribute 'Pigeon'"):
        _ = tx.Pigeon


def test_type_checkers_read_the_signatures_of_what_is_imported():
    stub = ast.parse(Path(tx.__file__).with_suffix(".pyi").read_text())
    read = {one.name: ast.unparse(one.args) for one in stub.body if isinstance(one, ast.FunctionDef)}
    defined = {one.name: ast.unparse(one.args) for one in ast.parse(Path(tx.__file__).read_text()).body
               if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")}  # fmt: skip
    assert read == defined and {*read, *tx._HOME, "__version__"} == NAMES


def test_transports_and_engines_are_listed_read_only():
    assert set(tx.transports()) == {"collective", "delta", "disk", "ipc", "memory", "native", "sharded"}
    assert {"embedded", "inprocess", "vllm"} <= set(tx.engines())
    for names in (tx.transports(), tx.engines()):
        assert all(isinstance(summary, str) and summary for summary in names.values())
        with pytest.raises(TypeError):
            names["mine"] = ""


def test_engines_function_survives_submodule_import():
    """tx.engines lists names after the package of that name has taken the function's place in the module."""
    python(
        "import sys, torchrl_ext as tx; before = dict(tx.engines())\n"
        "import torchrl_ext.engines.plugin\n"
        "assert tx.engines is sys.modules['torchrl_ext.engines'] and dict(tx.engines()) == before",
        fresh=True,
    )


def test_a_name_that_does_not_exist_is_answered_with_the_names():
    with pytest.raises(ConfigError, match=r"no transport called 'dsik'.*collective.*disk.*did you mean 'disk'\?$"):
        tx.make_transport("dsik")
    with pytest.raises(ConfigError, match=r"no engine called 'vlm'.*did you mean 'vllm'"):
        tx.make_engine("vlm")
    with pytest.raises(ConfigError, match=r"no transport called 'postcard'.*Next: install its package"):
        tx.make_transport("postcard")
    with pytest.raises(ConfigError, match="does not take these settings"):
        tx.make_transport("disk", path="/tmp")


BACKENDS = {
    "collective": tx.VLLMCollectiveTransport,
    "delta": tx.DeltaTransport,
    "disk": tx.DiskTransport,
    "memory": tx.MemoryTransport,
}


@pytest.mark.parametrize("name", BACKENDS)
def test_every_transport_has_the_surface_of_torchrls_backend(name):
    cls = registry.transports.load(name)
    assert cls is BACKENDS[name] and cls.name == name
    for method in ("send_weights", "receive_weights"):
        wanted = set(parameters(getattr(weight_sync_schemes.TransportBackend, method))) - {"self", "weights"}
        assert wanted <= set(parameters(getattr(cls, method)))
    assert parameters(cls.send_weights) == ["self", "model_id", "weights"]
    assert default(cls.send_weights, "weights") is None
    either, named = "POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"
    own = {"self": either, "timeout": either, "weights": named, "model": named, "strategy": named}
    assert kinds(cls.receive_weights) == own
    assert parameters(cls.check_connection) == parameters(cls.shutdown) == ["self"]
    assert parameters(cls.init_all_workers_group)[:2] == ["self", "model_metadata"]


def test_constructors_and_calls_take_what_the_seeds_say():
    collective, disk, sender = kinds(tx.VLLMCollectiveTransport), kinds(tx.DiskTransport), tx.WeightSender
    positional = [name for name, kind in collective.items() if kind == "POSITIONAL_OR_KEYWORD"]
    assert positional == ["master_address", "master_port", "rank", "world_size", "device", "vllm_engine"]
    assert {"backend", "bucket_bytes", "timeout_s"} <= set(collective)
    assert disk.pop("root") == "POSITIONAL_OR_KEYWORD" and set(disk.values()) == {"KEYWORD_ONLY"}
    assert {"keep_files", "shard_bytes", "files", "timeout_s"} <= set(disk)
    assert default(tx.DiskTransport, "keep_files") is False
    assert parameters(sender)[:2] == ["transport", "engine"]
    assert parameters(sender.register_model) == ["self", "model"]
    assert parameters(sender.register_collector) == ["self", "collector"]
    assert parameters(sender.init_all_workers_group)[:2] == ["self", "model_metadata"]
    assert parameters(sender.update_weights)[:2] == ["self", "weights"]
    assert kinds(sender.update_weights)["only"] == "KEYWORD_ONLY"
    for call, name in (
        (tx.VLLMCollectiveTransport, "device"),
        (tx.VLLMCollectiveTransport, "vllm_engine"),
        (sender, "engine"),
        (sender.update_weights, "weights"),
    ):
        assert default(call, name) is None
    assert kinds(tx.discover)["addresses"] == kinds(tx.connect)["addresses"] == "VAR_POSITIONAL"
    fields = {"url", "kind", "version", "worker_type", "num_gpus", "tp_size", "pp_size", "dp_size", "world_size"}
    assert fields | {"model", "weight_version", "transports"} <= set(parameters(tx.EngineInfo))


def test_errors_form_one_tree():
    found = {getattr(tx.errors, name) for name in tx.errors.__all__}
    assert all(issubclass(error, tx.WeightSyncError) for error in found)
    assert issubclass(tx.WeightSyncError, RuntimeError)
    assert issubclass(tx.errors.DeadlineError, TimeoutError)
    assert issubclass(tx.errors.ConfigError, ValueError)
    error = tx.errors.StoreError("it broke", expected="that it holds", state="nothing changed", hint="mend it")
    assert str(error) == "it broke. Expected: that it holds. State: nothing changed. Next: mend it."
