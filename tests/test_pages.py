"""Every Python block of the documentation runs as it is printed; `tests.pages` says what for."""

import ast
import dataclasses
import importlib
import inspect
import json
import operator
import os
import re
import runpy
import sys
import textwrap
from collections import namedtuple
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import typer

from tests.compat.vllm_api import TRLs
from tests.control.ray_cluster import two_nodes
from tests.engines.embedded import EmbeddedServer
from tests.fakes import FakeEngine
from tests.models import tiny_checkpoint
from tests.pages import PAGES, ROOT, blocks, on_servers
from tests.processes import WAIT_S, python, running_python
from torchrl_ext.base import errors
from torchrl_ext.base.registry import transports
from torchrl_ext.cli.frame import COMMANDS, app_of
from torchrl_ext.compat.flags.options import WeightUpdateConfig
from torchrl_ext.testing import free_port

RUN = [page for page in PAGES if any(not block.needs and not block.shows for block in blocks(page))]
SHOWN = [(page, block) for page in PAGES for block in blocks(page) if block.shows]
ACCELERATORS = 4
"""What a page's blocks for Ray ask for in all."""
RANK = """
import os, sys
from tests.pages import ROOT, run
rank, port, checkpoint, url, page = sys.argv[1:]
os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # as torchrun does
needing = "torchrun" if "transports" in page else "two processes"
run(ROOT / f"{page}.md", [url], checkpoint, plain=False, needing=needing)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def urls(checkpoint):
    with ExitStack() as ends:
        yield [ends.enter_context(EmbeddedServer(checkpoint, dtype="float32", threads=1)).url for _ in range(3)]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_as_they_are_printed(page, urls, checkpoint):
    python(
        "import sys; from tests.pages import run; run(sys.argv[1], sys.argv[3:], sys.argv[2])", page, checkpoint, *urls
    )


@pytest.fixture
def ray_address(s3):
    """A cluster whose actors find the remote store, and which ``address="auto"`` means."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # actors import what the preamble defines
        with two_nodes(num_gpus=ACCELERATORS) as ray:
            patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
            yield


@pytest.mark.exhaustive  # many processes that each import everything; .ci/run runs it
def test_the_blocks_for_ray_run_in_a_cluster(ray_address, urls, checkpoint):
    on_servers("start_engine", checkpoint, what="ray")
    on_servers("torchrl", checkpoint, urls[0], what="ray")


@pytest.mark.parametrize("page", ["docs/transports", "docs/quickstart"])
def test_pages_for_two_ranks_run_on_them(page, urls, checkpoint):
    port = free_port()
    with ExitStack() as stack:
        ranks = [stack.enter_context(running_python(RANK, rank, port, checkpoint, urls[0], page)) for rank in range(2)]
        statuses = [child.wait(WAIT_S) for child in ranks]
        said = [child.stdout.read() for child in ranks]
    assert statuses == [0, 0], said
    assert said[0]
    assert page == "docs/quickstart" or not said[1]  # there both ranks print


@pytest.mark.exhaustive  # two engines that start; the other blocks of the page run at any call
def test_the_page_about_log_probabilities_tells_a_planted_fault(urls, checkpoint):
    page = ROOT / "docs/logprobs.md"
    program = "import sys; from tests.pages import run; run(sys.argv[1], sys.argv[3:], sys.argv[2], needing=True)"
    python(program, page, checkpoint, *urls, timeout_s=300)


class TRLsClient(TRLs):
    def pause(self):
        self.call("pause?mode=keep")

    def resume(self):
        self.call("resume")


def test_the_object_for_trl_lets_a_server_follow(tmp_path, monkeypatch):
    """As TRL calls it, with stand-ins of what it imports."""
    ours = {"_iter_vllm_named_params": lambda model: model.state_dict().items()}
    monkeypatch.setitem(sys.modules, "trl.experimental.async_grpo.async_grpo_trainer", SimpleNamespace(**ours))
    vllms = SimpleNamespace(ParamMeta=namedtuple("ParamMeta", ("name", "dtype", "shape")))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", vllms)
    (block,) = [block for block in blocks(ROOT / "docs/migrate.md") if block.needs == "TRL"]
    exec(block.code.replace("/shared/updates", str(tmp_path)), space := {})
    model, accelerator = torch.nn.ParameterDict(), SimpleNamespace(unwrap_model=lambda model: model)
    with FakeEngine("vllm") as fake:
        model.update({name: tensor.clone() for name, tensor in fake.tensors.items()})
        backend = space["Backend"]()
        backend.trainer = SimpleNamespace(vllm_client=TRLsClient(fake.url), accelerator=accelerator, model=model)
        backend.init_weight_transfer()
        for step in (1, 2):
            for parameter in model.values():
                parameter.data.fill_(step)
            backend.pause()
            backend.send_weights(iter(model.state_dict().items()))
            backend.resume()
            assert {name: tensor.tolist() for name, tensor in fake.tensors.items()} == dict.fromkeys("ab", [step] * 4)
        assert fake.serving and not fake.wrongs
        backend.destroy()


@pytest.mark.parametrize(("page", "block"), SHOWN, ids=lambda value: getattr(value, "mark", ""))
def test_a_block_that_shows_our_source_is_what_stands_there(page, block):
    module, name = block.shows
    source = inspect.getsource(operator.attrgetter(name)(importlib.import_module(module)))
    assert block.code == textwrap.dedent(source), f"{page.relative_to(ROOT)}:{block.line}"


