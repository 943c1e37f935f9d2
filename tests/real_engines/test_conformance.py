"""The kit for running engines (`torchrl_ext.testing.engine`) finds no fault of real engines with the plugin."""

from __future__ import annotations

import pytest

from tests.kinds import kind_checkpoint
from tests.processes import finished
from tests.real_engines.served import ServedSGLang, ServedVLLM, serving
from tests.testing import KIT

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]


@pytest.mark.parametrize("model", ["qwen3-tied", "qwen3-moe"])
@pytest.mark.parametrize("served", [ServedVLLM, ServedSGLang], ids=lambda served: served.kind)
def test_engines_with_the_plugin_have_no_faults(served, model, tmp_path):
    checkpoint = kind_checkpoint(model, tmp_path / model)
    with serving(served, checkpoint, max_model_len=256, dtype="float32", log_path=tmp_path / "log") as engine:
        for transport in ("delta", "disk", "collective"):
            given = ["--url", engine.url, "--kind", engine.kind, "--model", checkpoint, "--transport", transport]
            done = finished(KIT, tmp_path, *given, "--root", tmp_path / transport, timeout_s=600)
            assert done.returncode == 0, done.stdout + done.stderr
