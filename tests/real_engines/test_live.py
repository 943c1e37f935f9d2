"""Versions that a vLLM takes while it serves: no pause, exact labels, no key of older weights for a later request."""

import copy
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torchrl_ext as tx
from tests.bench.models import plain_linears
from tests.models import PROMPT, VOCAB, tiny_model
from tests.processes import WAIT_S
from tests.real_engines.served import LONG, ServedVLLM, assert_spans, sending, serving
from tests.real_engines.test_delta import nudged
from torchrl_ext.engines.embedded.scheduler import cache_name

pytestmark = pytest.mark.engine

CLOSE = 1e-5  # of a log-probability, in nats
CHUNK = 48  # the most tokens that a step of the server computes, of all requests


def model_of(seed):
    """A small model with logits of a few nats, whose last bit is far below `CLOSE`."""
    model = tiny_model(seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.25)
    return model


@pytest.fixture(scope="module")
def served(checkpoint, tmp_path_factory):
    """A server whose weights are changed in place, as on a GPU, and that computes long prompts in several steps."""
    settings = {"max_model_len": 256, "dtype": "float32", "log_path": tmp_path_factory.mktemp("log") / "log"}
    settings["extra_args"] = [f"--max-num-batched-tokens={CHUNK}", "--max-num-seqs=12"]
    with plain_linears(), serving(ServedVLLM, checkpoint, **settings) as found:
        yield found


@torch.no_grad()
def keys_of(model, prompt):
    """The keys and values of a prompt, as `transformers` caches them."""
    return model(torch.tensor([prompt]), use_cache=True)[cache_name(model)]


@torch.no_grad()
def over_kept_keys(models, prompt, tokens, labels, cache=None):
    """The log-probabilities of given ``tokens``, each computed by the weights of its label over the keys before.

    Args:
        models: by version.
        cache: the keys of the prompt's first tokens, if other weights have computed them.
    """
    found, fed, name = [], prompt[cache.get_seq_length() if cache else 0 :], cache_name(models[labels[0]])
    for token, label in zip(tokens, labels, strict=True):
        out = models[label](torch.tensor([fed]), use_cache=True, **{name: cache})
        cache, fed = out[name], [token]
        found.append(out.logits[0, -1].log_softmax(-1)[token].item())
    return found


def told(choice):
    """The tokens of a choice, their versions and their log-probabilities."""
    labels = [span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])]
    numbers = [0 if label == "default" else int(label) for label in labels]
    return choice["token_ids"], numbers, [row["logprob"] for row in choice["logprobs"]["content"]]


def gap(found, wanted):
    return max(abs(one - other) for one, other in zip(found, wanted, strict=True))


def is_explained(models, prompt, choice):
    """Whether every log-probability is that of the weights of the token's label over the keys that were kept.

    The first steps of a prompt may have been computed by the version before that of the first token.
    """
    tokens, labels, found = told(choice)

    def fits(cache, count):
        wanted = over_kept_keys(models, prompt, tokens[:count], labels[:count], copy.deepcopy(cache))
        return gap(found[:count], wanted) <= CLOSE

    def begun():
        yield None
        if labels[0] - 1 in models:
            cache = keys_of(models[labels[0] - 1], prompt[:-1])
            for _ in prompt[1:]:
                yield cache
                cache.crop(-1)

    return any(fits(cache, 1) and fits(cache, len(tokens)) for cache in begun())


def hits(served):
    """How many tokens of prompts came from the prefix cache so far."""
    metrics = served.http.call("GET", "/metrics").text
    return sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)", metrics, re.MULTILINE)))


def prompts(chance):
    """Prompts of 8 to 160 tokens; some begin as others do."""
    while True:
        begin, more = LONG[: chance.choice((0, 0, 0, 0, 64, 120))], chance.randint(8, 40)
        yield [*begin, *(chance.randrange(3, VOCAB) for _ in range(more))]