def test_every_block_is_python_and_runs_somewhere():
    needing = set()
    for page in PAGES:
        for block in blocks(page):
            compile(block.code, str(page), "exec", flags=0x2000)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            assert not block.mark or block.needs or block.shows, (
                f"{page.relative_to(ROOT)}:{block.line}: {block.mark!r}"
            )
            needing |= {page.stem} if block.needs else set()
    tests = [ROOT / "tests/test_pages.py", *(ROOT / "tests/real_engines").glob("test_*.py")]
    assert needing == {
        name for test in tests for name in re.findall(r"(?:\bon_servers\(\"|docs/)(\w+)", test.read_text())
    }


def test_modules_and_files_that_pages_name_are_there():
    files = {
        str(path.relative_to(ROOT)) for top in ("torchrl_ext", "tests", "docs") for path in (ROOT / top).rglob("*")
    }
    missing = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        named = {f"{name}.py" for name in re.findall(r"\b(torchrl_ext/[\w/]+)\.py\b", text)}
        named |= {match.rstrip("/") for match in re.findall(r"`(tests/[\w/.]+)`", text)}
        missing += [(page.name, name) for name in named if name not in files]
        for name in set(re.findall(r"\btorchrl_ext(?:\.[a-z_0-9]+)+\b(?![\w(]|\")", text)):
            path = name.replace(".", "/")
            if not {path, f"{path}.py", f"{path.rpartition('/')[0]}.py"} & files:
                missing.append((page.name, name))
    assert not missing


def test_architecture_page_names_existing_functions_for_each_hop():
    page = (ROOT / "docs" / "architecture.md").read_text()
    hops = re.findall(r"`([\w.]+)`\s+\(`([\w/]+\.py)`", page)
    assert len(hops) > 15 and len(re.findall(r"^\| \d+ \| [a-z]", page, re.MULTILINE)) == 16
    for name, path in hops:
        source = (ROOT / "torchrl_ext" / path).read_text()
        for part in name.split("."):
            assert re.search(rf"\b(?:def|class) {part}\b", source), f"{name} in {path}"


def test_every_picture_is_what_the_script_draws():
    script = runpy.run_path(str(ROOT / "docs" / "draw.py"))
    for name, drawn in script["PICTURES"].items():
        assert (script["IMAGES"] / f"{name}.svg").read_text() == drawn(), f"{name}.svg: run draw.py"


def test_figure_of_the_recipe_shows_the_stored_run():
    drawing = runpy.run_path(str(ROOT / "docs" / "draw_grpo.py"))
    document = json.loads((ROOT / "docs" / "grpo.json").read_text())
    assert (drawing["FOLDER"] / "img" / "grpo.svg").read_text() == drawing["plot"](document), "run draw_grpo.py"
    curves = [row["rewards"] for row in document["rows"] if row["seed"] == 0]
    assert len(curves) == 3 and curves[0] == curves[1] == curves[2], "the page says that transports change nothing"


def test_tables_have_a_row_for_everything_that_there_is():
    """README's transports, the flags of slime and vime with a help text each, error classes, names of the package."""
    table = (ROOT / "README.md").read_text().partition("\n| transport |")[2].partition("\n\n")[0]
    ours = {name for name in transports.names() if transports.load(name).__module__.startswith("torchrl_ext.")}
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == ours
    assert "```{config-fields} flags\n" in (ROOT / "docs" / "migrate.md").read_text()
    assert all(option.metadata["help"] for option in dataclasses.fields(WeightUpdateConfig))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    named = (ROOT / "docs" / "operations.md").read_text().partition("\n### Error classes\n")[2].partition("\n### ")[0]
    assert re.findall(r"^\| `(\w+)` \|", named, re.MULTILINE) == [
        kind.__name__ for kind in kinds if issubclass(kind, errors.WeightSyncError)
    ]
    assert "\n```{public-names}\n" in (ROOT / "docs" / "reference.md").read_text()


def test_reference_has_each_command_and_examples_that_parse():
    page = (ROOT / "docs" / "reference.md").read_text()
    assert re.findall(r"^```{cli-command} (\w+)$", page, re.MULTILINE) == list(COMMANDS)
    examples = re.findall(r"`torchrl-ext (?!--)([^`]+)`", page)
    assert [example.split()[0] for example in examples if " " in example or example == "demo"] == list(COMMANDS)
    for name, *words in map(str.split, examples):
        command = typer.main.get_command(app_of(name))
        if hasattr(command, "commands"):
            command, *words = command.commands[words[0]], *words[1:]
        command.make_context(name, words)


def test_operations_page_quotes_only_messages_of_the_source():
    """An f-string counts as its text with three dots for each value, so that dots of the page match them, too."""
    messages = set()
    for path in (ROOT / "torchrl_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                messages.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                messages.add(node.value)
    page = (ROOT / "docs" / "operations.md").read_text().partition("\n### Messages\n")[2]
    quoted = re.findall(r"^\| `(?:\.\.\.[:;] (?:\.\.\. )?)?([^`]+)` \|", page, re.MULTILINE)  # without where and why
    assert len(quoted) > 20
    gone = [
        text for text in quoted if not any(map(re.compile(re.escape(text).replace(r"\.\.\.", ".*")).search, messages))
    ]
    assert not gone


def test_every_link_of_readme_leads_to_a_heading_or_a_file():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / "README.md").read_text()):
        path, _, heading = target.partition("#")
        page = ROOT / (path or "README.md")
        assert page.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], target
