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
    "DeltaTransport",
    "DiskTransport",
    "EngineClient",
    "EngineInfo",
    "IPCTransport",
    "InferenceClient",
    "LoraPublisher",
    "MegatronSource",
    "MemoryTransport",
    "RemoteLLMPolicy",
    "ShardedTransport",
    "SyncReport",
    "TransportWeightSyncScheme",
    "TransportWeightUpdater",
    "VLLMCollectiveTransport",
    "WeightReceiver",
    "WeightSender",
    "WeightSource",
    "WeightSyncError",
    "WeightUpdateConfig",
    "__version__",
    "as_source",
    "connect",
    "discover",
    "engines",
    "errors",
    "make_engine",
    "make_transport",
    "recommend",
    "transports",
}


def parameters(call):
    return list(inspect.signature(call).parameters)


def kinds(call):
    return {name: parameter.kind.name for name, parameter in inspect.signature(call).parameters.items()}


def test_the_public_names_are_these():
    assert set(tx.__all__) == NAMES
    assert set(dir(tx)) == NAMES


def test_type_checkers_read_the_signatures_of_what_is_imported():
    stub = ast.parse(Path(tx.__file__).with_suffix(".pyi").read_text())
    read = {one.name: ast.unparse(one.args) for one in stub.body if isinstance(one, ast.FunctionDef)}
    defined = {one.name: ast.unparse(one.args) for one in ast.parse(Path(tx.__file__).read_text()).body
               if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")}  # fmt: skip
    assert read == defined and {*read, *tx._HOME, "__version__"} == NAMES


def test_every_name_leads_somewhere():
    assert {name for name in NAMES if getattr(tx, name) is None} == set()


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'Pigeon'"):
        _ = tx.Pigeon


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


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("collective", "VLLMCollectiveTransport"),
        ("delta", "DeltaTransport"),
        ("disk", "DiskTransport"),
        ("memory", "MemoryTransport"),
    ],
)
def test_each_transport_name_stands_for_its_class(name, path):
    cls = registry.transports.load(name)
    assert cls is getattr(tx, path)
    assert cls.name == name


def test_a_name_that_does_not_exist_is_answered_with_the_names():
    with pytest.raises(ConfigError, match=r"no transport called 'dsik'.*collective.*disk.*did you mean 'disk'\?$"):
        tx.make_transport("dsik")
    with pytest.raises(ConfigError, match=r"no engine called 'vlm'.*did you mean 'vllm'"):
        tx.make_engine("vlm")
    with pytest.raises(ConfigError, match="does not take these settings"):
        tx.make_transport("disk", path="/tmp")


@pytest.mark.parametrize("name", ["collective", "delta", "disk", "memory"])
def test_every_transport_has_the_surface_of_torchrls_backend(name):
    cls = registry.transports.load(name)
    for protocol in (weight_sync_schemes.TransportBackend,):
        for method in ("send_weights", "receive_weights"):
            wanted = set(parameters(getattr(protocol, method))) - {"self", "weights"}
            assert wanted <= set(parameters(getattr(cls, method)))
    assert parameters(cls.send_weights) == ["self", "model_id", "weights"]
    assert inspect.signature(cls.send_weights).parameters["weights"].default is None
    assert kinds(cls.receive_weights) == {
        "self": "POSITIONAL_OR_KEYWORD",
        "timeout": "POSITIONAL_OR_KEYWORD",
        "weights": "KEYWORD_ONLY",
        "model": "KEYWORD_ONLY",
        "strategy": "KEYWORD_ONLY",
    }
    assert parameters(cls.check_connection) == ["self"]
    assert parameters(cls.shutdown) == ["self"]
    assert parameters(cls.init_all_workers_group)[:2] == ["self", "model_metadata"]


def test_the_collective_is_built_as_its_seed_says():
    signature = inspect.signature(tx.VLLMCollectiveTransport)
    positional = [name for name, kind in kinds(tx.VLLMCollectiveTransport).items() if kind == "POSITIONAL_OR_KEYWORD"]
    assert positional == ["master_address", "master_port", "rank", "world_size", "device", "vllm_engine"]
    assert signature.parameters["device"].default is None
    assert signature.parameters["vllm_engine"].default is None
    assert {"backend", "bucket_bytes", "timeout_s"} <= set(signature.parameters)


def test_the_disk_transport_takes_a_root_and_keyword_settings():
    found = kinds(tx.DiskTransport)
    assert found.pop("root") == "POSITIONAL_OR_KEYWORD"
    assert set(found.values()) == {"KEYWORD_ONLY"}
    assert {"keep_files", "shard_bytes", "files", "timeout_s"} <= set(found)
    assert inspect.signature(tx.DiskTransport).parameters["keep_files"].default is False


def test_the_sender_has_torchrls_surface():
    assert parameters(tx.WeightSender)[:2] == ["transport", "engine"]
    assert inspect.signature(tx.WeightSender).parameters["engine"].default is None
    assert parameters(tx.WeightSender.register_model) == ["self", "model"]
    assert parameters(tx.WeightSender.register_collector) == ["self", "collector"]
    assert parameters(tx.WeightSender.init_all_workers_group)[:2] == ["self", "model_metadata"]
    assert parameters(tx.WeightSender.update_weights)[:2] == ["self", "weights"]
    assert kinds(tx.WeightSender.update_weights)["only"] == "KEYWORD_ONLY"
    assert inspect.signature(tx.WeightSender.update_weights).parameters["weights"].default is None


def test_discovery_takes_addresses_and_says_what_it_found():
    assert kinds(tx.discover)["addresses"] == "VAR_POSITIONAL"
    assert kinds(tx.connect)["addresses"] == "VAR_POSITIONAL"
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