def test_versions_land_under_load_and_each_token_is_of_its_label(served, tmp_path):
    model, given, count = model_of(0), prompts(random.Random(0)), 32
    models, done, over, told = {0: model}, [], threading.Event(), threading.Condition()

    def ask(together):
        while not over.is_set():
            with told:
                prompt = next(given)
            together.wait(WAIT_S)  # four requests begin in one moment
            choice = served.generate(count, prompt, temperature=1.0, logprobs=0)
            with told:
                done.append((prompt, choice))
                told.notify()

    barriers = [threading.Barrier(4) for _ in range(2)]
    with sending("delta", tmp_path, served, proving={"commit": "live"}) as sender, ThreadPoolExecutor(8) as pool:
        report = sender.update_weights(model)
        assert report.engines[0].commit == "paused: the version is sent whole"
        first = report.version
        models[first] = model
        asking = [pool.submit(ask, barriers[number % 2]) for number in range(8)]
        try:
            for seed in range(1, 7):
                model = nudged(model, 0.01, seed)
                models[first + seed] = model
                report = sender.update_weights(model)
                assert [row.commit for row in report.engines] == ["live"] and report.verified
                assert not served.paused() and served.is_called(str(first + seed))
                with told:
                    goal = len(done) + 5
                    assert told.wait_for(lambda goal=goal: len(done) >= goal, WAIT_S)
        finally:
            over.set()
            for barrier in barriers:
                barrier.abort()
            ends = {type(one.exception()) for one in asking}
    assert ends <= {type(None), threading.BrokenBarrierError}
    for prompt, choice in done:
        assert_spans(choice, count, [*models][1:])
        assert is_explained(models, prompt, choice), (len(prompt), choice["weight_versions"])
    assert sum(len(choice["weight_versions"]) > 1 for _, choice in done) > 5  # else none was met in the midst


def test_later_requests_share_no_keys_with_those_before(served, tmp_path):
    model = model_of(5)
    with sending("delta", tmp_path, served) as sender:
        models = {sender.update_weights(model).version: model}
        for seed in range(3):
            served.generate(4, LONG)
            before = hits(served)
            served.generate(4, LONG)
            assert hits(served) > before  # or there is nothing that could be shared
            model = nudged(model, 0.02, seed)
            report = sender.update_weights(model)
            models[report.version] = model
            assert [row.commit for row in report.engines] == ["live"]
            for _ in range(2):
                tokens, labels, found = told(served.generate(24, LONG, logprobs=0))
                assert {*labels} == {report.version}
                assert gap(found, over_kept_keys(models, LONG, tokens, labels)) <= CLOSE


def test_keys_are_shared_where_the_client_keeps_the_cache(served, tmp_path):
    model = model_of(6)
    with sending("delta", tmp_path, served, keep_cache=True) as sender:
        sender.update_weights(model)
        served.generate(4, LONG)
        report = sender.update_weights(nudged(model, 0.02, 1))
        before = hits(served)
        served.generate(4, LONG)
        assert [row.commit for row in report.engines] == ["live"] and hits(served) > before


def test_an_undo_gives_back_every_bit(served, tmp_path):
    model, wrong = model_of(7), threading.Event()

    def probe(prompts):
        return [[-1000.0 if wrong.is_set() else 0.0] * (len(prompt) - 1) for prompt in prompts]

    proving = {"verify": "outputs", "probe": probe, "max_gap": 900.0}
    with (
        sending("delta", tmp_path, served, proving=proving) as sender,
        ThreadPoolExecutor(2) as pool,
    ):
        first = sender.update_weights(model).version
        before = served.generate(24, LONG, logprobs=0, skip_reading_prefix_cache=True)
        running = [pool.submit(served.generate, 200, PROMPT, temperature=1.0) for _ in range(2)]
        wrong.set()
        with pytest.raises(tx.WeightSyncError) as error:
            sender.update_weights(nudged(model, 0.05, 1))
        wrong.clear()
        (row,) = error.value.rows
        assert (row.state, row.version) == ("serving", first) and not served.paused()
        assert served.is_called(str(first))
        for choice in (one.result() for one in running):
            assert {int(span["version"]) for span in choice["weight_versions"]} <= {first, first + 1}
        after = served.generate(24, LONG, logprobs=0, skip_reading_prefix_cache=True)
        assert told(after) == told(before)
        whole, last = nudged(model, 0.01, 2), nudged(model, 0.01, 3)
        served.assert_serves(whole, sender.update_weights(whole))  # after a failure
        report = sender.update_weights(last)
        assert [row.commit for row in report.engines] == ["live"]
        served.assert_serves(last, report)
