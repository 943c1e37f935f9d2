"""A plugin of vLLM and SGLang that notes when a worker writes changes, as a line of two times for each commit."""

import os
import time

TIMES = "TORCHRL_EXT_BENCH_TIMES"
"""Names the file, whose times are those of `time.perf_counter`: one clock for all processes of a machine."""


def register():
    """Wrap `Patcher.commit`; nothing without a file."""
    if TIMES not in os.environ:
        return
    from torchrl_ext.data.landing.patcher import Patcher

    commit = Patcher.commit

    def timed(patcher):
        began = time.perf_counter()
        try:
            commit(patcher)
        finally:
            with open(os.environ[TIMES], "a") as file:
                file.write(f"{began} {time.perf_counter()}\n")

    Patcher.commit = timed
