"""A tensor-parallel engine in a process of its own, small enough for hundreds of runs: its workers are threads.

Each worker holds a slice of every tensor, lands what comes in live memory, and takes messages from a `WorkerEnd`, as
in a real engine. The process is driven by JSON lines over a socket; `LineEngine` is the client.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import EngineError, EngineUnreachableError
from torchrl_ext.landing.loader import Sliceable, WeightLoader
from torchrl_ext.landing.sliced import Sliced
from torchrl_ext.messages import Finish, Join, Load, Poll, Prefetch, Start, Verify, read
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.sync.worker_end import WorkerEnd
from torchrl_ext.types import EngineInfo, EngineRow, ParamMeta
from torchrl_ext.weights.digests import byte_view
from torchrl_ext.weights.shards.blocks import Block

WAIT_S = 60


class SliceLoader(WeightLoader, Sliceable):
    """Holds what worker ``rank`` of ``size`` needs: rows of even tensors, columns of odd ones, vectors whole."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size
        self.memory, self._params = {}, ()

    def check(self, params):
        self._params = tuple(params)
        for number, meta in enumerate(self._params):
            block = self.block(number, meta)
            if meta.name not in self.memory:
                self.memory[meta.name] = (block, torch.zeros(block.shape, dtype=meta.dtype))

    def block(self, number, meta):
        if len(meta.shape) < 2:
            return Block.whole(meta.shape)
        axis, (start, stop) = number % 2, (list(Block.whole(meta.shape).start), list(meta.shape))
        size = meta.shape[axis]
        start[axis], stop[axis] = size * self._rank // self._size, size * (self._rank + 1) // self._size
        return Block(tuple(start), tuple(stop))

    def by_slices(self, wanted):
        pass

    def whole(self):
        return {}

    def slices(self):
        return {name: (block,) for name, (block, _) in self.memory.items()}

    def targets(self):
        metas = {meta.name: meta for meta in self._params}
        return {name: Sliced.of(metas[name], [(block, held)]) for name, (block, held) in self.memory.items()}

    def part(self, names):
        assert names is None or names <= self.memory.keys()

    def load(self, pairs):
        for _ in pairs:  # everything has landed where it belongs
            pass

    def proof(self):
        return "in place"

    def held(self):
        return {name: byte_view(tensor).sum(dtype=torch.int64).item() for name, (_, tensor) in self.memory.items()}


def expected(full):
    """What each of two workers of an engine holds of full tensors by name, as `SliceLoader.held`."""
    found = []
    for loader in (SliceLoader(0, 2), SliceLoader(1, 2)):
        loader.check([ParamMeta.of(name, tensor) for name, tensor in full.items()])
        for name, (block, held) in loader.memory.items():
            held.copy_(full[name][block.within(Block.whole(full[name].shape))])
        found.append(loader.held())
    return found


class Together:
    """Lets the workers of one engine agree: `agree` waits until all have spoken."""

    def __init__(self, count):
        self._words, self._meeting = [""] * count, threading.Barrier(count)

    def agree(self, rank):
        def speak(words):
            self._words[rank] = words
            self._meeting.wait(WAIT_S)
            said = list(self._words)
            self._meeting.wait(WAIT_S)
            return said

        return speak


class Served:
    """The engine itself; ``paused`` and ``version`` are what it would serve."""

    def __init__(self, workers):
        together = Together(workers)
        self.loaders = [SliceLoader(rank, workers) for rank in range(workers)]
        self.ends = [
            WorkerEnd(loader, rank=rank, workers=workers, agree=together.agree(rank))
            for rank, loader in enumerate(self.loaders)
        ]
        self._pool = ThreadPoolExecutor(workers)
        self.paused, self.version = False, 0

    def answer(self, told):
        if told["do"] == "state":
            return {"paused": self.paused, "version": self.version, "held": [one.held() for one in self.loaders]}
        if told["do"] == "pause":
            self.paused = told["paused"]
            return {}
        message, answers, failures = read(told["message"]), [], []
        for job in [self._pool.submit(end.handle, message) for end in self.ends]:
            try:
                answers.append(job.result(2 * WAIT_S))
            except EngineError as error:
                failures.append(str(error))
        if failures:
            return {"error": failures[0]}
        if isinstance(message, Finish):
            self.version, self.paused = message.version, False
        return {"answers": answers}


def serve(workers):
    """Serve one client after the other, until standard input is closed; the port is printed."""
    listener, served = socket.create_server(("127.0.0.1", 0)), Served(workers)
    print(listener.getsockname()[1], flush=True)

    def accept():
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection):
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                lines.write(json.dumps(served.answer(json.loads(line))) + "\n")
                lines.flush()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


class LineEngine(EngineClient):
    kind = "lines"

    def __init__(self, port, workers):
        self._port, self._workers, self._version, self._state, self._error = port, workers, None, "serving", None

    @property
    def url(self):
        return f"127.0.0.1:{self._port}"

    @property
    def proof(self):
        return "in place"

    def info(self):
        return EngineInfo(
            url=self.url, kind=self.kind, world_size=self._workers, weight_version=str(self.state()["version"])
        )

    def state(self):
        return self._ask(do="state")

    def connect(self, info, on_failure=lambda: None):
        with failing(on_failure):
            self._tell(Join.of({"rank_offset": 1, **info}))
            Deadline(WAIT_S).poll(lambda: not any(self._tell(Poll())), "it did not join")

    @property
    def takes_parts(self):
        return True

    def prefetch(self, version, part=None):
        if part is not None:
            self._tell(Prefetch(version=version, part=part))
            Deadline(WAIT_S).poll(lambda: not any(self._tell(Poll())), "it did not stage")

    def begin(self, version):
        self._state, self._version, self._error = "paused", None, None
        self._ask(do="pause", paused=True)
        self._tell(Start())

    def load(self, info, on_failure=lambda: None):
        with failing(on_failure):
            self._tell(Load.of(info))

    def _compare(self, digests):
        self._tell(Verify(digests=digests))

    def commit(self, version):
        self._tell(Finish(version=version))
        self._state, self._version = "serving", version

    def pause(self):
        self._ask(do="pause", paused=True)
        return True

    def resume(self):
        self._ask(do="pause", paused=False)

    def rows(self):
        return (EngineRow(engine=self.url, kind=self.kind, state=self._state, version=self._version, proof=self.proof),)

    def close(self):
        pass

    def _tell(self, message):
        return self._ask(do="message", message=message.to_json())["answers"]

    def _ask(self, **told):
        try:
            with (
                socket.create_connection(("127.0.0.1", self._port), WAIT_S) as connection,
                connection.makefile("rw") as lines,
            ):
                connection.settimeout(2 * WAIT_S)
                lines.write(json.dumps(told) + "\n")
                lines.flush()
                line = lines.readline()
        except OSError as error:
            raise EngineUnreachableError(f"{self.url} is gone: {error}") from error
        if not line:
            raise EngineUnreachableError(f"{self.url} is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer


@contextmanager
def failing(on_failure):
    try:
        yield
    except BaseException:
        on_failure()
        raise
