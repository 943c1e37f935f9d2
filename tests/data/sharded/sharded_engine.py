"""A tensor-parallel engine, small enough for hundreds of runs: its workers are threads.

Each worker holds a slice of every tensor, lands what comes in live memory, and takes messages from a `EngineWorker`, as
in a real engine. It is driven by messages over a socket; `SocketPort` is the client's end.
"""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import EngineError, EngineRefusedError, EngineUnreachableError, NotConnectedError
from torchrl_ext.base.messages import Finish, State, read
from torchrl_ext.base.types import EngineInfo, ParamMeta
from torchrl_ext.control.port import EngineState, Port
from torchrl_ext.data.group.store import Channel, listen, serve
from torchrl_ext.data.landing.loader import Sliceable, WeightLoader
from torchrl_ext.data.landing.sliced import Sliced
from torchrl_ext.data.weights.blocks import Block
from torchrl_ext.data.weights.digests import byte_view, position_digest
from torchrl_ext.sync.engine_worker import EngineWorker

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

    def digests(self):
        """Of what came whole; the transport compares slices where they lie."""
        whole = {meta.name: Block.whole(meta.shape) for meta in self._params}
        return {
            name: position_digest(held).hex() for name, (block, held) in self.memory.items() if block == whole.get(name)
        }

    def held(self):
        return {name: byte_view(tensor).sum(dtype=torch.int64).item() for name, (_, tensor) in self.memory.items()}


class StageLoader(SliceLoader):
    """Holds what stage ``rank`` of a pipeline of ``size`` needs: each tensor whole, or nothing of it."""

    def block(self, number, meta):
        whole = Block.whole(meta.shape)
        return whole if number % self._size == self._rank else Block(whole.start, whole.start)

    def slices(self):
        return {name: (block,) if block.numel else () for name, (block, _) in self.memory.items()}

    def targets(self):
        return {}

    def load(self, pairs):
        for name, tensor in pairs:
            self.memory[name][1].copy_(tensor)


def expected(full, made=SliceLoader):
    """What each of two workers of an engine holds of full tensors by name, as `SliceLoader.held`."""
    found = []
    for loader in (made(0, 2), made(1, 2)):
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
    """The engine itself, of two workers; ``paused`` and ``version`` are what it would serve."""

    def __init__(self, loader=SliceLoader):
        together = Together(2)
        self.loaders = [loader(rank, 2) for rank in range(2)]
        self.ends = [
            EngineWorker(loader, rank=rank, workers=2, agree=together.agree(rank))
            for rank, loader in enumerate(self.loaders)
        ]
        self._pool = ThreadPoolExecutor(2)
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
            self.version = message.version
        return {"answers": answers}

    def listen(self):
        """Serve clients beside the caller; return the port."""
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        serve(listener, self._talk, "engine")
        return port

    def _talk(self, connected, _):
        channel = Channel(connected, "a client")
        with suppress(NotConnectedError):
            while True:
                channel.send(self.answer(channel.read(None)), Deadline(WAIT_S))


class SocketPort(Port):
    kind, timeout_s = "socket", WAIT_S

    def __init__(self, port):
        self._address, self.url = ("127.0.0.1", port), f"127.0.0.1:{port}"

    def describe(self):
        return EngineInfo(url=self.url, kind=self.kind, world_size=2, weight_version=str(self.ask("state")["version"]))

    def paused(self):
        return self.ask("state")["paused"]

    def state(self):
        return EngineState.of(self.call(State()))

    def call(self, message):
        return self.ask("message", message=message.to_json())["answers"]

    def pause(self):
        self.ask("pause", paused=True)

    def resume(self):
        self.ask("pause", paused=False)

    def ask(self, do, **more):
        try:
            channel = Channel(socket.create_connection(self._address, WAIT_S), self.url)
            channel.send({"do": do, **more}, Deadline(WAIT_S))
            answer = channel.read(Deadline(2 * WAIT_S))
            channel.close()
        except (OSError, NotConnectedError) as error:
            raise EngineUnreachableError(f"{self.url} is gone: {error}") from error
        if "error" in answer:
            raise EngineRefusedError(answer["error"])
        return answer
