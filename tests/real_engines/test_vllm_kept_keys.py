"""Keys and values that a real vLLM server keeps outside itself: none of older weights is ever used again."""

import json
import os

import pytest

from tests.models import greedy, tiny_model
from tests.processes import ROOT
from tests.real_engines.served import FORKING, LONG, ServedVLLM, sending, serving

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The folder of the keys."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def served(checkpoint, kept):
    settings = {"dtype": "float32", "max_model_len": 256, "log_path": kept.with_suffix(".log")}
    settings["environ"] = {"PYTHONPATH": os.pathsep.join((FORKING, str(ROOT)))}  # where the server finds the connector
    connector = {
        "kv_connector": "KeptKeys",
        "kv_connector_module_path": "tests.real_engines.kept_keys",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(kept)},
    }
    settings["extra_args"] = [f"--kv-transfer-config={json.dumps(connector)}"]
    with serving(ServedVLLM, checkpoint, **settings) as found:
        yield found


@pytest.mark.parametrize("pause_mode", ["keep", "wait", "abort"])
def test_an_update_drops_them(served, kept, tmp_path, pause_mode):
    with sending("disk", tmp_path, served, pause_mode=pause_mode) as sender:
        for seed in (81, 82, 83):
            model = tiny_model(seed)
            report = sender.update_weights(model)
            assert not list(kept.iterdir())
            expected = greedy(model, LONG, 24)
            for _ in range(2):
                choice = served.generate(24, LONG)
                assert choice["token_ids"] == expected
                assert choice["weight_versions"] == [{"version": str(report.version), "start": 0, "end": 24}]
            assert list(kept.iterdir())  # else there was nothing to be dropped
