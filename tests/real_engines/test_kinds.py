"""Engines of each make follow a trainer of each kind: the cells of `tests.real_engines.cells`, one engine start each.

An engine starts with one checkpoint and gets twelve others. What it then says of given tokens is what the trainer says,
as near as when it started: an update adds nothing. ``--kind-results FILE`` takes down what came out, for
`tests.real_engines.compatibility`.
"""

import copy
import json
import re
from contextlib import contextmanager

import pytest
import torch

import torchrl_ext as tx
from tests.kinds import kind_checkpoint, kind_model
from tests.quantised import FORMS, quantise_checkpoint, quantised, round_to
from tests.real_engines.cells import CELLS
from tests.real_engines.served import ServedSGLang, ServedVLLM, serving
from torchrl_ext.base.errors import WeightSyncError
from torchrl_ext.sync.outputs import score

pytestmark = pytest.mark.engine

FAR = {"float32": 1e-4, "bfloat16": 1.0, "quantised": 5.0, "routed": 5.0}  # nats; other weights are 12 to 26 away
PROMPTS = [
    [5, 17, 99, 23, 42, 7, 256, 300, 11, 400, 33, 12],
    [71, 450, 8, 311, 19, 128, 64, 205, 377, 90, 14, 263],
]
SERVED = {one.kind: one for one in (ServedVLLM, ServedSGLang)}


def marked(cell):
    return pytest.param(cell, id=cell.name, marks=() if cell.core else pytest.mark.exhaustive)


FOLLOWING = [marked(cell) for cell in CELLS if not cell.refused]
REFUSING = [marked(cell) for cell in CELLS if cell.refused]


class Trainer:
    """Weights of one kind, a version after the other.

    Attributes:
        model: what computes with them.
        weights: what is sent: the model, or its weights in the form of a quantised checkpoint.
    """

    def __init__(self, cell):
        self.cell, self.seed = cell, 0
        self._take(made(cell, 0))

    def next(self):
        """Other weights, all of them."""
        self.seed += 1
        self._take(made(self.cell, self.seed))

    def nudge(self):
        """The same weights but for a few, of every tensor."""
        generator, model = torch.Generator().manual_seed(self.seed), copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter in model.parameters():
                chosen = torch.rand(parameter.shape, generator=generator) < 0.01
                parameter.add_((chosen * parameter.float().abs().mean() * 3).to(parameter.dtype))
        self._take(model)

    def versions(self, transport):
        """Three, and a sparse change where changes travel alone."""
        for change in (self.next, self.next, *((self.nudge,) if transport == "delta" else ()), self.next):
            change()
            yield self.weights

    def _take(self, model):
        self.model = self.weights = model
        if self.cell.quantisation in FORMS:
            self.weights = quantised(model, self.cell.quantisation)
            round_to(model, self.weights)


def made(cell, seed):
    return kind_model(cell.kind, seed, getattr(torch, cell.dtype))


class Started:
    """A running engine of a cell."""

    def __init__(self, served):
        self.served = served
        self.client = tx.make_engine(served.kind, url=served.url)

    def says(self):
        return self.client.logprobs(PROMPTS)

    def gap(self, model):
        """The largest difference to what the trainer says, in nats."""
        pairs = zip(torch.tensor(self.says()).flatten(), torch.tensor(score(model, PROMPTS)).flatten(), strict=True)
        return float(max(abs(one - other) for one, other in pairs))

    @contextmanager
    def sender(self, transport, root):
        engine = tx.make_engine(self.served.kind, url=self.served.url)
        files = {"root": root} if transport in ("disk", "delta") else {}
        sender = tx.WeightSender(tx.make_transport(transport, **files), engine)
        try:
            yield sender, engine
        finally:
            sender.shutdown()


