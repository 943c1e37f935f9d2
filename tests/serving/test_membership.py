"""Which engines a router is told to use, in front of scripted routers and engines: addresses, and new starts."""

from __future__ import annotations

import itertools
import sys
import textwrap
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from tests.rpc.servers import Resting, running
from tests.rpc.test_router import Earlier, Engine, Gateway, serving
from torchrl_ext.errors import ConfigError
from torchrl_ext.rpc.router import RouterClient
from torchrl_ext.serving.launchers import EngineLauncher
from torchrl_ext.serving.routing import Routing
from torchrl_ext.serving.served import OwnedEngines
from torchrl_ext.serving.topology import Topology
from torchrl_ext.types import EngineInfo, EngineRow, SyncReport

ROUTER = """
#!{python}
import http.server, json, pathlib, sys
folder, arguments = pathlib.Path({folder!r}), sys.argv[1:]
with (folder / "starts").open("a") as starts:
    starts.write(" ".join(arguments) + "\\n")
number = len((folder / "starts").read_text().splitlines())
if (folder / f"refuse-{{number}}").exists():
    sys.exit("this router does not start")
types = {{"--prefill": "prefill", "--decode": "decode", "--worker-urls": "regular"}}
workers = [{{"url": url, "worker_type": types[flag]}} for flag, url in zip(arguments, arguments[1:]) if flag in types]
(port,) = [int(one.partition("=")[2]) for one in arguments if one.startswith("--port=")]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"workers": workers}}).encode())
    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


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


class Many(Gateway):
    """As its base, for several workers, which are listed at once; it calls an engine what it likes."""

    def __init__(self, rename=lambda url: url):
        super().__init__()
        self.rename, self.numbers = rename, itertools.count()

    def answer(self, method, path, query, body):
        if (method, path) == ("POST", "/workers"):
            key = f"w{next(self.numbers)}"
            self.workers[key] = {**body, "id": key, "url": self.rename(body["url"])}
            return 202, {}
        if method == "DELETE":
            return (202, {}) if self.workers.pop(path.removeprefix("/workers/"), None) else (404, {})
        return super().answer(method, path, query, body)


def by_name(url):
    return url.replace("127.0.0.1", "localhost")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "renamed", [by_name, lambda url: url.replace("127.0.0.1", "[::1]") + "/"], ids=["by name", "IPv6"]
)
def test_an_engine_under_another_of_its_addresses_stays_behind_its_router(urls, renamed, version):
    with serving(Many()) as router, Routing(infos(urls), router=router.url) as routing:
        changes = routing.follow(report(*((renamed(url), "serving", version) for url in urls)))
        assert not changes.removed and not changes.problems and listed(router.url) == set(urls)
        rows = [(renamed(urls[0]), "paused", 0), *((renamed(url), "serving", 3) for url in urls[1:])]
        assert routing.follow(report(*rows)).removed == (urls[0],)
        assert listed(router.url) == set(urls[1:])


@pytest.mark.parametrize("script", [lambda: Many(by_name), lambda: Many(str)], ids=["by name", "as told"])
def test_a_router_that_lists_an_engine_by_another_address_has_it(urls, script):
    with serving(script()) as router, Routing(infos(urls), router=router.url) as routing:
        rows = [(url, "serving", 1) for url in urls]
        assert routing.follow(report(*rows)).added == ()
        assert routing.follow(report(("gone", "paused", 0), *rows[1:], (urls[0], "paused", 0))).removed == (urls[0],)
        assert routing.follow(report(*rows)).added == (urls[0],)
        assert len(listed(router.url)) == 3


def test_an_earlier_router_is_told_to_let_go_in_its_own_words(urls):
    script = Earlier()
    with serving(script) as router, Routing(infos(urls), router=router.url) as routing:
        script.urls[:] = [by_name(url) for url in urls]
        routing.follow(report((urls[0], "paused", 0), *((url, "serving", 1) for url in urls[1:])))
        assert script.urls == [by_name(url) for url in urls[1:]]


@pytest.mark.parametrize(
    "names", [["policy on cuda:0", "inprocess"], ["ray://actor"], ["http://elsewhere:8000"], ["http://:0"]]
)
def test_a_report_that_names_none_of_its_engines_empties_no_router(urls, names, caplog):
    with serving(Many()) as router, Routing(infos(urls), router=router.url) as routing:
        changes = routing.follow(report(*((name, "serving", 1) for name in names)))
        assert changes.removed == () and listed(router.url) == set(urls)
        assert dict(changes.problems).keys() == set(urls) and names[0] in changes.problems[0][1]
    assert names[0] in caplog.text


def test_engines_beside_rows_that_cannot_be_placed_stay_and_those_that_are_told_of_go(urls):
    with serving(Many()) as router, Routing(infos(urls), router=router.url) as routing:
        rows = [(urls[0], "paused", 0), (urls[1], "serving", 1), ("inprocess", "serving", 1)]
        changes = routing.follow(report(*rows))
        assert changes.removed == (urls[0],) and dict(changes.problems).keys() == {urls[2]}
        assert listed(router.url) == set(urls[1:])


# routers of ours


@pytest.fixture
def program(tmp_path):
    """What stands in for an interpreter with a router: it notes its starts, and refuses those it is told to."""
    path = tmp_path / "router"
    path.write_text(textwrap.dedent(ROUTER).strip().format(python=sys.executable, folder=str(tmp_path)))
    path.chmod(0o755)
    return path


@pytest.fixture
def pools(urls, program):
    types = ("prefill", "prefill", "decode")
    with Routing(infos(urls, types), python=program, start_timeout_s=20) as routing:
        yield routing


def starts(program):
    return len((program.parent / "starts").read_text().splitlines())


def refuse(program, *numbers):
    for number in numbers:
        (program.parent / f"refuse-{starts(program) + number}").write_text("")


def test_a_router_with_pools_comes_back_at_its_address_with_other_members(pools, urls):
    before = pools.url
    rows = [(url, "serving", 1) for url in urls]
    assert pools.follow(report((urls[0], "paused", 0), *rows[1:])).removed == (urls[0],)
    assert pools.url == before and listed(before) == set(urls[1:])
    assert pools.follow(report(*rows)).added == (urls[0],)
    assert pools.url == before and listed(before) == set(urls)


@pytest.mark.parametrize("refused", [1, 2], ids=["before the old one goes", "when it takes the old one's place"])
def test_the_old_router_serves_on_where_a_new_one_does_not_start(pools, urls, program, refused):
    rows = [(urls[0], "paused", 0), *((url, "serving", 1) for url in urls[1:])]
    refuse(program, refused)
    changes = pools.follow(report(*rows))
    assert changes.removed == () and "this router does not start" in dict(changes.problems)[urls[0]]
    assert listed(pools.url) == set(urls)
    assert pools.follow(report(*rows)).removed == (urls[0],)  # tried again
    assert listed(pools.url) == set(urls[1:])


def test_a_router_that_is_down_is_started_again_by_the_next_report(pools, urls, program):
    rows = [(urls[0], "paused", 0), *((url, "serving", 1) for url in urls[1:])]
    refuse(program, 2, 3)
    changes = pools.follow(report(*rows))
    assert "is down" in dict(changes.problems)[pools.url]
    before = pools.url
    assert pools.follow(report(*rows)).removed == (urls[0],)
    assert pools.url == before and listed(before) == set(urls[1:])


def test_one_that_died_by_itself_is_started_again_too(pools, urls):
    pools._process.stop()
    assert pools.follow(report(*((url, "serving", 1) for url in urls))).problems == ()
    assert listed(pools.url) == set(urls)


def test_a_given_router_that_does_not_answer_is_a_problem_and_not_an_error(urls):
    with serving(Many()) as router:
        routing = Routing(infos(urls), router=router.url)
    assert dict(routing.follow(report(*((url, "serving", 1) for url in urls))).problems).keys() == {router.url}
    routing.close()


@pytest.mark.parametrize(
    ("kind", "module", "flag", "prefill"),
    [
        ("vllm", "vllm_router.launch_router", "--vllm-pd-disaggregation", "{}"),
        ("sglang", "sglang_router.launch_router", "--pd-disaggregation", "{} 9001"),
    ],
)
def test_pools_get_the_router_of_their_make_and_the_port_where_they_meet(urls, program, kind, module, flag, prefill):
    members = [
        EngineInfo(url=urls[0], kind=kind, worker_type="prefill", bootstrap_port=9001),
        EngineInfo(url=urls[1], kind=kind, worker_type="decode"),
    ]
    with Routing(members, python=program):
        (started,) = (program.parent / "starts").read_text().splitlines()
    assert started.startswith(f"-m {module} ") and flag in started.split()
    assert f"--prefill {prefill.format(urls[0])} --decode {urls[1]}" in started


@pytest.mark.parametrize(
    ("kind", "make", "module", "own"),
    [
        ("vllm", None, "vllm_router.launch_router", "--policy=consistent_hash"),
        ("embedded", None, "vllm_router.launch_router", "--policy=consistent_hash"),
        ("sglang", None, "sglang_router.launch_router", "--policy=manual --disable-retries"),
        ("sglang", "vllm", "vllm_router.launch_router", "--policy=consistent_hash"),
        ("vllm", "sglang", "sglang_router.launch_router", "--policy=manual --disable-retries"),
    ],
)
def test_engines_get_the_router_of_their_make_or_the_one_that_is_named(urls, program, kind, make, module, own):
    with Routing([EngineInfo(url=urls[0], kind=kind)], python=program, make=make):
        (started,) = (program.parent / "starts").read_text().splitlines()
    assert started.startswith(f"-m {module} ") and set(own.split()) <= set(started.split())
    assert ("--disable-retries" in started.split()) is ("sglang" in module)


def owned(urls, router, kind):
    """A job of one frozen model whose engines run at ``urls``."""

    class Launcher(EngineLauncher):
        def launch(self, plan, encoders=(), *, cancel=None):
            return SimpleNamespace(url=urls[plan.gpus[0]], alive=lambda: True, log=str, stop=lambda: None)

    group = {"worker_type": "regular", "num_gpus": len(urls)}
    topology = Topology.parse({kind: [{"name": "a", "model_path": "/m", "server_groups": [group]}]})
    return OwnedEngines(topology, launcher=Launcher(), router={"router": router.url})


def test_a_jobs_own_engines_give_memory_back_though_others_do_not_answer():
    resting = Resting()
    with (
        running({**resting.answers, "GET /health": (200, {})}) as well,
        serving(Many()) as router,
        ExitStack() as ends,
    ):
        gone = ends.enter_context(serving(Engine())).url
        with owned([gone, well.url], router, "vllm") as job, owned([gone], router, "vllm") as another:
            ends.close()
            another.offload()
            job.offload()
            assert resting.asleep == {"weights", "kv_cache"}
            job.onload()
            assert not resting.asleep and not resting.paused


def test_a_jobs_own_engines_are_registered_with_a_router_that_is_given(urls):
    with serving(Many()) as router, owned(urls, router, "sglang") as job:
        assert job.model("a").url == router.url and listed(router.url) == set(urls)
        assert job.model("a").withdraw(urls[0]).removed == (urls[0],)
        assert job.model("a").restore(urls[0]).added == (urls[0],)


def test_a_router_of_a_model_without_engines_yet_is_the_one_for_their_kind(program):
    topology = Topology.parse({"sglang": [{"name": "a", "model_path": "/m"}]})
    with OwnedEngines(topology, router={"python": program}):
        (started,) = (program.parent / "starts").read_text().splitlines()
    assert started.startswith("-m sglang_router.launch_router ")


def test_a_router_of_no_known_make_is_refused_before_it_is_made(urls, program):
    with pytest.raises(ConfigError, match="no router of make 'nginx'"):
        Routing([EngineInfo(url=urls[0], kind="sglang")], python=program, make="nginx")
    assert not (program.parent / "starts").exists()


@pytest.mark.parametrize(("key", "given"), [(None, True), ("secret", False)])
def test_a_router_asks_sglang_for_no_token_where_it_can(urls, program, key, given):
    with Routing([EngineInfo(url=urls[0], kind="sglang")], python=program, api_key=key):
        (started,) = (program.parent / "starts").read_text().splitlines()
    assert ("--health-check-endpoint=/ping" in started.split()) is given
    assert "secret" not in started  # it would show in the list of processes


def test_a_given_router_is_told_the_port_where_pools_meet(urls):
    members = [
        EngineInfo(url=urls[0], kind="sglang", worker_type="prefill", bootstrap_port=9001),
        EngineInfo(url=urls[1], kind="sglang", worker_type="decode"),
    ]
    with serving(Many()) as router:
        Routing(members, router=router.url).close()
        told = [body for method, path, body in router.calls if (method, path) == ("POST", "/workers")]
    assert [body.get("bootstrap_port") for body in told] == [9001, None]
