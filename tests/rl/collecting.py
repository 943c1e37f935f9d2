"""A small environment, small policies, and workers that follow a scheme without a collector."""

from __future__ import annotations

import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import multiprocessing, nn
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

import torchrl_ext as tx

WAIT_S = 60
BETWEEN_PROCESSES = sorted(set(tx.transports()) - {"memory"})


class Walk(EnvBase):
    """Gymnasium's contract in TorchRL's terms: four observed numbers, which two actions push; ends after 20 steps."""

    def __init__(self):
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded(4))
        self.action_spec = Bounded(-1, 1, (2,))
        self.reward_spec = Unbounded(1)
        self.state, self.steps = torch.zeros(4), 0

    def _reset(self, tensordict=None, **_):
        self.state, self.steps = torch.zeros(4), 0
        return TensorDict({"observation": self.state}, [])

    def _step(self, tensordict):
        self.steps += 1
        self.state = self.state + 0.1 * tensordict["action"].repeat(2)
        out = {"observation": self.state, "reward": self.state[:1], "done": torch.tensor([self.steps >= 20])}
        return TensorDict(out, [])

    def _set_seed(self, seed):
        torch.manual_seed(0 if seed is None else seed)


def make_policy(seed=0, hidden=16):
    """A plain MLP, 4 -> 2."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2), nn.Tanh())
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


@torch.no_grad()
def train(policy, seed=0):
    """What training does to weights, as far as a transport can see."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def same(left, right):
    """Whether two state dicts have the same names and the same bits."""
    return list(left) == list(right) and all(
        torch.equal(left[name].contiguous().view(torch.uint8), right[name].contiguous().view(torch.uint8))
        for name in left
    )


def worker_weights(collector):
    """What the policy of each worker of a multi-process collector holds now."""
    state = collector.state_dict()
    return [state[name]["policy_state_dict"] for name in sorted(state) if name.startswith("worker")]


class Mortal(nn.Linear):
    """A layer whose process dies when it is told to, in the middle of an update."""

    def __init__(self):
        super().__init__(4, 2)
        self.doomed = torch.zeros(1)

    def get_extra_state(self):
        return {"doomed": self.doomed}

    def set_extra_state(self, state):
        self.doomed = state["doomed"].clone()
        if self.doomed.item() == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def followers(scheme, models, model_id="policy", **sender):
    """Threads as workers: each lands in one of ``models``; the trainer end is connected inside the block."""
    scheme.init_on_sender(model_id=model_id, num_workers=len(models), **sender)
    ends = [pickle.loads(pickle.dumps(scheme)) for _ in models]
    try:
        with ThreadPoolExecutor(len(models)) as pool:
            joining = [
                pool.submit(join, end, model, idx, model_id)
                for idx, (end, model) in enumerate(zip(ends, models, strict=True))
            ]
            scheme.connect()
            for each in joining:
                each.result(WAIT_S)
        yield ends
    finally:
        scheme.shutdown()
        for end in ends:
            end.shutdown()


def join(end, model, idx, model_id="policy"):
    end.init_on_receiver(model_id=model_id, model=model, worker_idx=idx)
    end.connect()


def follow(scheme, idx, make, pipe):
    """The main of a worker process: says its pid, then answers every question with its state dict."""
    model = make()
    join(scheme, model, idx)
    pipe.send(os.getpid())
    while pipe.recv():
        pipe.send({name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)})


@contextmanager
def forking():
    """Processes of TorchRL and of `processes` are forked from a fresh one that has the imports behind it."""
    context, before = multiprocessing.get_context("forkserver"), multiprocessing.get_start_method(allow_none=True)
    context.set_forkserver_preload([__name__])
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield context
    finally:
        multiprocessing.set_start_method(before, force=True)


@contextmanager
def processes(context, scheme, make, count):
    """Processes as workers, without a collector; gives their pids and their pipes."""
    pipes, children = [], []
    try:
        for idx in range(count):
            ours, theirs = context.Pipe()
            children.append(context.Process(target=follow, args=(scheme, idx, make, theirs), daemon=True))
            children[-1].start()
            theirs.close()
            pipes.append(ours)
        scheme.connect()
        yield [pipe.recv() for pipe in pipes], pipes
    finally:
        scheme.shutdown()
        for child in children:
            child.kill()
            child.join(WAIT_S)
