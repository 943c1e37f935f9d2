"""Which engines a router is told to use, in front of scripted routers and engines: addresses, and new starts."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import FakeEngine
from tests.rpc.test_router import Earlier, Engine, Gateway, serving
from torchrl_ext.errors import ConfigError, EngineError, UpdateError
from torchrl_ext.rpc.health import Health
from torchrl_ext.rpc.router import RouterClient
from torchrl_ext.serving.routing import Routing
from torchrl_ext.serving.served import ExternalEngines, OwnedEngines
from torchrl_ext.serving.topology import Topology
from torchrl_ext.types import EngineInfo, EngineRow, SyncReport


@pytest.fixture
def urls():
    with ExitStack() as ends:
        yield [ends.enter_context(serving(Engine())).url for _ in range(3)]


def report(*rows, version=1):
    engines = [EngineRow(engine=name, kind="embedded", state=state, version=number) for name, state, number in rows]
    return SyncReport(version=version, transport="disk", engines=tuple(engines))


def infos(urls, types=("regular",) * 3):
    return [EngineInfo(url=url, kind="embedded", worker_type=one) for url, one in zip(urls, types, strict=False)]


def listed(url):
    return {worker.url for worker in RouterClient(url).workers()}


def by_name(url):
    return url.replace("127.0.0.1", "localhost")


ADDRESSES = [str, by_name, lambda url: url.replace("127.0.0.1", "[::1]") + "/"]
"""Ways to write the address of an engine."""
STRANGE = ["inprocess", "ray://actor", "http://elsewhere:8000", "http://:0"]
STATES = st.sampled_from([None, ("paused", 0), ("lost", None), *(("serving", version) for version in range(4))])
REPORTS = st.tuples(
    st.tuples(STATES, STATES, STATES),
    st.sampled_from(ADDRESSES),
    st.none() | st.tuples(st.sampled_from(STRANGE), STATES),
)
COMPLAINTS = st.tuples(st.integers(0, 2), st.booleans())


def test_a_router_uses_the_engines_of_which_nobody_complains_whatever_happens(urls):
    """Reports and complaints in any order, under any of the engines' addresses."""

    @settings(max_examples=25, deadline=None)
    @given(st.lists(REPORTS | COMPLAINTS, max_size=8), st.integers(0, 1), st.sampled_from(ADDRESSES[:2]))
    def holds(steps, lag, rename):
        late, disliked = set(), set()
        with serving(Gateway(rename=rename)) as router, Routing(infos(urls), router=router.url, max_lag=lag) as routing:
            for step in steps:
                before = set(urls) - late - disliked
                if isinstance(step[1], bool):
                    url, dislikes = urls[step[0]], step[1]
                    if dislikes:
                        routing.health.fail(url, EngineError("it hangs"), by="somebody")
                    else:
                        routing.health.mend(url, by="somebody")
                    (disliked.add if dislikes else disliked.discard)(url)
                else:
                    states, address, other = step
                    told = {url: state for url, state in zip(urls, states, strict=True) if state}
                    rows = [(address(url), *state) for url, state in told.items()]
                    rows += [(other[0], *other[1])] if other and other[1] else []
                    newest = max((version for _, state, version in rows if state == "serving"), default=0)
                    unclear = set(urls) - set(told) if len(rows) > len(told) else set()
                    fit = {
                        url for url, (state, version) in told.items() if state == "serving" and version >= newest - lag
                    }
                    late = (late & unclear) | (set(urls) - unclear - fit)
                    changes = routing.follow(report(*rows))
                    assert dict(changes.problems).keys() == unclear
                    after = set(urls) - late - disliked
                    assert (set(changes.added), set(changes.removed)) == (after - before, before - after)
                assert {by_name(url) for url in listed(router.url)} == set(map(by_name, set(urls) - late - disliked))

    holds()


def test_an_earlier_router_is_told_to_let_go_in_its_own_words(urls):
    script = Earlier()
    with serving(script) as router, Routing(infos(urls), router=router.url) as routing:
        script.urls[:] = [by_name(url) for url in urls]
        routing.follow(report((urls[0], "paused", 0), *((url, "serving", 1) for url in urls[1:])))
        assert script.urls == [by_name(url) for url in urls[1:]]


# routers of ours


