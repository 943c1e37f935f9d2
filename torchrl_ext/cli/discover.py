"""``torchrl-ext discover ADDRESS...``: say which engines run at the given addresses."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from torchrl_ext.cli.main import add_api_key

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser("discover", help="say which engines run at the given addresses")
    parser.add_argument("addresses", nargs="+", metavar="ADDRESS", help="host:port or URL of an engine")
    add_api_key(parser)
    parser.add_argument("--timeout-s", type=float, default=30.0, help="deadline of each call, in seconds")
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask every address, and print what it says, or with ``--json`` ``{"engines": [...]}`` in the order given."""
    from torchrl_ext.rpc.discovery import discover

    found = discover(*args.addresses, timeout_s=args.timeout_s, api_key=args.api_key)
    if args.json:
        print(json.dumps({"engines": [dataclasses.asdict(info) for info in found]}))
        return 0
    for info in found:
        print(info.url)
        facts = dataclasses.asdict(info) | {"transports": ", ".join(info.transports) or "none"}
        for name, value in facts.items():
            if name != "url":
                print(f"    {name.replace('_', ' '):<16}{value}")
    return 0
