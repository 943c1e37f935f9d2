"""What every launcher refuses before anything starts, and how our plugin comes along."""

import os
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import ANY

import pytest

from torchrl_ext.base.errors import ConfigError, EngineError
from torchrl_ext.control.serving.embedded import EmbeddedServer
from torchrl_ext.control.serving.processes import ServerSpec, usable_port
from torchrl_ext.control.serving.server import RouterProcess, start
from torchrl_ext.control.serving.sglang import SGLangServer, SGLangSpec
from torchrl_ext.control.serving.vllm import VLLMServer, VLLMSpec


@pytest.fixture
def taken():
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_absent_folders_taken_ports_and_half_pools_are_refused(tmp_path, taken):
    settings = {"port": taken, "python": sys.executable}
    for server in (EmbeddedServer, VLLMServer, SGLangServer):
        with pytest.raises(ConfigError, match="nothing is not a directory"):
            server(tmp_path / "nothing", **settings)
        with pytest.raises(ConfigError, match=rf"port {taken} cannot be used.*in use"):
            server(tmp_path, **settings)
    with pytest.raises(ConfigError, match=rf"port {taken} cannot be used"):
        RouterProcess(["http://127.0.0.1:1"], **settings)
    for others, words in (((), "prefill engines only"), (("http://h:1",), "pools and regular engines")):
        with pytest.raises(ConfigError, match=words):
            RouterProcess(others, prefill=["http://h:2"], decode=others)


def test_missing_engine_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for starts, words in (
        (lambda: VLLMServer(tmp_path), r"has no vllm\b(.|\n)*python=(.|\n)*torchrl-ext serve vllm"),
        (lambda: SGLangServer(tmp_path), r"has no sglang\b(.|\n)*python=(.|\n)*torchrl-ext serve sglang"),
        (RouterProcess, r"has no vllm_router\b(.|\n)*python="),
        (lambda: RouterProcess(kind="sglang"), r"has no sglang_router\b(.|\n)*python="),
    ):
        with pytest.raises(ConfigError, match=words):
            starts()


def test_a_port_is_picked_where_none_is_asked_for_and_else_kept(taken):
    picked = usable_port(0)
    assert picked not in (0, taken)
    assert usable_port(picked) == usable_port(picked, "0.0.0.0") == picked


@dataclass(frozen=True, kw_only=True)
class Broken(ServerSpec):
    """A server that says where its plugin was, and ends."""

    name: ClassVar[str] = "broken"
    module: ClassVar[str] = "sys"
    plugin: bool = True

    def command(self, port):
        look = "next((p for p in sys.path if os.path.isdir(os.path.join(p, 'torchrl_ext')) and 'overlay' in p), None)"
        return [str(self.interpreter), "-c", f"import os, sys; print('plugin:', {look}); sys.exit('no such thing')"]


@pytest.mark.parametrize("plugin", [True, False])
def test_plugin_folder_is_removed_when_the_server_cannot_start(plugin):
    with pytest.raises(EngineError, match="no such thing") as caught:
        start(Broken(plugin=plugin, environ={"PYTHONPATH": "/elsewhere"}))
    (folder,) = re.findall(r"plugin: (\S+)", caught.value.what)
    assert (folder != "None") == plugin and not Path(folder).exists()


@pytest.mark.parametrize(
    ("spec", "flags"),
    [(VLLMSpec, "--enable-sleep-mode"), (SGLangSpec, "--enable-memory-saver --enable-weights-cpu-backup")],
)
def test_gpu_servers_start_with_sleep_mode_flags(tmp_path, spec, flags):
    for cpu, wanted in ((False, True), (False, False), (True, True)):
        command = spec(tmp_path, cpu=cpu, sleep_mode=wanted).command(1)
        assert (flags in " ".join(command)) is (wanted and not cpu)


def test_our_plugins_join_a_users_allow_list(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    assert VLLMSpec(tmp_path).variables()["VLLM_PLUGINS"] == "theirs,torchrl_ext,torchrl_ext_cpu"


def test_without_an_allow_list_the_plugins_of_the_environment_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    points = [("vllm.general_plugins", "theirs"), ("vllm.endpoint_plugins", "routes"), ("console_scripts", "tool")]
    for number, (group, name) in enumerate(points):
        folder = tmp_path / "lib" / "python3.11" / "site-packages" / f"p{number}-1.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: p{number}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[{group}]\n{name} = p:p\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    named = VLLMSpec(tmp_path, python=tmp_path / "bin" / "python").variables()["VLLM_PLUGINS"]
    assert named == "theirs,torchrl_ext,torchrl_ext_cpu"


def test_workers_on_a_cpu_share_its_cores(tmp_path, monkeypatch):
    def told(spec, variable, workers):
        return spec(tmp_path, cpu=True, tensor_parallel_size=workers).variables().get(variable)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert told(VLLMSpec, "OMP_NUM_THREADS", 1) is told(SGLangSpec, "SGLANG_CPU_OMP_THREADS_BIND", 1) is None
    for workers in (2, 64):
        assert told(VLLMSpec, "OMP_NUM_THREADS", workers) == str(max(1, len(os.sched_getaffinity(0)) // workers))
        assert len(told(SGLangSpec, "SGLANG_CPU_OMP_THREADS_BIND", workers).split("|")) == workers
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert told(VLLMSpec, "OMP_NUM_THREADS", 2) == "3"


def test_workers_of_each_type_have_their_settings():
    assert VLLMSpec.role("regular") == SGLangSpec.role("regular") == {}
    assert VLLMSpec.role("decode")["kv_transfer_config"]["kv_role"] == "kv_consumer"
    assert SGLangSpec.role("prefill") == {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": ANY}