class Routers:
    """Takes the place of `start`: keeps the specs of routers, each of which lists whatever it is started with.

    Attributes:
        runs: whether the last one does.
        refused: how many starts fail from now on.
    """

    def __init__(self, router, script):
        self.url, self.script, self.specs, self.runs, self.refused = router.url, script, [], False, 0

    def start(self, spec):
        self.specs.append(spec)
        if self.refused:
            self.refused -= 1
            raise EngineError("this router does not start")
        pools = {"regular": spec.workers, "prefill": spec.prefill, "decode": spec.decode}
        found = [
            (kind, url) if isinstance(url, str) else (kind, url[0]) for kind, urls in pools.items() for url in urls
        ]
        self.script.workers = {url: {"id": url, "url": url, "worker_type": kind} for kind, url in found}
        self.runs = True
        return SimpleNamespace(url=self.url, alive=lambda: self.runs, stop=self.stop)

    def stop(self):
        self.runs = False


@pytest.fixture
def routers(monkeypatch):
    script = Gateway()
    with serving(script) as router:
        made = Routers(router, script)
        monkeypatch.setattr("torchrl_ext.serving.router.start", made.start)
        yield made


@pytest.fixture
def pools(urls, routers):
    with Routing(infos(urls, ("prefill", "prefill", "decode"))) as routing:
        yield routing


def test_a_router_with_pools_comes_back_at_its_address_with_other_members(pools, urls, routers):
    rows = [(url, "serving", 1) for url in urls]
    assert pools.follow(report((urls[0], "paused", 0), *rows[1:])).removed == (urls[0],)
    assert listed(pools.url) == set(urls[1:])
    assert pools.follow(report(*rows)).added == (urls[0],)
    assert listed(pools.url) == set(urls)
    assert [spec.port for spec in routers.specs] == [0, *[urlsplit(pools.url).port] * 2]


def test_a_router_that_is_down_or_died_by_itself_is_started_again_by_the_next_report(pools, urls, routers):
    rows = [(urls[0], "paused", 0), *((url, "serving", 1) for url in urls[1:])]
    routers.refused = 1
    assert "is down" in dict(pools.follow(report(*rows)).problems)[pools.url]
    for _ in range(2):
        assert pools.follow(report(*rows)).problems == () and routers.runs
        assert listed(pools.url) == set(urls[1:])
        routers.stop()


def test_pools_are_left_as_they_are_where_one_would_be_empty_or_the_router_is_given(pools, urls):
    with Routing(pools.engines, router=pools.url) as given:
        for routing, lost in ((pools, 2), (given, 0)):
            rows = [(url, "paused" if i == lost else "serving", 1) for i, url in enumerate(urls)]
            ((url, problem),) = routing.follow(report(*rows)).problems
            assert url == urls[lost] and "keeps its pools" in problem and listed(pools.url) == set(urls)


def test_a_closed_routing_starts_no_router_for_a_lost_engine_or_a_late_report(urls, routers):
    routing = Routing(infos(urls[:1]))
    routing.close()
    routing.health.fail(urls[0], EngineError("it is lost"), by="somebody")
    routing.follow(report((urls[0], "serving", 1)))
    assert len(routers.specs) == 1 and not routers.runs


def test_a_given_router_that_does_not_answer_is_a_problem_and_not_an_error(urls):
    with serving(Gateway()) as router:
        routing = Routing(infos(urls), router=router.url)
    assert dict(routing.follow(report(*((url, "serving", 1) for url in urls))).problems).keys() == {router.url}
    routing.close()


VLLMS = "vllm_router.launch_router --policy=consistent_hash"
SGLANGS = "sglang_router.launch_router --policy=manual --disable-retries"


@pytest.mark.parametrize(
    ("kind", "settings", "own"),
    [
        ("vllm", {}, f"{VLLMS} --health-check-endpoint=/health --worker-urls"),
        ("embedded", {}, f"{VLLMS} --health-check-endpoint=/health"),
        ("sglang", {}, f"{SGLANGS} --health-check-endpoint=/ping"),
        ("sglang", {"api_key": "secret"}, SGLANGS),
        ("sglang", {"make": "vllm"}, f"{VLLMS} --health-check-endpoint=/ping"),
        ("vllm", {"make": "sglang", "policy": "random"}, "sglang_router.launch_router --policy=random"),
    ],
)
def test_engines_get_the_router_of_their_make_or_the_one_that_is_named(urls, routers, kind, settings, own):
    with Routing([EngineInfo(url=urls[0], kind=kind)], **settings):
        command = routers.specs[0].command(1)
    assert set(own.split()) <= set(command) and command[-2:] == ["--worker-urls", urls[0]]
    assert ("--disable-retries" in command) is ("sglang_router" in own)
    assert ("--health-check-endpoint" in " ".join(command)) is ("api_key" not in settings)
    assert "secret" not in str(command)  # it would show in the list of processes
    with OwnedEngines(Topology.parse({kind: [{"name": "a", "model_path": "/m"}]})):  # without engines yet
        assert settings or routers.specs[1].module in own


