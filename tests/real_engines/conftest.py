"""Real engines, started once per session through the launchers that users have. Fixtures are named by kind."""

from contextlib import contextmanager

import pytest

from tests.models import tiny_model, tiny_tokenizer
from tests.real_engines.served import ServedSGLang, ServedVLLM, serving

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The small model, whose tokenizer has a chat template."""
    folder, tokenizer = tmp_path_factory.mktemp("model") / "seed0", tiny_tokenizer()
    tiny_model(0).save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


SERVED = {"vllm": ServedVLLM, "sglang": ServedSGLang}


@contextmanager
def starting(served, checkpoint, folders, dtype="float32", **settings):
    log = folders.mktemp("log") / f"{served.kind}.log"
    with serving(served, checkpoint, max_model_len=256, dtype=dtype, log_path=log, **settings) as found:
        yield found


def small(served, scope="session", **settings):
    """A fixture with a server of the small model."""

    @pytest.fixture(scope=scope)
    def engine(checkpoint, tmp_path_factory):
        with starting(served, checkpoint, tmp_path_factory, **settings) as found:
            yield found

    return engine


vllm, second_vllm = small(ServedVLLM), small(ServedVLLM)
sglang, second_sglang = small(ServedSGLang), small(ServedSGLang, "module")


def each(usual=tuple(SERVED), **settings):
    """A fixture with one server after the other; those that are not ``usual`` are left to ``--exhaustive``.

    With ``settings`` they are a module's own, one at a time: each takes gigabytes of memory.
    """
    params = [pytest.param(name, marks=() if name in usual else pytest.mark.exhaustive) for name in SERVED]

    @pytest.fixture(scope="module", params=params)
    def engine(request, checkpoint, tmp_path_factory):
        if not settings:
            yield request.getfixturevalue(request.param)
            return
        with starting(SERVED[request.param], checkpoint, tmp_path_factory, **settings) as found:
            yield found

    return engine


served = each()
tensor_parallel = each(usual=("vllm",), tensor_parallel_size=2)
bfloat16 = each(usual=("vllm",), dtype="bfloat16")
