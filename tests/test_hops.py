"""An update stays as short as it was promised to be."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_MOST = {"memory": 95, "collective": 152, "disk": 208, "delta": 170}


def test_a_second_update_runs_no_more_functions_than_promised():
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "tests.hops"], cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+) functions", done.stdout, re.MULTILINE)}
    assert found.keys() == _MOST.keys()
    longer = {name: count for name, count in found.items() if count > _MOST[name]}
    assert not longer, f"{longer}: see `python -m tests.hops NAME --list`"
