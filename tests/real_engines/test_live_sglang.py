"""Versions that a real SGLang takes between two batches: each token is the weights' that its label names."""

import math
import random
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from tests.models import VOCAB, tiny_model
from tests.processes import WAIT_S
from tests.real_engines.conftest import small
from tests.real_engines.served import LONG, ServedSGLang, sending, until_met
from torchrl_ext.base.errors import WeightSyncError
from torchrl_ext.sync.outputs import score

pytestmark = pytest.mark.engine

NATS = 5e-4
CHUNK = 64

served = small(ServedSGLang, "module", extra_args=("--chunked-prefill-size", str(CHUNK)))


class Trainer:
    """A model that changes by a few elements of each tensor, and what it was at each version."""

    def __init__(self, sender):
        self.sender, self.model, self.weights, self.made = sender, tiny_model(5), {}, random.Random(7)
        self.scratch = tiny_model(5)
        assert self.update().commit.startswith("paused")  # the first version comes whole

    def nudge(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                chosen = torch.rand(parameter.shape) < 0.02
                parameter.add_(chosen * parameter.abs().mean() * 3 * self.made.choice((-1, 1)))

    def update(self):
        """The engine's row."""
        self.nudge()
        report = self.sender.update_weights(self.model)
        self.weights[report.version] = {name: one.clone() for name, one in self.model.state_dict().items()}
        assert report.verified
        return report.engines[0]

    def at(self, version):
        self.scratch.load_state_dict(self.weights[int(version)])
        return self.scratch


def says(served, prompt, count=1, **sampling):
    """A finished request: its tokens, their log-probabilities, and the version of each."""
    settings = {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True, **sampling}
    body = {"input_ids": prompt, "sampling_params": settings, "return_logprob": True}
    meta = served.http.post("/generate", body)["meta_info"]
    rows = meta["output_token_logprobs"]
    labels = [span["version"] for span in meta["weight_versions"] for _ in range(span["start"], span["end"])]
    assert meta["finish_reason"]["type"] == "length" and len(labels) == len(rows) == count
    return prompt, [row[1] for row in rows], [row[0] for row in rows], labels


@torch.no_grad()
def gap(trainer, request, cut=0):
    """The largest difference of a log-probability, in nats, to what `transformers` computes over keys that are kept.

    The version before the first label has computed the prompt as far as ``cut``.
    """
    prompt, tokens, found, labels = request
    cache, rows = None, []
    pieces = [(prompt[:cut], int(labels[0]) - 1)] if cut else []
    pieces += [(prompt[cut:], labels[0]), *(([token], label) for token, label in zip(tokens, labels[1:], strict=False))]
    for fed, version in pieces:
        out = trainer.at(version)(torch.tensor([fed]), use_cache=True, past_key_values=cache)
        cache = out.past_key_values
        rows.append(out.logits[0, -1].log_softmax(-1))
    rows = zip(rows[-len(tokens) :], tokens, found, strict=True)
    return max(abs(row[token].item() - one) for row, token, one in rows)


def cold(trainer, request, version):
    """The largest difference of a new token's log-probability to what the weights of one version give it."""
    prompt, tokens, found, _ = request
    expected = score(trainer.at(version), [[*prompt, *tokens]])[0][-len(tokens) :]
    return (torch.tensor(found) - torch.tensor(expected)).abs().max().item()


def prompts(seed, length, beginning=()):
    """Prompts that have nothing but a beginning in common."""
    made = random.Random(seed)
    while True:
        yield [*beginning, *(made.randrange(3, VOCAB) for _ in range(length))]


def nearest(trainer, request):
    """`gap`, and in front of which token of the prompt a version came if one did while the prompt was computed."""
    cuts = range(len(request[0]) if int(request[3][0]) - 1 in trainer.weights else 1)
    cuts = sorted(cuts, key=lambda cut: cut % CHUNK)  # where chunks end that are not shared with other prompts
    return next(((found, cut) for cut in cuts if (found := gap(trainer, request, cut)) < NATS), (math.inf, 0))


def under_load(served, trainer, length, count, updates, threads=4, beginning=()):
    """Of what is asked without a break in some threads while versions come, what was asked next to one of them."""
    over = Event()

    def client(seed):
        mine, found = prompts(seed, length, beginning), []
        while not over.is_set():
            found.append(says(served, next(mine), count))
        near = zip([found[0], *found], found, [*found[1:], found[-1]], strict=False)
        return [one for before, one, after in near if before[3][0] != after[3][-1]]

    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(client, seed) for seed in range(threads)]
        try:
            rows = [trainer.update() for _ in range(updates)]
        finally:
            over.set()
        found = [one for job in jobs for one in job.result(WAIT_S)]
    assert [(row.commit, row.pause_s, row.state) for row in rows] == [("live", 0.0, "serving")] * updates
    return found


