"""Real engines, started once per session through the launchers that users have. Fixtures are named by kind."""

import pytest

from tests.engine.served import OLDER, ServedOlderSGLang, ServedOlderVLLM, ServedSGLang, ServedVLLM, serving
from tests.models import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "seed0")


def small(served, scope, **settings):
    """A fixture with a server of the small model."""

    @pytest.fixture(scope=scope)
    def engine(checkpoint, tmp_path_factory):
        log = tmp_path_factory.mktemp("log") / f"{served.kind}.log"
        with serving(served, checkpoint, max_model_len=256, log_path=log, **settings) as found:
            yield found

    return engine


vllm = small(ServedVLLM, "session", dtype="float32")
second_vllm = small(ServedVLLM, "session", dtype="float32")
tensor_parallel_vllm = small(ServedVLLM, "session", dtype="float32", tensor_parallel_size=2)
bfloat16_vllm = small(ServedVLLM, "module", dtype="bfloat16")

sglang = small(ServedSGLang, "session", dtype="float32")
tensor_parallel_sglang = small(ServedSGLang, "module", dtype="float32", tensor_parallel_size=2)
bfloat16_sglang = small(ServedSGLang, "module", dtype="bfloat16")
stock_sglang = small(ServedSGLang, "function", dtype="float32", plugin=False)  # without our plugin

older_vllm = small(ServedOlderVLLM, "module", dtype="float32", release=OLDER["vllm"])
tensor_parallel_older_vllm = small(
    ServedOlderVLLM, "module", dtype="float32", tensor_parallel_size=2, release=OLDER["vllm"]
)
bfloat16_older_vllm = small(ServedOlderVLLM, "module", dtype="bfloat16", release=OLDER["vllm"])

older_sglang = small(ServedOlderSGLang, "module", dtype="float32", release=OLDER["sglang"])
tensor_parallel_older_sglang = small(
    ServedOlderSGLang, "module", dtype="float32", tensor_parallel_size=2, release=OLDER["sglang"]
)
bfloat16_older_sglang = small(ServedOlderSGLang, "module", dtype="bfloat16", release=OLDER["sglang"])
