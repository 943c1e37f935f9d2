"""`torchrl-ext serve`: run an engine that can follow a trainer, in the foreground until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

from torchrl_ext.cli.interrupts import Interrupts
from torchrl_ext.errors import ConfigError, EngineError
from torchrl_ext.registry import engines
from torchrl_ext.types import API_KEY_VARIABLE

__all__ = ["add_parser", "run"]

_SETTINGS = {
    "host": "host",
    "port": "port",
    "dtype": "dtype",
    "tp": "tensor_parallel_size",
    "max_model_len": "max_model_len",
    "lora_rank": "lora_rank",
    "lora_adapters": "lora_adapters",
    "plain_linears": "plain_linears",
    "log": "log_path",
    "start_timeout_s": "start_timeout_s",
}
"""Option -> the field of a spec."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser(
        "serve",
        help="install and start an engine that can follow a trainer",
        description="Start an engine for one model and serve until Ctrl-C. vLLM and SGLang come from this "
        "environment where they are installed, else a CPU build is installed once into a cache folder of its own "
        "($TORCHRL_EXT_CACHE). The embedded engine has vLLM's generate and update routes; the OpenAI "
        "routes (/v1/completions, /v1/chat/completions) are vLLM's and SGLang's alone. Keys of servers come from the "
        f"environment: VLLM_API_KEY, and {API_KEY_VARIABLE} for the embedded engine.",
    )
    parser.add_argument("engine", choices=list(engines.having("server")), help="which engine")
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--release", metavar="X.Y.Z", help="a release other than the default (vllm, sglang)")
    parser.add_argument("--host", help="address to listen on, by default 127.0.0.1 (vllm, sglang)")
    parser.add_argument("--port", type=int, help="port to listen on; by default a free one")
    parser.add_argument("--dtype", help="auto (the default), float32, bfloat16 or float16")
    parser.add_argument("--tp", type=int, metavar="N", help="workers that share the model (vllm, sglang)")
    parser.add_argument("--max-model-len", type=int, help="most tokens of a sequence, prompt included")
    parser.add_argument("--lora-rank", type=int, metavar="R", help="serve LoRA adapters up to this rank (vllm, sglang)")
    parser.add_argument("--lora-adapters", type=int, metavar="N", help="that requests may use at a time, by default 1")
    parser.add_argument("--plain-linears", action="store_true", help="keep linear weights unpacked on a CPU (vllm)")
    parser.add_argument("--log", help="file for what the server prints (vllm, sglang)")
    parser.add_argument("--start-timeout-s", type=float, default=300.0, help="deadline of the start, in seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON document when the engine is ready")
    return parser


def run(args: argparse.Namespace) -> int:
    """Start the engine, say where it is, and wait for Ctrl-C (or SIGTERM).

    Returns:
        0 after an interrupt.

    Raises:
        WeightSyncError: it could not be started, or ended by itself.
    """
    server, pause = None, threading.Event()
    with Interrupts() as interrupts:
        try:
            print(f"starting {args.engine} for {args.model}", file=sys.stderr, flush=True)
            server = _start(args)
            _announce(args, server)
            while server.alive():
                pause.wait(0.5)
            raise EngineError(f"{args.engine} ended by itself; its log ends with: {server.log() or 'nothing'}")
        except KeyboardInterrupt:
            print("ending", file=sys.stderr, flush=True)
        finally:
            interrupts.ignore()  # a second Ctrl-C must not leave a server behind
            if server is not None:
                server.stop()
    return 0


def _start(args: argparse.Namespace) -> Any:
    """Start the engine with the options that were given; one that it has no setting for is an error."""
    from torchrl_ext.cli.environments import settings_for
    from torchrl_ext.serving.server import start

    spec = engines.part(args.engine, "server")
    known = spec.settings()
    given = {option: getattr(args, option) for option in _SETTINGS}
    given = {option: value for option, value in given.items() if value not in (None, False)}
    unknown = [f"--{option.replace('_', '-')}" for option in given if _SETTINGS[option] not in known]
    if unknown:
        raise ConfigError(f"{args.engine} cannot be started with {', '.join(unknown)}", hint="leave it out")
    if not Path(args.model).is_dir():  # before anything is installed
        raise ConfigError(f"{args.model} is no directory", expected="a Hugging Face checkpoint directory")
    settings = {_SETTINGS[option]: value for option, value in given.items()}
    return start(spec(args.model, **settings_for(args.engine, args.release), **settings))


def _announce(args: argparse.Namespace, server: Any) -> None:
    if args.json:
        print(
            json.dumps({"engine": args.engine, "url": server.url, "pid": server.pid, "model": args.model}), flush=True
        )
    else:
        print(f"{args.engine} is ready at {server.url} (Ctrl-C ends it)", flush=True)
