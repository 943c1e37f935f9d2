"""The cases of the kit; the docstring of each is its promise, and its row in the table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from torchrl_ext.base.errors import ConfigError, EngineError, EngineRefusedError, WeightSyncError, why
from torchrl_ext.base.types import label_number
from torchrl_ext.testing.engine.plugin import SUBJECT
from torchrl_ext.testing.engine.subject import Subject, Tensors

_GROUPS, _GROUPS_ALONE = 8, 64  # updates of the case of every tensor, with transformers beside it and without


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """The engine, after a first update with what it holds."""
    option = request.config.option
    if not getattr(option, "url", None):
        pytest.skip("not applicable: there is no engine; give --url")
    root = option.root or tmp_path_factory.mktemp("trainers")
    found = Subject(option.url, option.kind, option.model, option.transport, str(root))
    found.look()
    request.config.stash[SUBJECT] = found
    try:
        with found.trainer() as sender:
            sender.update_weights(found.start)
    except WeightSyncError as error:
        found.assert_consistent(found.cold)
        pytest.skip(f"refused: {why(error)}")
    label = found.info.weight_version
    if label_number(label) and found.off(found.cold) > found.noise:  # a fresh engine at none has a fault of its own
        where = f"at version {label} of another trainer, and not at the checkpoint in {found.model}"
        pytest.exit(f"{found.url} was {where}. Next: restart the engine.")
    return found


@pytest.fixture
def engine(subject: Subject) -> Iterator[Subject]:
    """The engine with the start weights, which it gets back afterwards."""
    with subject.trainer() as subject.sender:
        subject.restore()
        yield subject
    with subject.trainer() as subject.sender:
        subject.restore()


def test_identity(engine: Subject) -> None:
    """The start checkpoint, sent again, changes no log-probability."""
    engine.restore()  # as when this case began


def test_destroy_and_restore(engine: Subject) -> None:
    """Other weights change the outputs, and the start weights bring them back exactly."""
    for other in (engine.other(1), engine.other(2)):
        engine.sender.update_weights(other)
        assert engine.off(engine.cold) > engine.visible, "other weights change no output"
        engine.assert_computes(other)
        engine.restore()


def test_every_tensor(engine: Subject) -> None:
    """A change in each tensor of the checkpoint reaches the outputs."""
    names = list(engine.start)
    count = min(len(names), _GROUPS if not engine.why_not and engine.bound < 0.1 else _GROUPS_ALONE)
    for group in (names, *(names[first::count] for first in range(count))):
        tensors = engine.changed(group)
        engine.sender.update_weights(tensors)
        assert engine.off(engine.cold) > engine.visible, f"no output changes with {', '.join(group[:5])}"
        if group is names:
            engine.assert_computes(tensors)


def test_tied_weights(engine: Subject) -> None:
    """An embedding that is the output head, too, changes in both places."""
    if not engine.tied:
        pytest.skip("not applicable: the checkpoint ties no weights")
    rows, count = engine.start[engine.tied], engine.vocabulary
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    engine.sender.update_weights({**engine.start, engine.tied: torch.cat((rows[order], rows[count:]))})
    place = order.argsort().tolist()  # tokens by their new numbers are as probable as before
    off = engine.off(engine.cold, [[place[token] for token in prompt] for prompt in engine.prompts])
    assert off <= engine.bound, f"tokens with other numbers are {off:.2g} nats less or more probable"


def test_partial_update(engine: Subject) -> None:
    """An update of some tensors, alone where a transport sends parts, leaves the engine as one of all of them does."""
    names = [name for name in engine.start if "layers.1." in name] or list(engine.start)[:1]
    alone = engine.sender._transport.abilities.parts
    report = engine.sender.update_weights(engine.changed(names), only=names if alone else None)
    if alone and not report.part:
        pytest.skip("not applicable: by this transport the engine takes whole versions only")
    assert engine.off(engine.cold) > engine.visible, "the part changes no output"
    part = engine.client.logprobs(engine.prompts)
    with engine.trainer() as another:
        another.update_weights(engine.changed(names))
    assert engine.off(part) <= engine.noise, "the whole version gives other outputs than the part"


def test_nan(engine: Subject) -> None:
    """A NaN in the weights shows in the outputs, and leaves with the next update."""
    floats = [name for name, tensor in engine.start.items() if tensor.is_floating_point()]
    name = next((name for name in floats if "norm" in name and not name.startswith("visual")), floats[0])
    broken = engine.start[name].clone()
    broken.view(-1)[0] = float("nan")
    engine.sender.update_weights({**engine.start, name: broken})
    with suppress(EngineRefusedError):  # such numbers are no JSON
        assert engine.off(engine.cold) == math.inf, f"all outputs are finite with a NaN in {name}"


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(engine: Subject, level: int) -> None:
    """An update wakes an engine that sleeps, and it serves the update."""
    if engine.info.stock:
        pytest.skip("not applicable: only our plugin tells an update that the engine sleeps")
    other = engine.other(3)
    expected = engine.outputs_of(other)
    try:
        engine.client.sleep(level)
    except (ConfigError, EngineRefusedError) as error:
        pytest.skip(f"not applicable: {why(error)}")
    engine.sender.update_weights(other)
    off = engine.off(expected)
    assert off <= engine.noise, f"outputs are off by {off:.2g} nats"


def test_killed_trainer(engine: Subject) -> None:
    """An engine whose trainer is killed in an update serves one whole version or nothing, and takes the next one."""
    with _goes_on(engine, 4):
        engine.lose_trainer(4)


def test_trainer_that_raises(engine: Subject) -> None:
    """An update that its trainer breaks off leaves one whole version or nothing, and the next update works."""

    def breaks() -> None:
        raise RuntimeError("the trainer breaks off")

    with _goes_on(engine, 5) as other, pytest.raises(WeightSyncError, match="breaks off"):
        engine.send_half(other, breaks)


def test_two_trainers(engine: Subject) -> None:
    """A second trainer takes over; when the first sends again, it is refused or takes over itself."""
    versions = [engine.other(seed) for seed in (7, 8, 9)]
    expected = [engine.outputs_of(tensors) for tensors in versions]
    with engine.trainer() as first, engine.trainer() as second:
        for sender, number in ((first, 0), (second, 1), (first, 2), (second, 1)):
            try:
                sender.update_weights(versions[number])
            except EngineError:
                if number < 2:
                    raise
                engine.assert_consistent(*expected)
            else:
                off = engine.off(expected[number])
                assert off <= engine.noise, f"it reports success, and serves outputs {off:.2g} nats from its trainer's"


@pytest.mark.parametrize("what", ["name", "shape"])
def test_tensor_that_does_not_fit(engine: Subject, what: str) -> None:
    """An update with a tensor that the engine does not have is an error, and the next update works."""
    name = list(engine.start)[len(engine.start) // 2]
    with _goes_on(engine, 6) as other, pytest.raises(WeightSyncError), engine.trainer() as sender:
        tensor = other.pop(name)
        other |= {f"{name}.strange": tensor} if what == "name" else {name: tensor[..., 1:].contiguous()}
        sender.update_weights(other)
        pytest.fail(f"the engine reports success, and has nothing for {name} of this {what}")


@contextmanager
def _goes_on(engine: Subject, seed: int) -> Iterator[Tensors]:
    """Yield other weights; fail unless the engine then serves the start weights, these or none, and takes an update."""
    other = engine.other(seed)
    version = engine.outputs_of(other)
    yield other
    engine.assert_consistent(engine.cold, version)
    other = engine.other(0)
    with engine.trainer() as sender:
        sender.update_weights(other)
    engine.assert_computes(other)
