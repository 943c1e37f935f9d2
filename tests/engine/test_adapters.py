"""LoRA adapters by name and version, in real engines: the same promises from both kinds."""

import signal
import threading
import time

import pytest

import torchrl_ext as tx
from tests.adapters import lora_policy, randomise
from tests.engine.conftest import small
from tests.engine.served import LONG, OLDER, ServedSGLang, ServedVLLM, sending, serving
from tests.models import PROMPT, greedy, tiny_model
from tests.pages import on_servers
from tests.processes import WAIT_S, calling, finished
from torchrl_ext.errors import EngineRefusedError, UpdateError
from torchrl_ext.rpc.engine import Engine

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

NAME = "policy-lora"


class AdaptedVLLM(ServedVLLM):
    def ask(self, prompt=PROMPT, count=24, adapter=NAME):
        body = {"token_ids": prompt, "sampling_params": {"temperature": 0, "max_tokens": count, "ignore_eos": True}}
        answer = self.http.post("/inference/v1/generate", body | ({"model": adapter} if adapter else {}))
        return answer["choices"][0]["token_ids"], answer["model"]

    def cached_tokens(self):
        lines = self.http.call("GET", "/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


class AdaptedSGLang(ServedSGLang):
    found = 0

    def ask(self, prompt=PROMPT, count=24, adapter=NAME):
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}}
        answer = self.http.post("/generate", body | ({"lora_path": adapter} if adapter else {}))
        self.found += answer["meta_info"]["cached_tokens"]
        return answer["output_ids"], answer["meta_info"].get("adapter")

    def cached_tokens(self):
        return self.found


MAKES = {"vllm": AdaptedVLLM, "sglang": AdaptedSGLang}
adapted_vllm, adapted_sglang = (small(make, "module", lora_rank=16) for make in MAKES.values())
MORE = [f"{kind}, {what}" for kind in MAKES for what in ("two workers", "older")]


