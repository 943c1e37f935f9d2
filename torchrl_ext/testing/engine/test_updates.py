"""The cases of the kit; the docstring of each is its promise, and its row in the table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import torchrl_ext as tx
from torchrl_ext.errors import ConfigError, EngineError, EngineRefusedError, WeightSyncError, why
from torchrl_ext.testing.engine.plugin import SUBJECT
from torchrl_ext.testing.engine.subject import Outputs, Subject, Tensors, gap

_GROUPS, _GROUPS_ALONE = 8, 64  # updates of the case of every tensor, with transformers beside it and without
_TOKENS, _TRIES = 96, 4


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """The engine, after a first update with what it holds."""
    option = request.config.option
    if not getattr(option, "url", None):
        pytest.skip("not applicable: there is no engine; give --url")
    with ExitStack() as held:
        root = option.root or held.enter_context(tempfile.TemporaryDirectory())
        found = Subject(option.url, option.kind, option.model, option.transport, root)
        found.look()
        request.config.stash[SUBJECT] = found
        try:
            found.send(found.start)
        except WeightSyncError as error:
            found.assert_consistent(found.cold)
            pytest.skip(f"refused: {why(error)}")
        yield found
        found.drop_sender()


@pytest.fixture
def engine(subject: Subject) -> Iterator[Subject]:
    """The engine with the start weights, which it gets back afterwards."""
    off = gap(subject.says(), subject.cold)
    assert off <= subject.noise, f"the start weights do not bring its outputs back: they are {off:.2g} nats off"
    yield subject
    subject.drop_sender()
    subject.restore()


def test_identity(engine: Subject) -> None:
    """The start checkpoint, sent again, changes no log-probability."""
    for _ in range(2):
        engine.restore()


def test_destroy_and_restore(engine: Subject) -> None:
    """Other weights change the outputs, and the start weights bring them back exactly."""
    for seed in (1, 2):
        other = engine.shuffled(seed)
        engine.send(other)
        assert engine.moved(engine.says(), engine.cold), "other weights change no output"
        engine.assert_computes(other)
        engine.restore()


def test_every_tensor(engine: Subject) -> None:
    """A change in each tensor of the checkpoint reaches the outputs."""
    everything = engine.changed()
    engine.send(everything)
    assert engine.moved(engine.says(), engine.cold), "a change in every tensor changes no output"
    engine.assert_computes(everything)
    names = list(engine.start)
    count = min(len(names), _GROUPS if engine.reference and engine.bound < 0.1 else _GROUPS_ALONE)
    for group in (names[first::count] for first in range(count)):
        engine.send(engine.changed(group))
        assert engine.moved(engine.says(), engine.cold), f"no output changes with {', '.join(group[:5])}"


def test_tied_weights(engine: Subject) -> None:
    """An embedding that is the output head, too, changes in both places."""
    if not engine.tied:
        pytest.skip("not applicable: the checkpoint ties no weights")
    rows = engine.start[engine.tied]
    count = int(engine.config.get("text_config", engine.config)["vocab_size"])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    engine.send({**engine.start, engine.tied: torch.cat((rows[order], rows[count:]))})
    place = order.argsort().tolist()  # tokens by their new numbers are as probable as before
    found = gap(engine.says([[place[token] for token in prompt] for prompt in engine.prompts]), engine.cold)
    assert found <= engine.bound, f"tokens with other numbers are {found:.2g} nats less or more probable"


def test_partial_update(engine: Subject) -> None:
    """An update of some tensors leaves the engine as an update of all of them does."""
    names = [name for name in engine.start if "layers.1." in name] or list(engine.start)[:1]
    if not engine.send(engine.changed(names), only=names).part:
        pytest.skip("not applicable: by this transport the engine takes whole versions only")
    part = engine.says()
    assert engine.moved(part, engine.cold), "the part changes no output"
    engine.drop_sender()
    engine.send(engine.changed(names))
    assert engine.same(engine.says(), part), "the whole version gives other outputs than the part"


def test_nan(engine: Subject) -> None:
    """A NaN in the weights shows in the outputs, and leaves with the next update."""
    floats = [name for name, tensor in engine.start.items() if tensor.is_floating_point()]
    name = next((name for name in floats if "norm" in name and not name.startswith("visual")), floats[0])
    broken = engine.start[name].clone()
    broken.view(-1)[0] = float("nan")
    engine.send({**engine.start, name: broken})
    try:
        finite = torch.tensor(engine.says()).isfinite().all()
    except EngineRefusedError:  # such numbers are no JSON
        finite = torch.tensor(False)
    assert not finite, f"all outputs are finite with a NaN in {name}"
    engine.restore()


def test_experts(engine: Subject) -> None:
    """Experts that change places change the outputs, and do not if their router follows."""
    alone, together = engine.swapped_experts(routers=False), engine.swapped_experts(routers=True)
    if not alone:
        pytest.skip("not applicable: the checkpoint lists no experts")
    engine.send(alone)
    assert engine.moved(engine.says(), engine.cold), "two experts of each layer change places, and no output changes"
    engine.assert_computes(alone)
    engine.send(together)
    found = gap(engine.says(), engine.cold)
    assert found <= engine.bound, f"with their router, experts that changed places move outputs by {found:.2g} nats"


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(engine: Subject, level: int) -> None:
    """An update wakes an engine that sleeps, and it serves the update."""
    other = engine.changed()
    engine.send(other)
    expected = engine.says()
    engine.restore()
    try:
        engine.client.sleep(level)
    except (ConfigError, EngineRefusedError) as error:
        if engine.client.look()[0].state != "serving":
            engine.client.resume()
        pytest.skip(f"not applicable: {why(error)}")
    engine.send(other)
    assert engine.same(engine.says(), expected), f"outputs are off by {gap(engine.says(), expected):.2g} nats"


def test_killed_trainer(engine: Subject) -> None:
    """An engine whose trainer is killed in an update serves one whole version or nothing, and takes the next one."""
    versions = _versions(engine, engine.shuffled(4))
    engine.lose_trainer(4)
    engine.assert_consistent(engine.cold, *versions)
    engine.drop_sender()
    engine.send(engine.changed())
    engine.assert_computes(engine.changed())


def test_trainer_that_raises(engine: Subject) -> None:
    """An update that its trainer breaks off leaves one whole version or nothing, and the next update works."""

    def breaks() -> None:
        raise RuntimeError("the trainer breaks off")

    other = engine.shuffled(5)
    versions = _versions(engine, other)
    with pytest.raises(WeightSyncError, match="breaks off"):
        engine.send_half(other, breaks)
    engine.assert_consistent(engine.cold, *versions)
    engine.send(engine.changed())
    engine.assert_computes(engine.changed())


@pytest.mark.parametrize("what", ["name", "shape"])
def test_tensor_that_does_not_fit(engine: Subject, what: str) -> None:
    """An update with a tensor that the engine does not have is an error, and the next update works."""
    other, names = engine.shuffled(6), list(engine.start)
    name = names[len(names) // 2]
    if what == "name":
        other = {f"{key}.strange" if key == name else key: tensor for key, tensor in other.items()}
    else:
        other[name] = other[name][..., 1:].contiguous()
    versions = _versions(engine, engine.shuffled(6))
    with pytest.raises(WeightSyncError), engine.trainer() as sender:
        engine.send(other, sender)
        pytest.fail(f"the engine reports success, and has nothing for {name} of this {what}")
    engine.assert_consistent(engine.cold, *versions)
    engine.send(engine.changed())
    engine.assert_computes(engine.changed())


def test_two_trainers(engine: Subject) -> None:
    """A second trainer takes over; when the first sends again, it is refused or takes over itself."""
    one, two, three = (engine.shuffled(seed) for seed in (7, 8, 9))
    expected = [_versions(engine, tensors)[0] for tensors in (one, two, three)]
    with engine.trainer() as first, engine.trainer() as second:
        for tensors, sender, wanted in ((one, first, expected[0]), (two, second, expected[1])):
            engine.send(tensors, sender)
            assert engine.same(engine.says(), wanted), "it does not serve what its trainer sent"
        try:
            engine.send(three, first)
        except EngineError:
            engine.assert_consistent(*expected)
        else:
            assert engine.same(engine.says(), expected[2]), "it reports success, and serves another trainer's weights"
        engine.send(two, second)
        assert engine.same(engine.says(), expected[1]), "it does not serve what its trainer sent"


def test_requests_in_flight(engine: Subject) -> None:
    """Each token of a request that runs across an update comes from one version, none after a newer one."""
    client, other, met = tx.InferenceClient.connect(engine.url), engine.shuffled(10), False
    with ThreadPoolExecutor(len(engine.prompts)) as pool:
        for _ in range(_TRIES):
            sampling: dict[str, Any] = {"max_tokens": _TOKENS, "temperature": 1.0, "ignore_eos": True}
            running = [pool.submit(client.generate, [prompt], **sampling) for prompt in engine.prompts]
            engine.send(other)
            found = [one for future in running for one in future.result()]
            said = list(zip(engine.prompts, found, strict=True))
            whole = [[*prompt, *one.token_ids] for prompt, one in said]
            newer = engine.says(whole)
            engine.restore()
            older = engine.says(whole)
            for at, (prompt, one) in enumerate(said):
                place = len(prompt) - 1
                met |= _crossed(one.logprobs, older[at][place:], newer[at][place:], engine.bound)
            if met:
                return
    pytest.skip("not applicable: no request was at work when the update came")


def _crossed(found: tuple[float, ...], older: list[float], newer: list[float], bound: float) -> bool:
    """Return whether a request has tokens of both versions; fail if a token is of neither, or older than its last."""
    old, new = ([abs(a - b) <= bound for a, b in zip(found, row, strict=True)] for row in (older, newer))
    first = next((at for at, fits in enumerate(old) if not fits), len(old))
    wrong = next((at for at in range(first, len(new)) if not new[at]), None)
    assert wrong is None, f"token {wrong} of a request across an update is of no version"
    return 0 < first < len(old)


def _versions(engine: Subject, tensors: Tensors) -> list[Outputs]:
    """Return the engine's answers with these weights; it has the start weights afterwards."""
    engine.send(tensors)
    found = engine.says()
    engine.restore()
    return [found]
