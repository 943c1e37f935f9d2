"""A second release of each engine does what the newest does, as far as it has the routes; what it lacks is said.

Nothing of ours compares numbers of releases: each part is used where it is there.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import torchrl_ext as tx
from tests.engine.following import Follows, FollowsInBfloat16, OfOneKind, Recovers, sending
from tests.engine.following_deltas import FollowsByDelta, serving_deltas
from tests.engine.served import OLDER, ServedOlderSGLang, ServedOlderVLLM, assert_spans
from tests.models import greedy, tiny_model
from torchrl_ext.cli.main import main

pytestmark = pytest.mark.engine


class OlderRelease(OfOneKind):
    """Updates by each transport, and what differs between releases: discovery, labels, pauses, requests in flight."""

    pauses: tuple[str, ...] = ()
    test_five_syncs_leave_the_engine_at_the_trainers_weights = (
        Follows.test_five_syncs_leave_the_engine_at_the_trainers_weights
    )

    def test_it_is_the_release_that_was_asked_for_and_says_what_it_follows(self, served):
        (info,) = tx.discover(served.url)
        assert (info.kind, info.version.partition("+")[0]) == (served.kind, OLDER[served.kind])
        assert {"disk", "collective", "delta", "ipc"} <= set(info.transports)
        engine = tx.make_engine(served.kind, url=served.url)
        assert engine.info() == info

    def test_doctor_finds_nothing_wrong_with_it(self, served, checkpoint, capsys):
        assert main(["doctor", served.url, "--transport", "collective", "--model", str(checkpoint), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["findings"]
        assert {row["level"] for row in found} == {"ok"}, found
        assert any(OLDER[served.kind] in str(row["found"]) for row in found)

    def test_each_pause_mode_serves_the_new_weights(self, served, tmp_path):
        for i, mode in enumerate(self.pauses):
            old, new = tiny_model(100 + 2 * i), tiny_model(101 + 2 * i)
            with sending("disk", tmp_path / mode, served, pause_mode=mode) as sender:
                sender.update_weights(old)
                assert served.says(old)  # fills the prefix cache with what must not be used again
                sender.update_weights(new)
            assert served.says(new) and not served.paused()

    def test_requests_in_flight_complete_and_say_no_wrong_version(self, served, tmp_path):
        old, new = tiny_model(31), tiny_model(32)
        with sending("delta", tmp_path, served) as sender, ThreadPoolExecutor(4) as pool:
            first = sender.update_weights(old).version
            futures = [pool.submit(served.generate, 200, temperature=1.0) for _ in range(4)]
            second = sender.update_weights(new).version
            for choice in [future.result() for future in futures]:
                assert_spans(choice, 200, [first, second], served.tells)
        assert served.says(new)

    def test_rollouts_say_the_version_of_each_token_or_that_it_is_not_known(self, served, tmp_path):
        model = tiny_model(33)
        with sending("disk", tmp_path, served) as sender:
            version = sender.update_weights(model).version
        client = tx.InferenceClient.connect(served.url)
        (found,) = client.generate([[3, 17, 42, 5]], max_tokens=8, ignore_eos=True, temperature=0.0)
        client.close()
        assert list(found.token_ids) == greedy(model, [3, 17, 42, 5], 8)
        assert found.token_versions() in ([[version] * 8] if served.tells else [[version] * 8, [-1] * 8])

    def test_its_log_has_no_warning_of_what_the_plugin_lacks(self, served):
        log = served.server.log_path.read_text()
        assert "torchrl_ext found" not in log and " lacks " not in log


class TestOlderVLLM(OlderRelease):
    kind, pauses = "older_vllm", ("abort", "wait", "keep")


class TestOlderSGLang(OlderRelease):
    kind, pauses = "older_sglang", ("abort", "retract", "in_place")

    def test_it_opens_no_session_and_its_loads_are_read_by_either_route(self, served):
        assert served.http.call("POST", "/begin_weight_update", {}).status in (404, 405)
        assert served.http.call("GET", "/ready").status in (404, 405)
        assert tx.make_engine("sglang", url=served.url).port.loads() == [{"dp_rank": 0, "running": 0, "waiting": 0}]


@pytest.mark.exhaustive
class TestOlderVLLMFollows(Follows):
    kind = "older_vllm"


@pytest.mark.exhaustive
class TestOlderVLLMRecovers(Recovers):
    kind = "older_vllm"


@pytest.mark.exhaustive
class TestOlderVLLMInBfloat16(FollowsInBfloat16):
    kind = "older_vllm"


@pytest.mark.exhaustive
class TestOlderSGLangFollows(Follows):
    kind = "older_sglang"


@pytest.mark.exhaustive
class TestOlderSGLangRecovers(Recovers):
    kind = "older_sglang"


@pytest.mark.exhaustive
class TestOlderSGLangInBfloat16(FollowsInBfloat16):
    kind = "older_sglang"


vllm_by_delta = serving_deltas(
    ServedOlderVLLM, {"float32": {"dtype": "float32", "release": OLDER["vllm"]}}, ("float32",)
)
sglang_by_delta = serving_deltas(
    ServedOlderSGLang, {"float32": {"dtype": "float32", "release": OLDER["sglang"]}}, ("float32",)
)


@pytest.mark.exhaustive
class TestOlderVLLMByDelta(FollowsByDelta):
    @pytest.fixture
    def served(self, vllm_by_delta):
        return vllm_by_delta


@pytest.mark.exhaustive
class TestOlderSGLangByDelta(FollowsByDelta):
    @pytest.fixture
    def served(self, sglang_by_delta):
        return sglang_by_delta