@pytest.fixture(scope="module", params=[*MAKES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def engine(request, checkpoint, tmp_path_factory):
    kind, _, what = request.param.partition(", ")
    if not what:
        yield request.getfixturevalue(f"adapted_{kind}")
        return
    settings = {"release": OLDER[kind]} if what == "older" else {"tensor_parallel_size": 2}
    settings |= {"max_model_len": 256, "dtype": "float32", "log_path": tmp_path_factory.mktemp("log") / "log"}
    with serving(MAKES[kind], checkpoint, lora_rank=16, **settings) as found:
        yield found


@pytest.fixture
def adapters(engine, tmp_path):
    sender = tx.AdapterSender(tmp_path / "adapters", tx.connect(engine.url))
    yield sender
    sender.shutdown()


@pytest.fixture(scope="module")
def policy():
    return lora_policy(0)


def test_each_version_is_served_under_the_name_while_base_and_process_stay(engine, adapters, policy):
    pid, base = engine.server.pid, greedy(tiny_model(0), LONG, 24)
    seen, before = [], 0
    for seed in (1, 2, 3):
        randomise(policy, seed)
        report = adapters.load(NAME, policy)
        (row,) = report.engines
        assert (row.state, row.version, row.error) == ("serving", report.version, None) and report.version > before
        expected = greedy(policy, LONG, 24)
        for _ in range(2):  # the second time from the cache
            assert engine.ask(LONG) == (expected, f"{NAME}@{report.version}")
        assert engine.ask(LONG, adapter=None)[0] == base
        seen.append(expected)
        before = report.version
    assert len({tuple(tokens) for tokens in [*seen, base]}) == 4
    assert engine.cached_tokens() > 0, "nothing was cached, so that nothing could have leaked"
    assert engine.server.pid == pid and engine.server.alive()


def running_request(engine, answers):
    request = threading.Thread(target=lambda: answers.append(engine.ask(count=200)))
    request.start()
    return request


def test_a_request_that_runs_ends_with_the_version_that_it_began_with(engine, adapters, policy):
    randomise(policy, 4)
    first = adapters.load(NAME, policy).version
    expected, answers = greedy(policy, PROMPT, 200), []
    request, until = running_request(engine, answers), time.monotonic() + WAIT_S
    while not engine.running():
        assert time.monotonic() < until
        if not request.is_alive():  # it was over before anybody looked
            assert answers.pop() == (expected, f"{NAME}@{first}")
            request = running_request(engine, answers)
    randomise(policy, 5)
    second = adapters.load(NAME, policy).version
    assert engine.ask() == (greedy(policy, PROMPT, 24), f"{NAME}@{second}")
    request.join(WAIT_S)
    assert answers == [(expected, f"{NAME}@{first}")]


def test_what_the_engine_could_not_serve_whole_is_refused_and_the_older_version_goes_on(engine, adapters, policy):
    randomise(policy, 6)
    version = adapters.load(NAME, policy).version
    bad = {
        "rank 32 is greater than max_lora_rank 16": lora_policy(0, rank=32),
        "layers.2": lora_policy(0, changes={"num_hidden_layers": 3}),  # the engine's model has two
    }
    for words, model in bad.items():
        serves = f"(still serves, with|is serving, at) version {version}"
        with pytest.raises(UpdateError, match=f"(?s){words}.*{serves}") as error:
            adapters.load(NAME, model)
        (row,) = error.value.rows
        assert (row.state, row.version) == ("serving", version) and row.error
        assert engine.ask() == (greedy(policy, PROMPT, 24), f"{NAME}@{version}")
    randomise(policy, 7)
    assert adapters.load(NAME, policy).version > version
    assert engine.ask()[0] == greedy(policy, PROMPT, 24)


def test_requests_by_a_name_that_was_unloaded_are_refused(engine, adapters, policy):
    adapters.load(NAME, policy)
    adapters.unload(NAME)
    with pytest.raises(EngineRefusedError, match=f"(?s){NAME}"):
        engine.ask()
    assert engine.ask(adapter=None)[0] == greedy(tiny_model(0), PROMPT, 24)
    with pytest.raises(EngineRefusedError, match=f"no adapter '{NAME}' is loaded"):
        adapters.unload(NAME)
    adapters.load(NAME, policy)
    assert engine.ask()[0] == greedy(policy, PROMPT, 24)


def dies(root, url, step):
    """Be a trainer that is killed at a step of its update."""
    setattr(Engine, step, lambda *_, **__: signal.raise_signal(signal.SIGKILL))
    tx.AdapterSender(root, tx.connect(url)).load(NAME, lora_policy(99))


@pytest.mark.parametrize("step", ["load", "commit"])
def test_a_trainer_that_dies_before_the_switch_leaves_the_older_version_and_the_next_one_goes_on(
    engine, tmp_path, policy, step
):
    root = tmp_path / "adapters"
    adapters = tx.AdapterSender(root, tx.connect(engine.url))
    randomise(policy, 8)
    version = adapters.load(NAME, policy).version
    adapters.shutdown()
    died = finished(calling(dies, str(root), engine.url, step))
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert engine.ask() == (greedy(policy, PROMPT, 24), f"{NAME}@{version}")
    randomise(policy, 9)
    adapters = tx.AdapterSender(root, tx.connect(engine.url))
    later = adapters.load(NAME, policy).version
    adapters.shutdown()
    assert later > version + 1  # the number that was published and never served is used up
    assert engine.ask() == (greedy(policy, PROMPT, 24), f"{NAME}@{later}")


def test_clients_for_rollouts_generate_with_the_adapter_and_know_its_version(engine, adapters, policy):
    randomise(policy, 10)
    version = adapters.load(NAME, policy).version
    client = tx.InferenceClient.connect(engine.url, adapter=NAME)
    (found,) = client.generate([PROMPT], max_tokens=24, temperature=0, ignore_eos=True)
    assert list(found.token_ids) == greedy(policy, PROMPT, 24)
    assert found.token_versions() == [version] * 24
    client.close()


def test_new_base_weights_keep_the_adapter(engine, adapters, policy, tmp_path):
    randomise(policy, 11)
    adapters.load(NAME, policy)
    with sending("disk", tmp_path / "base", engine) as sender:
        for seed in (1, 0):  # and back, for the tests that follow
            sender.update_weights(tiny_model(seed))
            assert engine.ask(adapter=None)[0] == greedy(tiny_model(seed), PROMPT, 24)
            assert engine.ask()[0] == greedy(lora_policy(11, base=seed), PROMPT, 24)


def test_the_page_about_lora(adapted_vllm, adapted_sglang, checkpoint):
    on_servers("lora", checkpoint, adapted_vllm.url, adapted_sglang.url)
