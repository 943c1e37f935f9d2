"""Updates between two rounds of an engine that generates: labels, log-probabilities, and the way back."""

import threading

import pytest
import torch

import torchrl_ext as tx
from tests.engines.embedded import served_here
from tests.models import PROMPT, tiny_checkpoint, tiny_model
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import UpdateError
from torchrl_ext.data.landing.patcher import Patcher
from torchrl_ext.engines.embedded.engine import EmbeddedEngine
from torchrl_ext.engines.embedded.sampling import GenerateRequest
from torchrl_ext.engines.embedded.scheduler import cache_name

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 8}
CLOSE = 1e-5  # nats, in float32; two versions are further than 1e-2 apart
ROWS, TOKENS = 64, 96


class Trained:
    """A policy that is sent by changes to an engine of this process, and its weights of each version."""

    def __init__(self, engine, url, root, **settings):
        self.engine, self.policy, self.sent = engine, tiny_model(0, **SIZES), {}
        self.sender = tx.WeightSender(tx.make_transport("delta", root=root), tx.connect(url), **settings)
        self.sender.register_model(self.policy)
        self.update()

    @torch.no_grad()
    def update(self):
        weight = self.policy.model.layers[0].mlp.down_proj.weight
        weight.view(-1)[len(self.sent) % 7 :: 7] *= 1.03125
        self.policy.lm_head.weight.view(-1)[len(self.sent) % 5 :: 5] += 0.03125
        number = str(self.sender._attempted + 1)
        self.sent[number] = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}
        return self.sender.update_weights()


@pytest.fixture
def trained(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "model", **SIZES)
    engine = EmbeddedEngine(str(checkpoint), dtype="float32")
    with served_here(engine) as served:
        made = Trained(engine, served.url, tmp_path / "root")
        yield made
        made.sender.shutdown()


def begin(engine, prompts, count):
    """Requests that all begin in one round."""
    sampling = {"temperature": 1.0, "max_tokens": count, "ignore_eos": True, "logprobs": 0}
    asked = [{"token_ids": prompt, "sampling_params": {**sampling, "seed": n}} for n, prompt in enumerate(prompts)]
    with engine.scheduler.between_rounds():
        return [engine.scheduler.submit(GenerateRequest.from_json(one, "request")) for one in asked]


@torch.no_grad()
def replayed(sent, prompts, sequences):
    """Log-probabilities of the tokens over kept keys, each by the weights of its label; shape (rows, tokens)."""
    model, loaded, cache, found = tiny_model(0, **SIZES), None, None, []
    labels = [span["version"] for span in sequences[0].spans for _ in range(span["start"], span["end"])]
    rows, width = torch.tensor([one.token_ids for one in sequences]), max(map(len, prompts))
    pads = torch.tensor([width - len(prompt) for prompt in prompts])
    fed = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    for at, label in enumerate(labels):
        if label != loaded:
            model.load_state_dict(sent[label])
            loaded = label
        places = torch.arange(width + at) - pads[:, None]
        how = {"attention_mask": (places >= 0).long(), "position_ids": places[:, -fed.shape[1] :].clamp(min=0)}
        out = model(input_ids=fed, use_cache=True, **how, **{cache_name(model): cache})
        cache, fed = out[cache_name(model)], rows[:, at : at + 1]
        found.append(out.logits[:, -1].log_softmax(-1).gather(1, fed)[:, 0])
    return torch.stack(found, 1), labels


def test_each_token_has_the_log_probability_of_the_version_that_labels_it(trained):
    """Of 30,720 tokens, in batches whose requests begin in one round, with prompts short and long."""
    prompts = [(PROMPT * 12)[: 1 + 7 * n % 90] for n in range(ROWS)]
    prompts = [[token % 64 for token in prompt] for prompt in prompts]
    compared, seen, ended = 0, set(), threading.Event()
    reports = []

    def train():
        while not ended.is_set():
            reports.append(trained.update())

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        batches = []
        for _ in range(5):
            jobs = begin(trained.engine, prompts, TOKENS)
            batches.append([job.future.result(120)[0] for job in jobs])
    finally:
        ended.set()
        trainer.join(60)
    assert {row.commit for report in reports for row in report.engines} == {"live"}
    assert all(report.verified for report in reports)
    for sequences in batches:
        assert len({tuple((span["version"], span["start"]) for span in one.spans) for one in sequences}) == 1
        expected, labels = replayed(trained.sent, prompts, sequences)
        found = torch.tensor([[entry["logprob"] for entry in one._logprobs] for one in sequences])
        assert (found - expected).abs().max() < CLOSE
        compared, seen = compared + found.numel(), seen | {*labels}
    assert compared >= 30_000 and len(seen) > 5


def test_a_commit_that_reads_back_wrong_is_taken_back_while_the_engine_serves(trained, monkeypatch):
    put, before = Patcher._put, trained.engine.digests()

    def damaged(patcher, writes):
        monkeypatch.setattr(Patcher, "_put", put)
        writes.values[0] ^= 1
        return put(patcher, writes)

    monkeypatch.setattr(Patcher, "_put", damaged)
    (job,) = begin(trained.engine, [[3, 17]], 200)
    with pytest.raises(UpdateError, match="differs from what was written") as told:
        trained.update()
    assert (told.value.rows[0].state, told.value.rows[0].version) == ("serving", 1)
    assert trained.engine.digests() == before and not trained.engine.paused()
    (sequence,) = job.future.result(60)
    assert [span["version"] for span in sequence.spans] == ["1"]
    assert trained.update().verified


def test_an_engine_without_a_way_back_halts(trained, monkeypatch):
    put = Patcher._put

    def damaged(patcher, writes):
        writes.values[0] ^= 1
        return put(patcher, writes)

    monkeypatch.setattr(Patcher, "_put", damaged)
    with pytest.raises(UpdateError) as told:
        trained.update()
    assert told.value.rows[0].state == "paused" and trained.engine.paused()
    monkeypatch.setattr(Patcher, "_put", put)
    report = trained.update()
    assert report.verified and report.engines[0].commit == "paused: the version is sent whole"


def test_a_round_waits_for_a_switch_that_waits_for_a_round(trained):
    """A thread that runs one round after the other would otherwise take the lock again and again."""
    (job,) = begin(trained.engine, [[3]], 400)
    for _ in range(20):
        with trained.engine.scheduler.between_rounds():
            assert not job.future.done()
            held = len(job.sequences[0].token_ids)
            Deadline(0.01).stop.wait(0.002)
            assert len(job.sequences[0].token_ids) == held
    job.future.result(60)
