"""What an installation has: one of the Pythons that `setup.py` promises, and extras, or an error that names them.

Whether every module can be imported by the oldest and by the newest Python is seen in installations of a wheel
(`.ci/run`, `tests.bare`); the linter and mypy know what newer ones brought.
"""

from __future__ import annotations

import json
import re

from tests.processes import ROOT, python


def test_oldest_promised_python_agrees_with_the_settings():
    assert 'python_requires=">=3.10"' in (ROOT / "setup.py").read_text()
    settings = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^target-version = "py310"$', settings, re.MULTILINE)
    assert re.search(r'^python_version = "3.10"', settings, re.MULTILINE)  # mypy knows what newer ones brought
    assert "for version in 3.10 3.13; do" in (ROOT / ".ci/run").read_text()


EXTRAS = [
    "typer", "rich", "transformers", "tokenizers", "starlette", "uvicorn", "fastapi", "yaml", "peft", "hydra", "ray",
    "matplotlib", "pytest", "hypothesis",
]  # fmt: skip
"""Packages that an engine's environment may lack, and those that only extras bring."""


def test_bare_installation_imports_modules_that_need_no_extra():
    python("import runpy; runpy.run_module('tests.bare', run_name='__main__')", *EXTRAS, fresh=True)


LACKING = """
import contextlib, io, json, sys
extras, programs = json.loads(sys.argv[1])
for program in programs:
    sys.modules.update(dict.fromkeys(extras))
    said, ended = io.StringIO(), None
    try:
        with contextlib.redirect_stderr(said):
            exec(program, {})
    except SystemExit as error:
        ended = error.code
    except Exception as error:
        ended = str(error)
        said.write(ended)
    print(json.dumps([bool(ended), said.getvalue().splitlines()[-1:]]))
"""


def test_an_extra_that_is_missing_is_named_in_one_line():
    """Each program alone asks for it, in one interpreter that lacks them all."""
    programs = {
        "import sys; from torchrl_ext.cli.main import main; sys.exit(main(['discover', 'localhost:1']))": "cli",
        "import sys; del sys.modules['typer']; from torchrl_ext.cli.main import main; sys.exit(main([]))": "cli",
        "from torchrl_ext.testing.tiny import make_tiny_lm; make_tiny_lm('model')": "embedded",
        "from torchrl_ext.control.serving.embedded import EmbeddedServer; EmbeddedServer('.')": "embedded",
        "from torchrl_ext.control.serving.topology import read_plans; read_plans('engines.yaml')": "cli",
        "import torchrl_ext.rl.hydra": "hydra",
        "from torchrl_ext.base.reports import SyncReport; SyncReport(version=1, transport='disk').plot()": "plot",
    }
    told = python(LACKING, json.dumps([EXTRAS, list(programs)]), fresh=True).splitlines()
    for line, (program, extra) in zip(told, programs.items(), strict=True):
        failed, [last] = json.loads(line)
        assert failed and f"pip install 'torchrl_ext[{extra}]'" in last, (program, last)
