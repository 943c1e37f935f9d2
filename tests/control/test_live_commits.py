"""A version of changes that lands while the engine serves: what the engine is asked, and what goes wrong with it."""

import pytest
import torch

import torchrl_ext as tx
from tests.control.engines import client, running, weights
from tests.control.test_exchanges import QUESTIONS, told
from tests.processes import WAIT_S
from torchrl_ext.base.errors import EngineRefusedError, UpdateError, WeightSyncError

LIVE = ("vllm", "embedded")
FAULTS = ("fail", "cut", "lose", "junk", "twice")  # and "hang", which takes its time
MOST = 20  # more than the requests of an update


class Following:
    """An engine and its trainer, after a first update, which was whole."""

    def __init__(self, fake, root, settings=None, **how):
        self.fake, self.weights = fake, weights(1)
        own = {} if fake.kind == "inprocess" else {"timeout_s": WAIT_S, "load_timeout_s": WAIT_S, **(settings or {})}
        self.sender = tx.WeightSender(tx.DeltaTransport(root, keyframe_every=0), client(fake, **own), **how)
        self.sender.update_weights(self.weights)
        fake.calls.clear()

    def update(self):
        """Change an element, and send it; return the engine's row."""
        self.weights["b"][1, 2] += 1
        (row,) = self.sender.update_weights(self.weights).engines
        return row

    @property
    def asked(self):
        """What the engine was asked to do since the first update, questions left out."""
        rows = [row for call in self.fake.calls if (row := told(call)) is not None]
        kinds = [body["kind"] if isinstance(body, dict) and "kind" in body else route for route, body in rows]
        return [kind for kind in kinds if kind not in QUESTIONS]

    def holds(self, value):
        """Whether the engine holds the weights of a first update, and ``value`` where updates change them."""
        wanted = weights(1)
        wanted["b"][1, 2] = value
        return all(torch.equal(tensor, wanted[name]) for name, tensor in self.fake.tensors.items())


@pytest.mark.parametrize("port", LIVE)
def test_one_request_changes_the_engine_and_none_stops_it(port, tmp_path):
    with running(port) as fake:
        following = Following(fake, tmp_path)
        row = following.update()
        assert following.asked == ["prefetch", "commit", "keep"] and following.holds(2)
        assert (row.commit, row.pause_s, row.state, row.version) == ("live", 0.0, "serving", 2) and fake.label == "2"
        assert row.proof == "rehearsed" and not fake.wrongs


PAUSED = ("prefetch", "pause", "start", "load", "finish", "resume", "keep")


@pytest.mark.parametrize(
    ("port", "settings", "how", "reason"),
    [
        ("embedded", {}, {"commit": "paused"}, "commit='paused'"),
        ("vllm", {"pause_mode": "wait"}, {}, "pause_mode"),
        ("module", {}, {}, "this kind of engine"),
    ],
)
def test_what_needs_a_pause_gets_it_and_the_row_says_why(port, settings, how, reason, tmp_path):
    with running(port) as fake:
        following = Following(fake, tmp_path, settings, **how)
        row = following.update()
        own = {"POST /pause?mode=keep&clear_cache=false": "pause", "POST /pause?mode=wait&clear_cache=false": "pause"}
        own |= {"POST /resume": "resume"}
        asked = [own.get(one, one) for one in following.asked if not one.startswith(("POST /reset", "POST /update_w"))]
        assert asked == [one for one in PAUSED if port != "module" or one not in ("pause", "resume")]
        assert row.commit.startswith("paused: ") and reason in row.commit and row.version == 2 and following.holds(2)


@pytest.mark.parametrize("port", LIVE)
def test_a_live_commit_that_is_demanded_is_refused_rather_than_paused(port, tmp_path):
    with running(port) as fake:
        following = Following(fake, tmp_path, commit="live")
        assert following.update().commit == "live"
        fake.paused = True
        with pytest.raises(UpdateError, match=r"needs a pause: the engine does not serve.*commit='live' demands"):
            following.update()
        assert following.holds(2) and fake.label == "2" and "start" not in following.asked
        fake.paused = False
        assert following.update().commit == "paused: the version is sent whole" and following.holds(4)
        assert following.update().commit == "live" and following.holds(5)


@pytest.mark.parametrize("port", LIVE)
@pytest.mark.parametrize("fault", [*FAULTS, pytest.param("hang", marks=pytest.mark.exhaustive)])
def test_each_request_of_a_live_update_goes_wrong(port, fault, tmp_path):
    """It is served, or what was served before is; the engine never stops, and calls what it holds by its name."""
    limits = {"timeout_s": 0.5, "load_timeout_s": 0.5} if fault == "hang" else {}
    for number in range(MOST):
        with running(port) as fake:
            following = Following(fake, tmp_path / str(number), limits)
            fake.inject(fault, after=number)
            error = None
            try:
                following.update()
            except WeightSyncError as failure:
                error = failure
            made = len(fake.calls)
            fake.heal()
            where = f"{fault} at request {number}: {error}, {following.asked}"
            assert fake.serving and fake.whole and not fake.wrongs, where
            assert "POST /pause?mode=keep&clear_cache=false" not in following.asked, where
            assert following.holds(1 if error else 2) and fake.label == ("1" if error else "2"), where
            assert following.update().error is None and following.holds(3) and fake.serving, where
            following.sender.shutdown()
            if made <= number:
                return
    pytest.fail("an update of more requests")


@pytest.mark.parametrize("port", LIVE)
@pytest.mark.parametrize("commit", ["auto", "paused"])
def test_a_failed_commit_leaves_the_old_version_or_a_pause(port, commit, tmp_path):
    with running(port) as fake:
        following = Following(fake, tmp_path, commit=commit)
        following.update()
        fake.calls.clear()
        fake.inject("fail", "commit" if commit == "auto" else "finish")
        with pytest.raises(UpdateError, match="it fails here"):
            following.update()
        assert following.holds(2 if commit == "auto" else 3) and fake.paused is (commit == "paused")
        assert ("undo" in following.asked) is (commit == "auto")
        assert following.update().error is None and following.holds(4) and fake.serving


def test_a_version_that_was_kept_has_no_way_back(tmp_path):
    with running("vllm") as fake:
        following = Following(fake, tmp_path)
        following.update()
        update = following.sender.engine.update(2)
        update._leads_back = True  # as that of a client that has not heard of its `Keep`
        with pytest.raises(EngineRefusedError, match="there is no way back from version 2"):
            update.undo()
        assert following.holds(2) and fake.label == "2"
