"""``python -m tests.bench WHAT``: measurements for developers of the package, each beside a reference in the same run.

Each module of this folder that is named here has ``add_arguments(parser)`` and ``measure(args, say) -> dict``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from torchrl_ext.bench.runner import figures

SUBJECTS = {
    "by_shard": "deltas by shard: memory of FSDP2 ranks, and the bytes that workers read",
    "calls": "processor time of control calls that many threads make at once",
    "carriers": "bytes from one rank to another, by gloo and NIXL, beside a copy",
    "coding": "kinds of blocks of changes, beside their entropy and a copy",
    "commit": "the pause of a delta, beside a bare scatter and a load of everything",
    "digest": "digests of weights on the host, beside a copy of the same bytes",
    "first_use": "the first versions of fresh processes, with empty and warm caches of compiled loops",
    "gpu": "on a GPU: shared memory and deltas that are listed there, beside copies",
    "landing": "the pause of a delta that lands in vLLM, and of full files",
    "plan": "seconds and memory of a transfer plan of very many tensors",
    "prompts": "how long a batch of prompts takes before its first byte leaves",
    "proof": "reading back and rehearsing, beside the updates that they prove",
    "sharded": "from shard to shard: bytes, memory and time, beside a broadcast",
    "small": "an update of 60,000 small tensors, beside a clone of each",
    "switch": "streams of vLLM during in-process switches of its weights",
    "tiles": "the cost of tiles for a trainer, and the share of a delta that a worker reads",
}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="what", dest="what")
    for name, summary in SUBJECTS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--repeats", type=int, default=7, help="rounds of each comparison")
        command.add_argument("--json", action="store_true", help="print one JSON document on standard output")
        if name in argv:
            importlib.import_module(f"tests.bench.{name}").add_arguments(command)
    args = parser.parse_args(argv)
    subject = importlib.import_module(f"tests.bench.{args.what}")
    results = subject.measure(args, lambda step: print(step, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(results))
    else:
        for name, figure in figures(results):
            print(f"{name}: {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
