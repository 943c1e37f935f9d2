"""An update stays as short as it was promised to be."""

from __future__ import annotations

import re

from tests.processes import python

_MOST = {"memory": 95, "collective": 152, "disk": 208, "delta": 177}


def test_a_second_update_runs_no_more_functions_than_promised():
    told = python("import runpy; runpy.run_module('tests.hops', run_name='__main__')", bare=True)
    found = {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+) functions", told, re.MULTILINE)}
    assert found.keys() == _MOST.keys()
    longer = {name: count for name, count in found.items() if count > _MOST[name]}
    assert not longer, f"{longer}: see `python -m tests.hops NAME --list`"
