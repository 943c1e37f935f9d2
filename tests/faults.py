"""Whether the tests notice the faults that this package once had: each is put back by a change of one line.

``python -m tests.faults [NUMBER ...]`` changes copies of the tree, never the tree itself, and runs the tests that are
named beside each fault. It prints the first test that failed, and as its last line how many faults were noticed. Those
that only a real engine shows are left out without ``--engines``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TREE = ("torchrl_ext", "tests", "docs", "tutorials", "setup.py", "pyproject.toml", "README.md", "LICENSE")
TIMEOUT_S = 900.0


class Fault(NamedTuple):
    """A fault, the line that keeps it away (once in its file), that line with the fault, and who notices."""

    what: str
    path: str
    good: str
    bad: str
    tests: str


FAULTS = (
    Fault(
        "a worker takes messages of a sender whose connection another one has replaced",
        "sync/receiver.py",
        'if message.connection in ("", self.connection):  # without',
        "if True:  # without",
        "tests/sync",
    ),
    Fault(
        "a part of a model lands beside another version than the one it was cut from",
        "sync/receiver.py",
        "if part is not None and before.base != part.base:",
        "if False:",
        "tests/sync",
    ),
    Fault(
        "a version number of one sender counts as the same number of the next one",
        "sync/receiver.py",
        "if self.held.base:  # that number",
        "if False:  # that number",
        "tests/sync",
    ),
    Fault(
        "`verify` compares nothing",
        "sync/receiver.py",
        "if found.get(name) != digest:",
        "if False:",
        "tests/sync",
    ),
    Fault(
        "an engine joins although its rehearsal showed that updates go wrong",
        "sync/receiver.py",
        "loader.refuse_unsound(unproved=message.unproved)",
        "pass",
        "tests/sync tests/proof tests/plugins",
    ),
    Fault(
        "the number of a failed version is used again",
        "sync/sender.py",
        "self._attempted = update.version  # never",
        "pass  # never",
        "tests/sync",
    ),
    Fault(
        "ranks other than 0 do not learn the version in service",
        "sync/sender.py",
        "self.version = self.version + 1 if ended.version is None else ended.version",
        "self.version = self.version + 1",
        "tests/sync tests/transports/test_ranks.py",
    ),
    Fault(
        "an update that another thread began is joined instead of refused",
        "transports/ranks.py",
        "with self._one_at_a_time():\n            notes, failure",
        "with suppress():\n            notes, failure",
        "tests/sync tests/transports/test_ranks.py",
    ),
    Fault(
        "trainer ranks do not hear of rank 0's failure",
        "transports/ranks.py",
        "None if error is None else _Failure.of(error), missed)",
        "None, missed)",
        "tests/sync tests/transports/test_ranks.py",
    ),
    Fault(
        "after a failed update a slow rank follows the next one with what it had for that",
        "transports/ranks.py",
        "self._before._await_left()",
        "pass",
        "tests/sync tests/transports/test_ranks.py",
    ),
    Fault(
        "resume lets an engine serve a part of a version",
        "rpc/engine.py",
        "if not (not self._torn if state.whole is None else state.whole):",
        "if False:",
        "tests/rpc tests/sync",
    ),
    Fault(
        "an undone step resumes an engine that holds a part of another sender's version",
        "rpc/engine.py",
        "if self.port.state(fit=True).whole is False:",
        "if False:",
        "tests/rpc tests/sync",
    ),
    Fault(
        "a first update resumes an engine that somebody else paused",
        "rpc/engine.py",
        "if served:\n            self.resume()\n            self._refuse_other",
        "if True:\n            self.resume()\n            self._refuse_other",
        "tests/rpc tests/sync",
    ),
    Fault(
        "a second sleep of SGLang's cache drops its weights",
        "rpc/makes/sglang.py",
        "if released:  # SGLang",
        "if True:  # SGLang",
        "tests/rpc",
    ),
    Fault(
        "a vLLM that maps weights of a daemon is updated",
        "rpc/makes/vllm.py",
        "if facts.is_guest:",
        "if False:",
        "tests/rpc",
    ),
    Fault(
        "a vLLM keeps keys and values of older weights",
        "rpc/makes/vllm.py",
        "if self._keep_cache:\n            return\n        # a connector",
        "if True:\n            return\n        # a connector",
        "tests/rpc",
    ),
    Fault(
        "a pool with an engine that missed the version reports success",
        "rpc/pool.py",
        "if self._failed or lost.keys() - self._reported:",
        "if False:",
        "tests/rpc tests/sync",
    ),
    Fault(
        "ctrl-c leaves an HTTP call running",
        "rpc/connections.py",
        "loop.call_soon_threadsafe(_cancel, call, loop)",
        "pass",
        "tests/rpc",
    ),
    Fault(
        "the embedded engine resumes in the middle of an update",
        "embedded/engine.py",
        "self._refuse_torn(updating=self._updating)\n            self.scheduler.resume()",
        "self.scheduler.resume()",
        "tests/embedded tests/rpc",
    ),
    Fault(
        "a silent trainer holds an engine's control lock",
        "embedded/engine.py",
        "self._receiver.abort()\n        with self._alone():\n            self._updating = False",
        "with self._alone():\n            self._updating = False",
        "tests/embedded tests/sync tests/rpc",
    ),
    Fault(
        "the embedded engine answers without its key",
        "embedded/server.py",
        'not bears_key(headers.get("authorization"), keys)',
        "False",
        "tests/embedded",
    ),
    Fault(
        "aborted generations are taken for answers",
        "rollout/requests.py",
        'if all(one.finish_reason != "abort" for one in answers):',
        "if True:",
        "tests/rollout",
    ),
    Fault(
        "an engine opens every directory that a message names",
        "stores/opening.py",
        "if not allowed:",
        "if False:",
        "tests",
    ),
    Fault(
        "a URL with a password is handed to engines",
        "stores/opening.py",
        "if _without_password(name) != name:",
        "if False:",
        "tests/stores tests/transports",
    ),
    Fault(
        "a bucket's former owner publishes on",
        "stores/owners.py",
        "if newest != self.number:\n            found",
        "if False:\n            found",
        "tests/stores",
    ),
    Fault(
        "a forked child frees its parent's lock on a root",
        "stores/local.py",
        "if os.getpid() == pid:",
        "if True:",
        "tests/stores",
    ),
    Fault(
        "a reader's versions are collected while it reads",
        "stores/chain.py",
        "needed = min(needed, first)",
        "pass",
        "tests/stores tests/versions",
    ),
    Fault(
        "a new run under an old number is not read",
        "stores/chain.py",
        "if read_version(self.store, version).run_id != run_id:",
        "if False:",
        "tests/stores tests/versions tests/transports",
    ),
    Fault(
        "deltas may lead in circles",
        "stores/delta_manifest.py",
        "if not self.base_version < self.version:",
        "if False:",
        "tests/stores tests/versions",
    ),
    Fault(
        "a delta without digests is believed",
        "stores/delta_manifest.py",
        "if self.container in (BLOCKS, ROWS) and len(self.digests) != len(self.params):",
        "if False:",
        "tests/stores tests/versions",
    ),
    Fault(
        "a damaged payload is decoded",
        "versions/payloads.py",
        "if stated and xxhash.xxh3_64_intdigest(payload) != stated:",
        "if False:",
        "tests/versions tests/transports",
    ),
    Fault(
        "a tensor that does not come out as published is used",
        "versions/open_route.py",
        "if expected is None or (found := position_digest(tensor, self.digest).hex()) == expected:",
        "if True:",
        "tests/versions tests/transports",
    ),
    Fault(
        "another library's deltas land on other weights than their base",
        "versions/reader.py",
        "elif not self._is_base(own, origin.digest):",
        "elif False:",
        "tests/versions tests/compat tests/transports",
    ),
    Fault(
        "the live weights are never read back",
        "landing/patcher.py",
        "self.read_back(self._turns[self._turn])",
        "self.read_back(())",
        "tests/landing tests/sync",
    ),
    Fault(
        "one box of a tensor undoes what another box changed",
        "landing/patcher.py",
        "own = own and not any(_meet(target, one.target) for one in others)",
        "own = own and True",
        "tests/landing tests/transports",
    ),
    Fault(
        "changes land in parameters that training code has replaced",
        "landing/loader.py",
        "if _addresses(self._own()) != self._live:",
        "if False:",
        "tests/landing tests/sync",
    ),
    Fault(
        "elements that no trainer rank holds are left out",
        "weights/shards/sharing.py",
        "if sum(block.numel for block in found) < meta.numel:",
        "if False:",
        "tests/weights tests/transports",
    ),
    Fault(
        "flat pieces of FSDP1 are sent as parameters",
        "weights/shards/dtensor.py",
        'if "FullyShardedDataParallel" in map(',
        'if "nothing" in map(',
        "tests/weights",
    ),
    Fault(
        "a NaN travels although it is refused",
        "weights/finite.py",
        'if self._policy == "refuse" and nought.item() != 0.0:',
        "if False:",
        "tests/weights tests/sync",
    ),
    Fault(
        "forming a group drops every file lock of the process",
        "transports/group/process_group.py",
        "group = Group(seat, pg, backend, store)",
        "group = Group(seat, pg, backend, store); "
        'exec("import os\\nfor f in range(3, 256):\\n try: os.close(os.dup(f))\\n except OSError: pass")',
        "tests/transports",
    ),
    Fault(
        "a group lets in whoever finds its port",
        "transports/group/notes.py",
        'if not hmac.compare_digest(str(answer.get("proof")).encode(), '
        '_proof(self.secret, "worker", nonces).encode()):',
        "if False:",
        "tests/transports",
    ),
    Fault(
        "a port that listens and says nothing holds a worker for ever",
        "transports/group/notes.py",
        "message = self._link.read(within)\n        except NotConnectedError:",
        "message = self._link.read(None)\n        except NotConnectedError:",
        "tests/transports",
    ),
    Fault(
        "a message of any length is read into memory",
        "transports/links.py",
        "if size > self.longest_bytes:",
        "if False:",
        "tests/transports",
    ),
    Fault(
        "a peer that does not read holds a sender for ever",
        "transports/links.py",
        "if self._ready(select.POLLOUT, within):",
        "if self._ready(select.POLLOUT, None):",
        "tests/transports",
    ),
    Fault(
        "the reason why a worker left is lost",
        "transports/ipc/workers.py",
        "worker.hear()  # it may",
        "pass  # it may",
        "tests/transports",
    ),
    Fault(
        "what a request holds raises in SGLang's scheduler, which ends the server",
        "plugins/sglang/register.py",
        '    except Exception as error:\n        log.debug("a call of a scheduler failed"',
        '    except EngineError as error:\n        log.debug("a call of a scheduler failed"',
        "tests/plugins",
    ),
)


def noticed(fault: Fault, folder: Path, engines: bool) -> str | None:
    """Put a fault back into a copy of the tree, and return the first test that fails; None where all pass."""
    copy = folder / "tree"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in TREE:
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
    path = copy / "torchrl_ext" / fault.path
    text = path.read_text()
    if text.count(fault.good) != 1:
        raise SystemExit(f"{fault.path} has {fault.good!r} {text.count(fault.good)} times")
    path.write_text(text.replace(fault.good, fault.bad))
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "--no-header", "-n", "0"]
    command += ["--engines"] * engines + fault.tests.split()
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S:g} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1) and failed is None:
        raise SystemExit(f"pytest ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return failed[1] if failed else None if run.returncode == 0 else "a failure without a name"


def main() -> int:
    """Put every fault back, or those of the numbers given; return 1 where one is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="which faults; by default all")
    parser.add_argument("--engines", action="store_true", help="the faults that only real engines show")
    args = parser.parse_args()
    chosen = {number: fault for number, fault in enumerate(FAULTS, 1) if number in args.numbers or not args.numbers}
    chosen = {n: one for n, one in chosen.items() if one.tests.startswith("tests/engine") == args.engines}
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in chosen.items():
            found = noticed(fault, Path(folder), args.engines)
            missed += found is None
            print(f"{number}. {fault.what}: {found or 'NOT NOTICED'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults were noticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
