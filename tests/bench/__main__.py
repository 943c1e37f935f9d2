"""``python -m tests.bench WHAT``: what the package promises beside engines of others, measured in one run."""

from __future__ import annotations

import argparse
import sys

from torchrl_ext.bench.runner import add_subjects, run

SUBJECTS = {
    "landing": ("tests.bench.landing", "what a pause costs: a delta that lands in vLLM, and full files"),
    "switch": ("tests.bench.switch", "what an in-process switch of vLLM's weights does to streams"),
    "prompts": ("tests.bench.prompts", "how long a batch of prompts takes before its first byte leaves"),
    "commit": ("tests.bench.commit", "the pause of a delta, beside a bare scatter and a load of everything"),
    "calls": ("tests.bench.calls", "processor time of control calls that many threads make at once"),
    "coding": ("tests.bench.coding", "kinds of blocks of changes, beside their entropy and a copy"),
    "digest": ("tests.bench.digest", "digests of weights on the host, beside a copy of the same bytes"),
    "encode": ("tests.bench.encode", "finding, coding and writing what changed, beside xor + zstd and a copy"),
    "tiles": ("tests.bench.tiles", "what tiles cost a trainer, and which share of a delta a worker reads"),
    "small": ("tests.bench.small", "an update of 60,000 small tensors, beside a clone of each"),
    "proof": ("tests.bench.proof", "reading back and rehearsing, beside the updates that they prove"),
}


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.set_defaults(json=False)
    add_subjects(parser, SUBJECTS)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
