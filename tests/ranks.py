"""Tests that run on the ranks of a trainer: real processes over gloo, which the tests of a module share."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import traceback
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.processes import WAIT_S, calling, running_python
from torchrl_ext.control.serving.processes import free_port


def on_ranks(*worlds):
    """Make a scenario a test that it passes on every rank of a trainer, for each number of ranks in ``worlds``.

    A scenario is a function of a test module, called with ``rank``, ``world`` and the path of a folder that no other
    scenario uses, and that it makes itself. The scenarios of a module run one after the other (`outcomes_of`).
    """

    def test_of(scenario):
        @pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
        @pytest.mark.parametrize("world", worlds)
        def test(world, outcomes):
            require_passed(scenario, outcomes(world))

        test.scenario = test.place_as = scenario
        return test

    return test_of


def outcomes_of(scenarios, world, folder):
    """Run scenarios of one module on ``world`` ranks, and return the outcomes of each rank, in order of rank.

    Outcomes are "passed" or a traceback, by the name of the scenario; a rank runs none after one that failed.
    """
    port, module, names = free_port(), scenarios[0].__module__, [scenario.__name__ for scenario in scenarios]
    with ExitStack() as ends:
        programs = [calling(_run, module, names, rank, world, port, str(folder)) for rank in range(world)]
        ranks = [ends.enter_context(running_python(program)) for program in programs]
        said = [rank.stdout.read() for rank in ranks]
        assert [rank.wait(WAIT_S) for rank in ranks] == [0] * world, "a rank died"
    return [json.loads(text.splitlines()[-1]) for text in said]


def require_passed(scenario, outcomes):
    name = scenario.__name__
    said = [outcome.get(name, f"never reached: {[*outcome.values()][-1]}") for outcome in outcomes]
    assert set(said) == {"passed"}, "\n".join(f"rank {rank}: {one}" for rank, one in enumerate(said))


def raises_if(here, error, match=None):
    """The block has to raise an error on ranks where ``here`` is true, and none on others."""
    return pytest.raises(error, match=match) if here else nullcontext()


def join(rank, world, port):
    """Make this process a rank of a trainer, with a process group of torch."""
    torch.set_num_threads(1)
    address, timeout = f"tcp://127.0.0.1:{port}", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=timeout)


def _run(module, names, rank, world, port, folder):
    found = importlib.import_module(module)
    join(rank, world, port)
    outcomes = {}
    for name in names:
        scenario = getattr(found, name)
        try:
            getattr(scenario, "scenario", scenario)(rank, world, f"{folder}/{name}")
            dist.barrier()
            outcomes[name] = "passed"
        except BaseException:  # noqa: BLE001 - the outcome
            outcomes[name] = traceback.format_exc()
            break  # the ranks are out of step now
    print(json.dumps(outcomes), flush=True)
    os._exit(0)  # gloo's threads may abort an interpreter that takes its time to end
