"""Embedded engines that tests start by the dozen, and tests of the engine itself."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import httpx

from tests.processes import WAIT_S, running_python
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.control.serving.server import as_flags

_ENGINE = "import sys; from torchrl_ext.engines.embedded.__main__ import main; sys.exit(main(sys.argv[1:]))"


class EmbeddedServer:
    """As `torchrl_ext.control.serving.embedded.EmbeddedServer`, forked: up in a moment. Killed at the end of its block.

    ``site`` is a directory of further packages, which the engine has installed; ``routes`` names routes that it adds.
    """

    def __init__(self, model_dir, *, port=0, dtype="auto", threads=1, site=None, routes=None):
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        flags = as_flags({"model": model_dir, "port": port, "dtype": dtype, "threads": threads, "routes": routes})
        code = _ENGINE if site is None else f"import sys; sys.path.insert(0, {str(site)!r})\n{_ENGINE}"
        with ExitStack() as ends:
            log = ends.enter_context(tempfile.TemporaryFile("w+"))
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._process = ends.enter_context(running_python(code, *flags, **streams))
            self.pid = self._process.pid
            until = time.monotonic() + WAIT_S
            while not self._healthy():
                if not self.alive() or time.monotonic() > until:
                    log.seek(0)
                    raise AssertionError(f"the engine did not start: {log.read()}")
                time.sleep(0.02)
            self._ends = ends.pop_all()

    def alive(self):
        return self._process.poll() is None

    def stop(self):
        self._ends.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def _healthy(self):
        with suppress(httpx.HTTPError):
            # with certificates, which nobody needs here, a question costs thirty times as much
            return httpx.get(f"{self.url}/health", timeout=5.0, verify=False).status_code == 200
        return False


@contextmanager
def served_here(engine, *, api_key=None, routes=()):
    """Serve an `Engine` of this process, by a thread; yields an object with its ``url`` and ``engine``."""
    import uvicorn

    from torchrl_ext.engines.embedded.server import make_app

    port = free_port()
    app = make_app(engine, api_key=api_key, routes=routes)
    config = uvicorn.Config(app, port=port, log_level="error", ws="none", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", engine=engine)
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
