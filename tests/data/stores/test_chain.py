"""Chains of versions: the route that costs least, what may be collected, what readers read, and what is new to them."""

import errno
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.data.stores.test_manifest import both
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import IntegrityError, StoreError
from torchrl_ext.data.stores.chain import Chain
from torchrl_ext.data.stores.follower import looks, newer, reach
from torchrl_ext.data.stores.local import LocalStore
from torchrl_ext.data.stores.manifest import MANIFEST, Manifest, version_name
from torchrl_ext.data.stores.store import MemoryStore

EMPTY = both(0)


def delta(version, base=None, run="r", base_run="r", nbytes=10):
    base, files = version - 1 if base is None else base, {"delta-00001.safetensors": nbytes}
    changed = {"version": version, "base_version": base, "run_id": run, "base_run_id": base_run, "files": files}
    return replace(EMPTY.delta, **changed)


def document(version, run="r", full=False, delta=None):
    """The manifest of a version: a full one of 1000 bytes, a delta, or both."""
    files = {**({"model.safetensors": 1000} if full else {}), **(delta.files if delta else {})}
    found = replace(EMPTY, version=version, run_id=run, files=files, full=() if full else None, delta=delta)
    return found.to_bytes()


class Chains(RuleBasedStateMachine):
    """Trainers publish, readers look for routes, and versions are collected, in any order."""

    def __init__(self):
        super().__init__()
        self.store = MemoryStore()
        self.chain, self.published = Chain(self.store), {}

    @rule(kind=st.sampled_from(["full", "delta", "both"]), nbytes=st.sampled_from([10, 400]), anew=st.booleans())
    def publish(self, kind, nbytes, anew):
        number, before = len(self.published) + 1, self.published.get(len(self.published))
        if before is None or (anew and kind == "full"):  # a run begins
            kind, run = "full", f"run{number}"
        else:
            run = before["run"]
        change = None if kind == "full" else delta(number, run=run, base_run=run, nbytes=nbytes)
        self.store.put(f"{version_name(number)}/manifest.json", document(number, run, kind != "delta", change))
        self.published[number] = {"kind": kind, "run": run, "nbytes": nbytes}
        self.chain.advance(number)

    def there(self):
        return self.chain.numbers()

    @rule(keep=st.integers(1, 3))
    def collect(self, keep):
        there = self.there()
        keyframes = [number for number in there if self.published[number]["kind"] != "delta"][-keep:]
        older = there[: there.index(keyframes[0])] if len(keyframes) == keep else []
        assert self.chain.collect(keep) == older

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def route(self, data):
        there = self.there()
        target = data.draw(st.sampled_from(there))
        held = data.draw(st.sampled_from([None, *((row["run"], number) for number, row in self.published.items())]))
        if held and data.draw(st.booleans()):
            held = ("other", held[1])
        deltas, keyframe, costs = [], None, {}
        for number in range(target, -1, -1):  # what a reader could begin with, from the newest down
            row = self.published.get(number)
            cost = sum(self.published[later]["nbytes"] for later in deltas)
            if row and held == (row["run"], number) and (not deltas or row["run"] == self.published[deltas[0]]["run"]):
                costs["held"] = (cost, [*deltas])
                break
            if number not in there:
                break
            if row["kind"] != "delta" and keyframe is None:
                keyframe, costs["keyframe"] = number, (cost + 1000, [*deltas])
            if row["kind"] == "full":
                break
            deltas.insert(0, number)
        found = self.chain.route(target, held)
        assert costs and found.nbytes == min(cost for cost, _ in costs.values())
        assert (found.nbytes, [manifest.version for _, manifest in found.deltas]) in costs.values()
        assert found.keyframe is None or found.keyframe.version == keyframe


TestChains = Chains.TestCase
TestChains.settings = settings(max_examples=100, stateful_step_count=30)


def test_versions_are_sorted_and_the_pointer_moves_forward_only(tmp_path):
    for name in (*map(version_name, (999_999, 3, 1_000_000)), "weight_v7", "weight_v00000x", "other"):
        (tmp_path / name).mkdir()
    assert Chain(LocalStore(tmp_path)).numbers() == [3, 999_999, 1_000_000]
    chain = Chain(MemoryStore())
    assert chain.latest() == 0
    chain.advance(5)
    chain.advance(5)
    with pytest.raises(StoreError, match="from version 5 to 4"):
        chain.advance(4)
    assert chain.latest() == 5


@pytest.mark.parametrize("pointer", [b"", b"1732789123456789013\n", b"-1", b"1.5", b"weight_v000001"])
def test_a_pointer_that_names_no_version_is_none_or_refused(pointer):
    chain = Chain(MemoryStore(), "r")
    chain.store.put("latest", pointer)
    if pointer.strip().isdigit() or not pointer:  # as somebody copies the root
        assert chain.head() == ("", 0)
        chain.own()
        chain.advance(2)
        assert chain.head() == ("r", 2)
    else:
        with pytest.raises(IntegrityError, match="the pointer 'latest'"):
            chain.latest()


def test_second_trainer_without_file_locks_ousts_the_first(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refused)
    first, second = (Chain(LocalStore(tmp_path), run) for run in ("a", "b"))
    for version, chain in enumerate((first, second), 1):
        chain.own()
        chain.advance(version)
    for _ in range(2):
        with pytest.raises(StoreError, match="where this trainer published before"):
            first.own()
    second.own()
    first.store.disown(), second.store.disown()


def publish(chain, number, run="r"):
    manifest = Manifest(version=number, run_id=run, params=(), files={}, full=())
    chain.store.put(f"{version_name(number)}/{MANIFEST}", manifest.to_bytes())
    chain.store.put("latest", f"{number} {run}\n".encode())


@pytest.fixture
def chain():
    return Chain(MemoryStore())


@pytest.mark.parametrize(
    ("seen", "new"), [(None, True), (("r", 3), False), (("", 3), False), (("r", 2), True), (("q", 3), True)]
)
def test_a_version_is_new_by_its_number_or_its_run(chain, seen, new):
    assert newer(chain, chain.version, looks(Deadline(0.0)), seen) is None
    publish(chain, 3, "q")
    assert chain.version(3).run_id == "q"
    publish(chain, 3)  # of the run that has the root now
    found = newer(chain, chain.version, looks(Deadline(0.0)), seen)
    assert (found is not None) == new and (found is None or (found.run_id, found.version) == ("r", 3))


def test_an_announced_version_is_waited_for(chain):
    def coming():
        yield
        publish(chain, 2)
        yield

    assert reach(chain, 2, chain.version, coming(), Deadline(0.0)).version == 2