@pytest.mark.parametrize(
    ("kind", "flag", "port"), [("vllm", "--vllm-pd-disaggregation", []), ("sglang", "--pd-disaggregation", ["9001"])]
)
def test_pools_are_told_the_port_where_they_meet_if_the_router_hands_it_on(urls, routers, kind, flag, port):
    members = [
        EngineInfo(url=urls[0], kind=kind, worker_type="prefill", bootstrap_port=9001),
        EngineInfo(url=urls[1], kind=kind, worker_type="decode"),
    ]
    with Routing(members):
        command = routers.specs[0].command(1)
    assert command[command.index(flag) + 1 :] == ["--prefill", urls[0], *port, "--decode", urls[1]]
    with serving(Gateway()) as router:
        Routing(members, router=router.url).close()
        sent = [body for method, path, body in router.calls if (method, path) == ("POST", "/workers")]
    assert [body.get("bootstrap_port") for body in sent] == [*([9001] if port else [None]), None]


def test_what_one_router_cannot_serve_is_refused_before_it_is_made(urls, routers):
    vllm, sglang = (EngineInfo(url=url, kind=kind) for url, kind in zip(urls, ("vllm", "sglang"), strict=False))
    for engines, more, words in (
        ([sglang], {"make": "nginx"}, "'nginx'"),
        ([vllm, sglang], {}, r"sglang, vllm need different .*InferenceClient\.connect"),
        ([vllm], {"router": "http://127.0.0.1:1", "policy": "random"}, "policy applies to routers that the job starts"),
    ):
        with pytest.raises(ConfigError, match=words):
            Routing(engines, **more)
    assert not routers.specs


def test_external_engines_are_one_model():
    with (
        FakeEngine("vllm") as engine,
        serving(Gateway()) as router,
        ExternalEngines(engine.url, router=router.url) as job,
    ):
        assert list(job.models) == list(job.updatable()) == ["default"]
        assert listed(job.model("default").url) == {engine.url}
        with pytest.raises(ConfigError, match=r"no model called 'critic'.*default"):
            job.model("critic")


def test_an_adopted_engine_waits_for_its_first_report_and_a_failed_update_is_followed_too(urls):
    def failing():
        raise UpdateError("one engine is lost", report=report((urls[0], "paused", 1), *good[1:], version=2))

    good = [(url, "serving", 2) for url in urls]
    with serving(Gateway()) as router, Routing(infos(urls[:2]), router=router.url, update_weights=False) as routing:
        routing.adopt(infos(urls)[2])
        assert listed(router.url) == set(urls[:2])
        assert routing.following(lambda: report(*good))().version == 1
        assert listed(router.url) == set(urls)
        with pytest.raises(UpdateError):
            routing.following(failing)()
        assert listed(router.url) == set(urls[1:])
        with pytest.raises(ConfigError, match="'default' does not follow the trainer"):
            routing.fleet()


def test_a_fleet_follows_the_engines_of_its_routing():
    with ExitStack() as ends:
        fakes = [ends.enter_context(FakeEngine("embedded")) for _ in range(3)]
        router = ends.enter_context(serving(Gateway()))
        found = infos([fake.url for fake in fakes])
        routing = ends.enter_context(Routing(found[:2], router=router.url))
        fleet = routing.fleet()
        routing.adopt(found[2])
        assert fleet.members() == tuple(fake.url for fake in fakes)
        routing.release(fakes[0].url)
        routing.release("http://nobody:1")
        assert fleet.members() == tuple(fake.url for fake in fakes[1:]) and listed(router.url) == {fakes[1].url}
        routing.follow(report(*((fake.url, "serving", 1) for fake in fakes[1:])))
        assert listed(router.url) == {fake.url for fake in fakes[1:]}


def test_complaints_before_a_router_listened_count_and_one_that_takes_no_engine_back_says_so(urls):
    health = Health()
    health.fail(urls[0], EngineError("it hangs"), by="somebody")
    with serving(Gateway()) as router:
        routing = Routing(infos(urls), router=router.url, health=health)
        assert listed(router.url) == set(urls[1:])
    with routing, pytest.raises(EngineError, match="did not add it again"):
        health.mend(urls[0], by="somebody")
