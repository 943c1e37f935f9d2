"""Run the embedded engine: ``python -m torchrl_ext.engines.embedded --model DIR --port P``."""

from __future__ import annotations

import argparse
import logging
import os
import pkgutil
import sys
from collections.abc import Sequence

from torchrl_ext.base.errors import WeightSyncError
from torchrl_ext.base.types import API_KEY_VARIABLE, is_loopback
from torchrl_ext.data.stores.opening import ROOTS_VARIABLE

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a model until a signal ends the process, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_ext.engines.embedded", description="Host a causal LM that follows a trainer."
    )
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="cpu", help="torch device of the model")
    parser.add_argument("--max-model-len", type=int, help="longest sequence, prompt included, in tokens")
    parser.add_argument("--threads", type=int, help="threads of one operator")
    parser.add_argument(
        "--routes", metavar="MODULE:FUNCTION", action="append", default=[], help="also serve the routes that it returns"
    )
    parser.epilog = (
        f"{API_KEY_VARIABLE} holds a key that every route except /health then requires as a bearer token; "
        f"{ROOTS_VARIABLE} "
        "names, with commas between, the directories and URLs that trainers may have this engine read."
    )
    args = parser.parse_args(argv)
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    import torch
    import uvicorn

    from torchrl_ext.engines.embedded.engine import EmbeddedEngine
    from torchrl_ext.engines.embedded.server import make_app

    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        engine = EmbeddedEngine(args.model, dtype=args.dtype, device=args.device, context=args.max_model_len)
        more = [route for path in args.routes for route in pkgutil.resolve_name(path)(engine)]
    except (WeightSyncError, ImportError, AttributeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if api_key is None and not is_loopback(args.host):
        logging.warning(
            "anyone who can reach %s can replace this engine's weights: set %s", args.host, API_KEY_VARIABLE
        )
    app = make_app(engine, api_key=api_key, routes=more)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=2, ws="none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
