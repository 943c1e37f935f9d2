"""``python -m torchrl_ext.plugins.embedded --model DIR --port P``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from torchrl_ext.errors import WeightSyncError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_ext.plugins.embedded", description="Host a causal LM that follows a trainer."
    )
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="cpu", help="torch device of the model")
    parser.add_argument("--max-model-len", type=int, help="most tokens of a sequence, prompt included")
    parser.add_argument("--threads", type=int, help="threads of one operator")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    import torch
    import uvicorn

    from torchrl_ext.plugins.embedded.engine import Engine
    from torchrl_ext.plugins.embedded.server import make_app

    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        engine = Engine(args.model, dtype=args.dtype, device=args.device, context=args.max_model_len)
    except WeightSyncError as error:
        print(error, file=sys.stderr)
        return 1
    uvicorn.run(
        make_app(engine), host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=2, ws="none"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
