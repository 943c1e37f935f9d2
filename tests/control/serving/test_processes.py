"""Server processes: health, logs, and ends that leave nothing behind."""

import os
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import httpx
import psutil
import pytest

from tests.processes import WAIT_S, running_python
from torchrl_ext.base.errors import DeadlineError, EngineError
from torchrl_ext.control.serving.processes import GuardedProcess, ServerSpec, free_port, wait_until_healthy


@dataclass(frozen=True, kw_only=True)
class Toy(ServerSpec):
    """Runs a command, in which PORT stands for the port."""

    name: ClassVar[str] = "toy"
    module: ClassVar[str] = "sys"
    words: Sequence[str]

    def command(self, port):
        return [word.replace("PORT", str(port)) for word in self.words]


SERVER = textwrap.dedent(
    """
    import http.server, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_DFL); signal.pause()"])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(str(child.pid).encode())
        def log_message(self, *args):
            pass
    print("listening", flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
)
STUBBORN = SERVER.replace("SIG_DFL", "SIG_IGN")
"""Its child has to be killed, for which it is given some seconds."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("torchrl_ext.control.serving.processes._GRACE_S", 1.5)


@contextmanager
def started(code, **settings):
    """A healthy server of this code at a port of its own; it prints without delay."""
    with GuardedProcess(Toy(words=[sys.executable, "-u", "-c", code, "PORT"], **settings)) as server:
        wait_until_healthy([server])
        yield server


def gone(pid, within_s=20.0):
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_server_stop_ends_children_and_removes_unnamed_log():
    with started(STUBBORN) as server:
        child = int(httpx.get(server.url).text)
        assert server.alive() and psutil.pid_exists(server.pid) and psutil.pid_exists(child)
        assert "listening" in server.log() and server.log_path.exists()
    assert not server.alive() and gone(server.pid)
    assert gone(child)  # although it ignores SIGTERM
    assert server.log() == server.errors() == "" and not server.log_path.parent.exists()


def test_server_that_ends_while_starting_shows_its_log(tmp_path):
    """The error has the error lines and the end of this run's log, and none of an earlier run's."""
    log = tmp_path / "log"
    log.write_text("OSError: yesterday\n")
    code = "print('OSError: no space left'); print('x' * 9000); raise RuntimeError('see above')"
    words = "printed: OSError: no space left; RuntimeError: see above; its log ends with: x"
    with pytest.raises(EngineError, match=words) as caught, started(code, log_path=log):
        pass
    assert "yesterday" not in str(caught.value) and str(log) in str(caught.value)
    assert log.read_text().startswith("OSError: yesterday\n")


def test_missing_program_or_log_folder_leaves_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineError, match="/no/such/program"):
        GuardedProcess(Toy(words=["/no/such/program"]))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        GuardedProcess(Toy(words=["true"], log_path=tmp_path / "nowhere" / "log"))
    assert list(tmp_path.iterdir()) == []


def test_server_that_is_never_healthy_is_late(tmp_path):
    command = ["sh", "-c", "echo $$; exec sleep 600"]
    with GuardedProcess(Toy(words=command, log_path=tmp_path / "log", start_timeout_s=0.5)) as server:
        late = pytest.raises(DeadlineError, match=rf"not healthy within 0\.5 s; its log ends with: {server.pid}")
        with late:
            wait_until_healthy([server])
    assert gone(server.pid)


ORPHANED = SERVER.replace("import signal;", "import os, signal;").replace(
    "signal.pause()", "os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); signal.pause()"
)
"""Its child leaves a daemon in a session of its own, as some engines do: only the log says where it is."""


def last_number(log):
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        numbers = [int(word) for word in log.read_text().split() if word.isdigit()]
        if numbers:
            return numbers[-1]
        time.sleep(0.02)
    raise AssertionError(log.read_text())


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_daemon_in_its_own_session_ends_with_its_server(tmp_path, how):
    with started(ORPHANED, log_path=tmp_path / "log") as server:
        daemon = last_number(tmp_path / "log")
        assert psutil.pid_exists(daemon)
        if how == "kill":
            os.kill(server.pid, signal.SIGKILL)
            assert server.wait(WAIT_S)
    assert gone(server.pid) and gone(daemon)


FORKING = textwrap.dedent(
    """
    import os, signal, sys
    from torchrl_ext.control.serving.processes import GuardedProcess, ServerSpec, wait_until_healthy
    class Toy(ServerSpec):
        name, module = "toy", "sys"
        def command(self, port):
            return [sys.executable, "-c", sys.argv[2], str(port)]
    server = GuardedProcess(Toy(port=int(sys.argv[1])))
    wait_until_healthy([server])
    worker = os.fork()  # as a DataLoader does: it holds whatever we have open
    if not worker:
        signal.pause()
    print(server.pid, server._guard.pid, worker, flush=True)
    if sys.stdin.readline():
        server.stop()
        print(server._guard.returncode, flush=True)
        sys.stdin.readline()
    """
)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_forked_child_of_the_parent_keeps_no_server_alive(tmp_path, how):
    port = free_port()
    with running_python(FORKING, port, SERVER, fresh=True) as parent:
        pid, guard, worker = map(int, parent.stdout.readline().split())
        try:
            child = int(httpx.get(f"http://127.0.0.1:{port}").text)
            if how == "kill":
                parent.kill()
            else:
                parent.stdin.write("stop\n")
                parent.stdin.flush()
                assert int(parent.stdout.readline()) != -signal.SIGKILL  # it ended by itself
            assert gone(guard) and gone(pid) and gone(child)
            assert not gone(worker, within_s=0.0)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_server_ends_with_its_guard():
    with started(SERVER) as server:
        child = int(httpx.get(server.url).text)
        os.kill(server._guard.pid, signal.SIGKILL)
        assert gone(server.pid)
    assert gone(child)


def test_server_environment_has_given_variables_and_no_own_path():
    code = "import os, sys; print(os.environ['ASKED'], [p for p in sys.path if 'torchrl' in p])"
    command = [sys.executable, "-I", "-c", code]
    with GuardedProcess(Toy(words=command, environ={"ASKED": "yes"})) as server:
        assert server.wait(WAIT_S) and server.log() == "yes []"
