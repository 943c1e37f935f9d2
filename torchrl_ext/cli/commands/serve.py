"""`torchrl-ext serve`: run an engine that can follow a trainer, in the foreground until Ctrl-C."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, Typer

from torchrl_ext.base.errors import ConfigError, EngineError
from torchrl_ext.cli.frame import Interrupts, answer, note

__all__ = ["app"]

_FLAGS = {"tensor_parallel_size": "--tp", "log_path": "--log"}
"""Field of a spec -> its option, where that has another name."""

app = Typer()


@app.command()
def serve(
    engine: Annotated[str, Argument(metavar="ENGINE", help="vllm, sglang or embedded.")],
    model: Annotated[str, Option(metavar="DIR", help="Hugging Face checkpoint directory.")],
    host: Annotated[str | None, Option(help="Address to listen on (vllm, sglang). Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, Option(help="Port to listen on. Default: a free port.")] = None,
    dtype: Annotated[str | None, Option(help="auto (the default), float32, bfloat16 or float16.")] = None,
    tensor_parallel_size: Annotated[
        int | None, Option(_FLAGS["tensor_parallel_size"], help="Workers that share the model (vllm, sglang).")
    ] = None,
    max_model_len: Annotated[int | None, Option(help="Longest sequence, prompt included, in tokens.")] = None,
    log_path: Annotated[
        str | None, Option(_FLAGS["log_path"], help="File for the server's log (vllm, sglang).")
    ] = None,
    start_timeout_s: Annotated[float, Option(help="Deadline of the start, in seconds.")] = 300.0,
) -> int:
    """Start an engine for one model and serve until Ctrl-C.

    vLLM and SGLang come from this environment if they are installed; else a CPU build is installed once into a cache
    folder of its own ($TORCHRL_EXT_CACHE). The embedded engine has the generate and update routes of vLLM. Only vLLM
    and SGLang have the OpenAI routes (/v1/completions, /v1/chat/completions).

    Keys of servers come from the environment: VLLM_API_KEY, and TORCHRL_EXT_API_KEY for the embedded engine.

    Examples:
    * `torchrl-ext serve vllm --model policy --port 8000 --dtype float32`
    * `torchrl-ext serve sglang --model policy`
    * `VLLM_API_KEY=... torchrl-ext serve vllm --model policy`
    """
    given = {name: value for name, value in locals().items() if value}
    settings = {name: value for name, value in given.items() if name not in ("engine", "model")}
    server, pause = None, threading.Event()
    with Interrupts() as interrupts:
        try:
            note(f"starting {engine} for {model}")
            server = _start(engine, model, settings)
            document = {"engine": engine, "url": server.url, "pid": server.pid, "model": model}
            answer(document, f"{engine} is ready at {server.url} (Ctrl-C ends it)")
            while server.alive():
                pause.wait(0.5)
            raise EngineError(f"{engine} ended unexpectedly; its log ends with: {server.log() or 'nothing'}")
        except KeyboardInterrupt:
            note("ending")
        finally:
            interrupts.ignore()  # a second Ctrl-C must not leave a server behind
            if server is not None:
                server.stop()
    return 0


def _start(engine: str, model: str, settings: dict[str, Any]) -> Any:
    """Start the engine with the options that were given; an option that the engine does not have is an error."""
    from torchrl_ext.base.registry import engines
    from torchrl_ext.cli.environments import settings_for
    from torchrl_ext.control.serving.server import start

    spec = engines.part(engine, "server")
    unknown = [_FLAGS.get(name, f"--{name.replace('_', '-')}") for name in settings if name not in spec.settings()]
    if unknown:
        raise ConfigError(f"{engine} cannot be started with {', '.join(unknown)}", hint="leave it out")
    if not Path(model).is_dir():  # before anything is installed
        raise ConfigError(f"{model} is not a directory", expected="a Hugging Face checkpoint directory")
    return start(spec(model, **settings_for(engine), **settings))
