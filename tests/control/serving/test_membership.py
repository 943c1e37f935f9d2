"""Which engines a router is told to use, in front of scripted routers and engines."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control.test_router import Engine, Gateway, serving
from tests.fakes import FakeEngine
from torchrl_ext.base.errors import ConfigError, EngineUnreachableError, UpdateError
from torchrl_ext.base.reports import EngineRow, SyncReport
from torchrl_ext.base.types import EngineInfo
from torchrl_ext.control.serving.router import RouterClient
from torchrl_ext.control.serving.routing import Routing
from torchrl_ext.control.serving.topology import OwnedEngines, Serving, parse_plans


@pytest.fixture
def urls():
    with ExitStack() as ends:
        yield [ends.enter_context(serving(Engine())).url for _ in range(3)]


def report(*rows, version=1):
    """A report of the run "now", which is also the run of versions that name none."""
    engines = [
        EngineRow(engine=name, kind="embedded", state=state, version=number, run=next(iter(run), "now"))
        for name, state, number, *run in rows
    ]
    return SyncReport(version=version, transport="disk", run="now", engines=tuple(engines))


def infos(urls, types=("regular",) * 3):
    return [EngineInfo(url=url, kind="embedded", worker_type=one) for url, one in zip(urls, types, strict=False)]


def listed(url):
    return {*RouterClient(url).workers()}


def by_name(url):
    return url.replace("127.0.0.1", "localhost")


ADDRESSES = [str, by_name, lambda url: url.replace("127.0.0.1", "[::1]") + "/"]
"""Ways to write the address of an engine."""
STRANGE = ["inprocess", "ray://actor", "http://elsewhere:8000", "http://:0"]
OF_RUNS = [("serving", version, run) for version in range(3) for run in ("now", "before", "")]
STATES = st.sampled_from([None, ("paused", 0), ("lost", None), ("serving", None), *OF_RUNS])
REPORTS = st.tuples(
    st.tuples(STATES, STATES, STATES),
    st.sampled_from(ADDRESSES),
    st.none() | st.tuples(st.sampled_from(STRANGE), STATES),
)


def test_a_router_uses_the_engines_with_the_newest_weights(urls):
    """Reports in any order, under any of the engines' addresses; versions of other runs are never the newest."""

    @settings(max_examples=25, deadline=None)
    @given(st.lists(REPORTS, max_size=8), st.sampled_from(ADDRESSES[:2]))
    def holds(steps, rename):
        fit = set(urls)
        with serving(Gateway(rename=rename)) as router, Routing(infos(urls), router=router.url) as routing:
            for states, address, other in steps:
                told = {url: state for url, state in zip(urls, states, strict=True) if state}
                rows = [(address(url), *state) for url, state in told.items()]
                rows += [(other[0], *other[1])] if other and other[1] else []
                if told:
                    newest = max((row[2] for row in rows if row[3:] == ("now",)), default=None)
                    if newest is not None:
                        fit = {url for url, state in told.items() if state == ("serving", newest, "now")}
                    routing.follow(report(*rows))
                else:
                    with pytest.raises(ConfigError, match="the report is about"):
                        routing.follow(report(*rows))
                assert {by_name(url) for url in listed(router.url)} == set(map(by_name, fit))

    holds()


# routers of ours


class Routers:
    """Takes the place of `start`: keeps the specs of routers, each of which lists whatever it is started with."""

    def __init__(self, router, script):
        self.url, self.script, self.specs = router.url, script, []

    def start(self, spec):
        self.specs.append(spec)
        pools = {"regular": spec.workers, "prefill": spec.prefill, "decode": spec.decode}
        found = [
            (kind, url) if isinstance(url, str) else (kind, url[0]) for kind, urls in pools.items() for url in urls
        ]
        self.script.workers = {url: {"id": url, "url": url, "worker_type": kind} for kind, url in found}
        return SimpleNamespace(url=self.url, stop=lambda: None)


@pytest.fixture
def routers(monkeypatch):
    script = Gateway()
    with serving(script) as router:
        made = Routers(router, script)
        monkeypatch.setattr("torchrl_ext.control.serving.server.start", made.start)
        yield made


