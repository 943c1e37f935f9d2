"""The API key of engines, as the commands take it."""

from __future__ import annotations

import argparse
import os

from torchrl_ext.types import API_KEY_VARIABLE

__all__ = ["add_api_key"]


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """Declare ``--api-key``; without it the environment's `API_KEY_VARIABLE` is taken."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(API_KEY_VARIABLE) or None,
        help=f"sent to engines as a bearer token; better in {API_KEY_VARIABLE}, since everybody on this machine can "
        "read command lines",
    )
