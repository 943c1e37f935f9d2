"""What an installation has: one of the Pythons that `setup.py` promises, and extras, or an error that names them.

Whether every module can be imported by the oldest and by the newest Python is seen in installations of a wheel
(`.ci/run`, `tests.bare`); the linter and mypy know what newer ones brought.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.processes import ROOT, WAIT_S


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
    done = subprocess.run(
        [sys.executable, "-m", "tests.bare", *EXTRAS], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import sys; from torchrl_ext.cli.main import main; sys.exit(main(['discover', 'localhost:1']))", "cli"),
        ("import sys; del sys.modules['typer']; from torchrl_ext.cli.main import main; sys.exit(main([]))", "cli"),
        ("from torchrl_ext.testing.tiny import make_tiny_lm; make_tiny_lm('model')", "embedded"),
        ("from torchrl_ext.control.serving.embedded import EmbeddedServer; EmbeddedServer('.')", "embedded"),
        ("from torchrl_ext.control.serving.topology import read_plans; read_plans('engines.yaml')", "cli"),
        ("import torchrl_ext.rl.hydra", "hydra"),
        ("from torchrl_ext.base.reports import SyncReport; SyncReport(version=1, transport='disk').plot()", "plot"),
    ],
)
def test_an_extra_that_is_missing_is_named_in_one_line(code, extra):
    blocked = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS})); {code}"
    done = subprocess.run([sys.executable, "-c", blocked], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode and f"pip install 'torchrl_ext[{extra}]'" in done.stderr.splitlines()[-1]
