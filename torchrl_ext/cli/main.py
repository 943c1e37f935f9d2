"""`torchrl-ext`: one table of commands, each in a module of its own that is imported only when it runs.

A command's module has ``add_parser(subparsers)``, which returns its parser, and ``run(args) -> int``, the exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import torchrl_ext
from torchrl_ext.errors import WeightSyncError

__all__ = ["COMMANDS", "add_api_key", "main"]

COMMANDS = {
    "demo": (
        "torchrl_ext.cli.demo.command",
        "train a tiny policy and keep an engine at its newest weights, with proof",
    ),
    "discover": ("torchrl_ext.cli.discover", "say which engines run at the given addresses"),
    "push": ("torchrl_ext.cli.push", "put a checkpoint into running engines"),
    "serve": ("torchrl_ext.cli.serve", "install and start an engine that can follow a trainer"),
    "chain": ("torchrl_ext.cli.chain", "list, check, thin out and unpack the versions under a root"),
    "plan": ("torchrl_ext.cli.plan", "say which transport suits a deployment, and what an update costs"),
    "doctor": ("torchrl_ext.cli.doctor.command", "find what will go wrong in an update before it does"),
    "watch": ("torchrl_ext.cli.watch", "show versions, bytes, pauses, lag and state of roots and engines, live"),
    "bench": ("torchrl_ext.bench.runner", "measure transports on this machine"),
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes the process's.

    Returns:
        0; 1 where the command failed (one line on standard error says why, and with ``--json`` a document with
        ``error`` on standard output); 2 for arguments that make no sense; 130 after an interrupt.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser, command = _parser(argv)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    try:
        return importlib.import_module(COMMANDS[command][0]).run(args)
    except WeightSyncError as error:
        return _fail(args, str(error), type(error).__name__, 1)
    except OSError as error:  # of a path, as a rule, which its words name
        return _fail(args, str(error) or type(error).__name__, type(error).__name__, 1)
    except KeyboardInterrupt:
        return _fail(args, "interrupted", "KeyboardInterrupt", INTERRUPTED)
    except Exception as error:
        if args.json:
            print(json.dumps({"error": str(error) or type(error).__name__, "type": type(error).__name__}))
        raise


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """Declare ``--api-key``; without it the environment's `API_KEY_VARIABLE` is taken."""
    from torchrl_ext.types import API_KEY_VARIABLE  # brings torch, which a list of commands does not wait for

    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(API_KEY_VARIABLE) or None,
        help=f"sent to engines as a bearer token; better in {API_KEY_VARIABLE}, since everybody on this machine can "
        "read command lines",
    )


def _parser(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, str]:
    """Return the parser, with the arguments of the one command that ``argv`` names, and that command."""
    parser = _Parser(
        prog="torchrl-ext", description="Keep running inference engines at a TorchRL policy's newest weights."
    )
    parser.add_argument("--version", action="version", version=torchrl_ext.__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    command = next((word for word in argv if not word.startswith("-")), "")
    for name, (module, summary) in COMMANDS.items():
        if name != command:
            subparsers.add_parser(name, help=summary)
            continue
        own = importlib.import_module(module).add_parser(subparsers)
        with contextlib.suppress(argparse.ArgumentError):  # the command may have declared it itself
            own.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    return parser, command


class _Parser(argparse.ArgumentParser):
    """Adds to the complaint about a wrong choice the one that was likely meant; parsers of commands are of it, too."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        known = [] if wrong is None else re.findall(r"[\w-]+", wrong[2])
        meant = difflib.get_close_matches("" if wrong is None else wrong[1], known, 1)
        super().error(f"{message}; did you mean {meant[0]!r}?" if meant else message)


def _fail(args: argparse.Namespace, message: str, kind: str, status: int) -> int:
    print(f"torchrl-ext {args.command}: {message}", file=sys.stderr)
    if args.json:
        print(json.dumps({"error": message, "type": kind}))
    return status


if __name__ == "__main__":
    sys.exit(main())
