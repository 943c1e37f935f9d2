"""The kit for running engines (`torchrl_ext.testing.engine`) judges stock engines, and engines with the plugin.

Faults that stock engines are known to have are expected by the names of the cases.
"""

from __future__ import annotations

import json

import pytest

from tests.kinds import kind_checkpoint
from tests.processes import finished
from tests.real_engines.served import ServedSGLang, ServedVLLM, serving
from tests.testing import KIT

pytestmark = pytest.mark.engine

SERVED = {one.kind: one for one in (ServedVLLM, ServedSGLang)}
PLUGIN = ("delta", "disk", "collective")
ENGINES = {
    ("vllm", False, "qwen3-tied"): ("disk",),
    ("sglang", False, "qwen3-moe"): ("disk",),
    ("vllm", False, "qwen3-moe"): ("disk",),
    ("sglang", False, "qwen3-tied"): ("disk",),
    ("sglang", False, "qwen3"): ("disk", "native"),
    **{(kind, True, model): PLUGIN for kind in SERVED for model in ("qwen3-tied", "qwen3-moe")},
}
FAULTS = {
    # the head keeps its packed copy, so what is computed with other weights is not what transformers computes
    ("vllm", "qwen3-tied", "disk"): {
        "test_destroy_and_restore",
        "test_every_tensor",
        "test_tied_weights",
        "test_killed_trainer",
        "test_trainer_that_raises",
        "test_tensor_that_does_not_fit[name]",  # which it drops with a line in its log
        "test_tensor_that_does_not_fit[shape]",
    },
    ("sglang", "qwen3-moe", "disk"): {
        "test_tensor_that_does_not_fit[name]",  # passed over
        "test_tensor_that_does_not_fit[shape]",  # the exception ends its scheduler, and the server with it
    },
}
"""Make, model and transport of a stock engine -> the cases that it fails; others are taken down, and fail no test."""


def ids(engines):
    return [f"{kind}-{'plugin' if plugin else 'stock'}-{model}" for kind, plugin, model in engines]


def judged(kind, plugin, model, transports, folder):
    """Start an engine, and let the kit judge it by each transport; yields the transport and the rows."""
    checkpoint = kind_checkpoint(model, folder / model)
    settings = {"max_model_len": 256, "dtype": "float32", "plugin": plugin, "log_path": folder / f"{kind}.log"}
    if kind == "vllm" and not plugin:
        settings["extra_args"] = ["--weight-transfer-config", json.dumps({"backend": "nccl"})]  # not ours
    with serving(SERVED[kind], checkpoint, **settings) as served:
        for transport in transports:
            own = folder / f"{transport}.jsonl"
            given = ["--url", served.url, "--kind", kind, "--model", checkpoint, "--transport", transport]
            done = finished(KIT, folder, *given, "--root", folder / transport, "--results", own, timeout_s=600)
            print(done.stdout, done.stderr)
            rows = [json.loads(line) for line in own.read_text().splitlines()]
            failed = {row["case"]: row["reason"] for row in rows if row["outcome"] == "failed"}
            assert done.returncode == bool(failed)
            yield transport, rows, failed


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ENGINES, ids=ids(ENGINES))
def test_stock_engines_have_known_faults_and_ours_none(engine, tmp_path):
    kind, plugin, model = engine
    for transport, rows, failed in judged(kind, plugin, model, ENGINES[engine], tmp_path):
        known = set() if plugin else FAULTS.get((kind, model, transport), failed.keys())
        assert len(rows) == 13 and failed.keys() == known, failed
