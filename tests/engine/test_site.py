"""The helper that forks an engine's children, without an engine: to those who start them they are as spawned."""

import json
from pathlib import Path

from tests.processes import python

STARTS = """
import json, multiprocessing, os, runpy, signal, sys, threading
fork_from_a_helper = runpy.run_path(sys.argv[1])["fork_from_a_helper"]
fork_from_a_helper(["wave"])
assert "wave" not in sys.modules
os.environ["LATER"] = "yes"

spawning, grandchild = multiprocessing.get_context("spawn"), "import sys; assert 'wave' in sys.modules; sys.exit(7)"
child = f'''
import multiprocessing, os, sys
inner = multiprocessing.get_context("spawn").Process(target=exec, args=({grandchild!r},))
inner.start()
inner.join()
told.put([os.environ["LATER"], "wave" in sys.modules, inner.exitcode, os.getpid()])
'''
told = spawning.Queue()
one = spawning.Process(target=exec, args=(child, {"told": told}))
one.start()
found = told.get(timeout=60)
one.join()
killed = spawning.Process(target=signal.pause)
killed.start()
os.kill(killed.pid, signal.SIGKILL)
killed.join()
failing = threading.Event()
signal.signal(signal.SIGQUIT, lambda *_: failing.set())
failed = spawning.Process(target=exec, args=("import os, signal; os.kill(os.getppid(), signal.SIGQUIT)",))
failed.start()
assert failing.wait(60)
failed.join()
print(json.dumps([*found[:3], found[3] == one.pid, one.exitcode, killed.exitcode]))
"""


def test_forked_children_and_theirs_have_their_parents_variables_and_tell_how_they_end():
    told = python(STARTS, Path(__file__).with_name("site") / "sitecustomize.py", fresh=True)
    assert json.loads(told) == ["yes", True, 7, True, 0, -9]
