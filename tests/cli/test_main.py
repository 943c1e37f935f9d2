"""What holds for every command: help, `--json`, exit statuses, suggestions; and ``torchrl-ext discover``."""

import json

import pytest
import torch

import torchrl_ext as tx
from tests.fakes import FakeEngine
from tests.processes import python
from torchrl_ext.cli.frame import COMMANDS
from torchrl_ext.cli.main import main
from torchrl_ext.control import discovery
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.versions.roots import Reader

ACTIONS = [["chain", name] for name in ("ls", "materialize")]
ACTIONS += [["bench", name] for name in ("transport", "delta")]


@pytest.fixture
def root(tmp_path):
    transport = tx.make_transport("disk", root=tmp_path / "root")
    transport.send_weights("policy", {"w": torch.ones(3)})
    transport.shutdown()
    return str(tmp_path / "root")


def test_help_imports_no_torch_and_has_examples():
    lines = [[], *([name] for name in COMMANDS), *ACTIONS]
    document = python(
        "import json, sys\nfrom torchrl_ext.cli.main import main\n"
        f"for line in {lines!r}:\n    print('help of', *line)\n    assert main([*line, '--help']) == 0\n"
        "    assert 'torch' not in sys.modules, line",
        fresh=True,
    )
    program, *pages = document.removeprefix("help of").split("help of")
    assert all(name in program for name in COMMANDS)
    for page, line in zip(pages, lines[1:], strict=True):
        assert "--json" in page and "None)" not in page and ("Example" in page or line in (["chain"], ["bench"]))


@pytest.mark.parametrize(
    ("line", "meant"),
    [("chain materialise root", "materialize"), ("chian", "chain"), ("push d --engine a:1", "--engines")],
)
def test_misspelt_word_is_answered_with_the_likely_one(line, meant, capsys):
    assert main(line.split()) == 2 and meant in capsys.readouterr().err
    assert main([]) == 0 and "discover" in capsys.readouterr().out
    assert main([*line.split(), "--json"]) == 2 and meant in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("line", "status", "kind"),
    [
        ("chain", 2, "UsageError"),
        ("chain materialize ROOT", 2, "MissingParameter"),
        ("chain materialize ROOT one out", 2, "BadParameter"),
        ("chain ls ROOT/nowhere", 2, "ConfigError"),
        ("push ROOT/nowhere --engines a:1 b:1", 2, "ConfigError"),
        ("push --engines 127.0.0.1:9 127.0.0.1:10 CHECKPOINT", 3, "EngineUnreachableError"),
        ("chain materialize ROOT 1 ROOT/FILE/a/b", 4, "NotADirectoryError"),
    ],
)
def test_every_failure_is_one_line_and_one_document(line, status, kind, root, tmp_path, capsys):
    (tmp_path / "root" / "file").touch()
    line = line.replace("CHECKPOINT", f"{root}/weight_v000001").replace("ROOT", root).replace("FILE", "file")
    assert main(["--json", *line.split()]) == status
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["type"] == kind and document["error"] in err and err.count("\n") == 1


@pytest.mark.parametrize(("raised", "status"), [(KeyboardInterrupt, 130), (MemoryError, None)])
def test_an_interrupt_and_a_fault_of_ours_have_their_document(raised, status, root, monkeypatch, capsys):
    def numbers(self):
        raise raised

    monkeypatch.setattr(Reader, "numbers", numbers)
    if status is None:
        with pytest.raises(raised):
            main(["chain", "ls", root, "--json"])
    else:
        assert main(["chain", "ls", root, "--json"]) == status
    assert json.loads(capsys.readouterr().out)["type"] == raised.__name__


def test_discover_goes_on_past_addresses_where_no_engine_answers(capsys, monkeypatch):
    dead = f"http://127.0.0.1:{free_port()}"
    with FakeEngine("stock-vllm") as first, FakeEngine("stock-sglang") as second:
        assert main(["discover", first.url, dead, second.url, "--json"]) == 3
        document = json.loads(capsys.readouterr().out)
        assert [row["url"] for row in document["engines"]] == [first.url, second.url]
        assert [*document["errors"]] == [dead]
        monkeypatch.setenv("COLUMNS", "80")
        assert main(["discover", first.url, dead]) == 3
        (row,) = [line for line in capsys.readouterr().out.splitlines() if dead in line and "none" in line]
        assert len(row) > 80 and row.partition(" none ")[2].strip() in document["errors"][dead]  # it is never cut
        assert main(["discover", first.url, second.url]) == 0


def test_a_key_comes_from_the_environment_or_the_line(monkeypatch, capsys):
    keys = []
    monkeypatch.setattr(discovery, "discover", lambda url, **how: keys.append(how["api_key"]) or 1 / 0)
    monkeypatch.setenv("TORCHRL_EXT_API_KEY", "secret")
    for more in ([], ["--api-key", "other"]):
        with pytest.raises(ZeroDivisionError):
            main(["discover", "a:1", *more])
    assert keys == ["secret", "other"]