def test_pools_keep_the_engines_that_they_were_started_with(routers, urls, caplog):
    rows = [(urls[0], "paused", 0), *((url, "serving", 1) for url in urls[1:])]
    with Routing(infos(urls, ("prefill", "prefill", "decode"))) as pools:
        pools.follow(report(*rows))
        assert listed(pools.url) == set(urls)
    assert f"keeps its prefill and decode pools, although {urls[0]} changed" in caplog.text


def test_reports_of_failed_updates_are_followed_or_it_is_said(urls):
    with serving(Gateway()) as router:
        routing = Routing(infos(urls), router=router.url)
    rows = [(url, "serving", 2) for url in urls]
    good = report(*rows)
    for call in (lambda: routing.follow(good), routing.following(lambda: good)):
        with pytest.raises(EngineUnreachableError, match=router.url):
            call()

    def failing():
        raise UpdateError("one engine is lost", report=report((urls[0], "paused", 1), *rows[1:], version=2))

    with pytest.raises(UpdateError, match="is lost"):  # rather than the router's error
        routing.following(failing)()
    with serving(Gateway()) as router, Routing(infos(urls), router=router.url, update_weights=False) as routing:
        assert routing.following(lambda: good)().version == 1
        with pytest.raises(UpdateError):
            routing.following(failing)()
        assert listed(router.url) == set(urls[1:])
        with pytest.raises(ConfigError, match="'default' does not follow the trainer"):
            routing.fleet()


VLLMS = "vllm_router.launch_router --policy=consistent_hash"
SGLANGS = "sglang_router.launch_router --policy=manual --disable-retries"


@pytest.mark.parametrize(
    ("kind", "settings", "own"),
    [
        ("vllm", {}, f"{VLLMS} --health-check-endpoint=/health --worker-urls"),
        ("embedded", {}, f"{VLLMS} --health-check-endpoint=/health"),
        ("sglang", {}, f"{SGLANGS} --health-check-endpoint=/ping"),
        ("sglang", {"api_key": "secret"}, SGLANGS),
        ("vllm", {"policy": "random"}, "vllm_router.launch_router --policy=random"),
    ],
)
def test_engines_get_the_router_of_their_kind(urls, routers, kind, settings, own):
    with Routing([EngineInfo(url=urls[0], kind=kind)], **settings):
        command = routers.specs[0].command(1)
    assert set(own.split()) <= set(command) and command[-2:] == ["--worker-urls", urls[0]]
    assert ("--disable-retries" in command) is ("sglang_router" in own)
    assert ("--health-check-endpoint" in " ".join(command)) is ("api_key" not in settings)
    assert "secret" not in str(command)  # it would show in the list of processes
    with OwnedEngines(parse_plans({kind: [{"name": "a", "model_path": "/m"}]})):  # without engines yet
        assert settings or routers.specs[1].module in own


@pytest.mark.parametrize(
    ("kind", "flag", "port"),
    [("vllm", "--vllm-pd-disaggregation", ()), ("sglang", "--pd-disaggregation", (9001,))],
)
def test_pools_are_told_the_port_where_they_meet(urls, routers, kind, flag, port):
    members = [
        EngineInfo(url=urls[0], kind=kind, worker_type="prefill", bootstrap_port=next(iter(port), None)),
        EngineInfo(url=urls[1], kind=kind, worker_type="decode"),
    ]
    with Routing(members):
        command = routers.specs[0].command(1)
    assert command[command.index(flag) + 1 :] == ["--prefill", urls[0], *map(str, port), "--decode", urls[1]]
    with Routing(members, router=routers.url) as given:  # which has its pools already
        assert listed(given.url) == set(urls[:2])


def test_unroutable_engines_and_settings_are_refused_early(urls, routers):
    vllm, sglang = (EngineInfo(url=url, kind=kind) for url, kind in zip(urls, ("vllm", "sglang"), strict=False))
    for engines, more, words in (
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
        Serving(default=Routing.over(engine.url, router=router.url)) as job,
    ):
        assert list(job.models) == ["default"] and job.model("default").update_weights
        assert listed(job.model("default").url) == {engine.url}
        with pytest.raises(ConfigError, match=r"no model called 'critic'.*default"):
            job.model("critic")