def test_each_token_is_of_the_version_that_its_label_names(served, tmp_path):
    with sending("delta", tmp_path, served) as sender:
        trainer = Trainer(sender)
        found = under_load(served, trainer, 8, 100, 8)
        gaps = [gap(trainer, one) for one in found]
        crossed = [one for one in found if len({*one[3]}) > 1]
        assert len(crossed) > 3 and max(gaps) < NATS
        for prompt, tokens, logprobs, labels in crossed[:2]:  # neither older nor newer weights say the same
            moved = [labels[0], *labels[:-1]], [*labels[1:], labels[-1]]
            assert all(gap(trainer, (prompt, tokens, logprobs, other)) > NATS for other in moved)
        print(f"{len(found)} requests, {len(crossed)} of several versions, gap {max(gaps):.2g}")


def test_chunks_of_a_prompt_go_on_with_the_keys_of_earlier_ones(served, tmp_path):
    with sending("delta", tmp_path, served) as sender:
        trainer = Trainer(sender)

        def split():
            found = [nearest(trainer, one) for one in under_load(served, trainer, 3 * CHUNK - 5, 4, 4, threads=1)]
            assert max(distance for distance, _ in found) < NATS
            return any(cut for _, cut in found)

        until_met(split)


def test_a_conversation_that_begins_later_uses_no_older_key(served, tmp_path):
    with sending("delta", tmp_path, served) as sender:
        trainer = Trainer(sender)
        for _ in range(2):
            assert cold(trainer, says(served, LONG), sender.version) < NATS  # the cache has its beginning from here on
            assert trainer.update().commit == "live"
            with ThreadPoolExecutor(8) as pool:  # of which those that wait may find what the first has computed
                later = [*pool.map(lambda token: says(served, [*LONG, token], 4), range(3, 11))]
            assert {label for one in later for label in one[3]} == {str(sender.version)}
            assert max(cold(trainer, one, sender.version) for one in later) < NATS


def test_with_keep_cache_it_goes_on_with_older_keys(served, tmp_path):
    with sending("delta", tmp_path, served, keep_cache=True) as sender:
        trainer, prompt = Trainer(sender), next(prompts(99, 180))
        assert cold(trainer, says(served, prompt), sender.version) < NATS
        assert trainer.update().commit == "live"
        assert cold(trainer, says(served, prompt), sender.version) > 10 * NATS


def test_requests_that_come_with_versions_share_only_keys_of_theirs(served, tmp_path):
    with sending("delta", tmp_path, served) as sender:
        trainer = Trainer(sender)
        found = under_load(served, trainer, 3, 4, 5, threads=8, beginning=LONG)
        assert max(nearest(trainer, one)[0] for one in found) < NATS
        assert len({one[3][0] for one in found}) > 3


def test_a_version_that_is_taken_back_leaves_no_trace(served, tmp_path):
    with sending("delta", tmp_path / "good", served) as sender:
        trainer = Trainer(sender)
        before = says(served, LONG, 8, temperature=0)
    trainer.model.load_state_dict(trainer.weights[sender.version])
    other = tiny_model(6)
    asked = {"verify": "outputs", "probe": lambda prompts: score(trainer.probed, prompts), "max_gap": 1e-2}
    with sending("delta", tmp_path / "probed", served, proving=asked) as sender:
        trainer.sender, trainer.probed = sender, trainer.model
        trainer.update()
        version, before = sender.version, says(served, LONG, 8, temperature=0)
        trainer.probed = other  # as if the engine computed something else
        with pytest.raises(WeightSyncError, match="serves its previous weights") as error:
            trainer.update()
        assert [(row.state, row.version, row.commit) for row in error.value.rows] == [("serving", version, "")]
        again = says(served, LONG, 8, temperature=0)
        assert again[1:] == before[1:] and served.is_called(str(version))
        trainer.probed = trainer.model
        trainer.update()
        assert cold(trainer, says(served, LONG, 4), sender.version) < NATS
