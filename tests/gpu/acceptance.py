"""One call that shows in ten minutes whether the paths of one GPU work: ``python -m tests.gpu.acceptance``.

Each step is a process of its own with a limit, and the steps after one that failed run as well. Records are JSON lines,
on standard output and in a file; a table ends the run. The exit status is 0 if every step passed, 77 if some were
skipped and all others passed, else 1. A step for which no time is left has failed.

Only the standard library is imported at the top, so that the command itself can say which packages are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

ROOT = Path(__file__).parents[2]
NEEDS = ("torch", "numpy", "numba", "msgspec", "zstandard", "xxhash", "tensordict", "psutil")
"""What every step needs."""
SERVING = ("transformers", "safetensors", "starlette", "uvicorn", "aiohttp", "yarl")
"""What an engine over HTTP needs beside it."""
SKIPPED = 77
"""The exit status that automake's tests have for it."""
_SHOWN = 3000  # characters of an error
_CHILD = "from tests.gpu.acceptance import take; take()"


class Skipped(Exception):
    """A step cannot show anything here; says why."""


@dataclass(frozen=True)
class Step:
    """A process, and what it may take.

    Attributes:
        name: of the step.
        limit_s: seconds after which it is killed, with every process that it started.
        runs: ``module:function``, called with the scale; returns JSON-safe figures, of which ``failures`` are what
            failed. It raises `Skipped` where it can show nothing.
        proves: what it shows; G1 to G20 are faults that a review found without a GPU.
        needs: packages that it imports, beside `NEEDS`.
    """

    name: str
    limit_s: float
    runs: str
    proves: str
    needs: tuple[str, ...] = ()


STEPS = (
    Step("environment", 100, "tests.gpu.steps:environment", "packages, compiler"),
    Step("kernels", 60, "tests.gpu.steps:kernels", "every bit of the kernels", ("pytest",)),
    Step("staged", 45, "tests.gpu.deltas:staged", "G3: staged beside, committed on another stream"),
    Step("deaths", 150, "tests.gpu.steps:deaths", "G1: an end that is killed, memory that is given back"),
    Step("nccl", 150, "tests.gpu.steps:nccl", "G1, G6: absent ranks, killed ends, settings", ("pytest",)),
    Step("roads", 220, "tests.gpu.steps:roads", "G2, G9, G16, G19, G20: streams, pins, dtypes, strides, addresses"),
    Step("embedded", 75, "tests.gpu.steps:embedded", "G12: the whole road, outputs", SERVING),
)
"""In the order in which they decide most, if time is short."""


def run(steps, out, *, limit_s, scale):
    """Run steps one after the other, and return their records.

    Args:
        steps: the steps.
        out: the folder that gets ``results.jsonl`` and ``log.txt``, with what the steps print.
        limit_s: seconds for all of them.
        scale: how much of the sizes the steps take, up to 1.
    """
    until, records = time.monotonic() + limit_s, []
    with (out / "results.jsonl").open("w") as results, (out / "log.txt").open("wb") as log:
        for step in steps:
            began = time.monotonic()
            record = {"step": step.name, "proves": step.proves, **_outcome(step, until - began, scale, log)}
            records.append({**record, "seconds": round(time.monotonic() - began, 1)})
            for stream in (results, sys.stdout):
                print(json.dumps(records[-1]), file=stream, flush=True)
    return records


def _outcome(step, left_s, scale, log):
    """Run a step, and return its status and what it found."""
    missing = [name for name in (*NEEDS, *step.needs) if find_spec(name) is None]
    if missing:
        return {"status": "skipped", "why": f"no {', '.join(missing)}"}
    limit_s = max(0.0, min(step.limit_s, left_s))
    log.write(f"=== {step.name}\n".encode())
    log.flush()
    command = [sys.executable, "-c", _CHILD, step.runs, str(scale)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": log}
    child = subprocess.Popen(command, cwd=ROOT, **pipes, start_new_session=True)
    try:
        answer, _ = child.communicate(timeout=limit_s)
        return json.loads(answer) if answer else {"status": "failed", "why": f"ended with status {child.returncode}"}
    except subprocess.TimeoutExpired:
        return {"status": "failed", "why": f"did not end within {limit_s:.0f} s"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it started
        child.wait()
        child.stdout.close()


def take():
    """Take the step that the arguments name, in this process, and write its answer where only the runner reads."""
    own = os.dup(1)
    os.dup2(2, 1)  # whatever prints is no answer
    runs, scale = sys.argv[1:]
    try:
        found = resolve_name(runs)(float(scale))
        answer = {"status": "failed" if found.get("failures") else "passed", **found}
    except Skipped as skipped:
        answer = {"status": "skipped", "why": str(skipped)}
    except Exception as error:  # noqa: BLE001 - the record has it
        traceback.print_exc()
        answer = {"status": "failed", "why": f"{type(error).__name__}: {error}"[:_SHOWN]}
    with open(own, "w") as stream:
        json.dump(answer, stream)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a library may abort an interpreter that takes its time to end


def main(argv=None, steps=STEPS):
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.acceptance", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "lag", "cpu"), help="by default the accelerator that is there")
    parser.add_argument("--out", type=Path, help="folder of records and log; by default OUT, or a new one")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=[step.name for step in steps])
    parser.add_argument("--limit", type=float, default=560.0, metavar="SECONDS", help="for all steps; %(default)g")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the sizes; a rehearsal takes 0.005")
    options = parser.parse_args(argv)
    out = options.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="torchrl-ext-acceptance-"))
    out.mkdir(parents=True, exist_ok=True)
    print(f"records go to {out}", flush=True)
    os.environ["TORCHRL_EXT_TEST_DEVICE"] = options.device or _accelerator(parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the step, too
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-numba-") as compiled:
        os.environ.setdefault("NUMBA_CACHE_DIR", compiled)
        chosen = [step for step in steps if not options.only or step.name in options.only]
        records = run(chosen, out, limit_s=options.limit, scale=options.scale)
    for one in records:
        why = " ".join(str(one.get("why") or one.get("failures") or "").split())[:160]
        print(f"{one['step']:12} {one['status']:8} {one['seconds']:6.1f} s  {one['proves']}  {why}", flush=True)
    found = {record["status"] for record in records}
    return 0 if found <= {"passed"} else SKIPPED if found <= {"passed", "skipped"} else 1


def _accelerator(parser):
    import torch

    if not torch.accelerator.is_available():
        parser.error("torch finds no accelerator; --device lag rehearses on an emulated one")
    return torch.accelerator.current_accelerator().type


if __name__ == "__main__":
    sys.exit(main())