@contextmanager
def started(cell, folder, seed=0):
    """The engine of a cell, cold from the weights of a seed."""
    served = SERVED[cell.engine]
    checkpoint = kind_checkpoint(cell.kind, folder / f"seed{seed}", seed, getattr(torch, cell.dtype))
    if cell.quantisation in FORMS:
        quantise_checkpoint(checkpoint, made(cell, seed), cell.quantisation)
    log = folder / f"{cell.engine}{seed}.log"
    settings = {"max_model_len": 128, "dtype": cell.dtype, "log_path": log, **cell.settings}
    with serving(served, checkpoint, **settings) as found:
        yield Started(found)


@pytest.fixture
def noted(request):
    """Takes down what came out, where somebody wants to know; a cell that fails too."""
    path, note = request.config.getoption("--kind-results"), {}
    yield note
    if path and note:
        with open(path, "a") as results:
            results.write(json.dumps({"outcome": "failed", **note}) + "\n")


@pytest.mark.parametrize("cell", FOLLOWING)
def test_an_engine_of_this_kind_says_what_the_trainer_says(cell, tmp_path, noted, request):
    trainer = Trainer(cell)
    with started(cell, tmp_path) as engine:
        noted.update(cell=cell.name, version=engine.client.info().version)
        cold = engine.gap(trainer.model)
        rounds = cell.dtype == "bfloat16" and "moe" in cell.kind  # what is rounded may choose another expert
        far = FAR["quantised" if cell.quantisation else "routed" if rounds else cell.dtype]
        bound, worst, proofs, repairs = max(far, 1.5 * cold), 0.0, set(), set()
        for transport in cell.transports:
            with engine.sender(transport, tmp_path / transport) as (sender, client):
                for weights in trainer.versions(transport):
                    report = sender.update_weights(weights)
                    gap = engine.gap(trainer.model)
                    print(f"{cell.name}: {transport} {report.version}, {report.proof}, gap {gap:.2g}, cold {cold:.2g}")
                    assert report.verified and report.proof in cell.proofs
                    assert gap <= bound
                    worst, proofs = max(worst, gap), proofs | {report.proof}
                repairs |= {step for row in client.rehearsed for step in row.get("repairs", ())}
        noted.update(gap_cold=cold, gap_after=worst, proof=", ".join(sorted(proofs)), repairs=sorted(repairs))
        after = engine.says()
        # what the start checkpoint has no name for lands on no worker, whichever part of the model that holds
        strange = {**dict(tx.as_source(trainer.weights)), "model.layers.0.strange.weight": torch.zeros(3)}
        refused = pytest.raises(WeightSyncError, match=r"layers\.0\.strange")
        with engine.sender("disk", tmp_path / "stranger") as (sender, _), refused:
            sender.update_weights(strange)
        assert engine.says() == after
    if request.config.getoption("--exhaustive"):
        with started(cell, tmp_path, trainer.seed) as cold_start:
            noted["as_cold"] = max(map(abs, differences(after, cold_start.says())))
            assert after == cold_start.says()
    noted["outcome"] = "proved"


def differences(one, other):
    return (torch.tensor(one) - torch.tensor(other)).flatten().tolist()


@pytest.mark.parametrize("cell", REFUSING)
def test_engine_that_cannot_follow_refuses_before_weights_travel(cell, tmp_path, noted):
    trainer = Trainer(cell)
    with started(cell, tmp_path) as engine:
        noted.update(cell=cell.name, version=engine.client.info().version)
        before, cold = engine.says(), engine.gap(trainer.model)
        for transport in cell.transports:
            refused = pytest.raises(WeightSyncError, match=cell.refused)
            with engine.sender(transport, tmp_path / transport) as (sender, _), refused as error:
                trainer.next()
                sender.update_weights(trainer.weights)
            if cell.stays_paused:
                assert [row.state for row in error.value.rows] == ["paused"] and engine.served.paused()
                break
            assert engine.says() == before
        found = re.search(cell.refused, str(error.value))
        noted.update(outcome="refused", gap_cold=cold, reason=found[0])
