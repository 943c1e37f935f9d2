"""Seeded schedules of engines that join, leave, die and return while a trainer updates them and clients generate.

`Schedule` draws events from a seed, lets real engines (processes of their own) live through them, and checks:

* a request fails only if every engine of its client was down at some time while it ran;
* a token's log-probability is that of exactly the version that it carries: `transformers` computes it again from the
  trainer's weights;
* an engine that is not paused has, at every look, the bytes that the trainer had when it sent the engine's version;
* after each update, every engine of the fleet that nothing happened to serves it, whatever happened to the others;
* after the last update every engine of the fleet serves it;
* all of it ends in time, and leaves no thread, socket or file.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import namedtuple
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import httpx
import torch

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_checkpoint, tiny_model
from torchrl_ext.base.deadline import in_thread
from torchrl_ext.base.errors import EngineError, UpdateError
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.control.serving.processes import free_port

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "num_hidden_layers": 1, "max_position_embeddings": 128,
}  # fmt: skip
CLOSE = 1e-4  # nats, in float32; two versions are further than 1e-2 apart
ENDS_S = 150  # of a whole schedule; a wait inside it ends far earlier
FLEET_S, LOADS = 60, 2


def checkpoint(path):
    """The weights that every engine starts with."""
    return tiny_checkpoint(path, seed=0, **SIZES)


def fingerprint(model):
    """A digest of a model's bytes that owes nothing to the package."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


# in the engine's process


def routes(engine):
    """``GET /truth``: what the engine has in service; ``POST /trap``: at which of the next control calls it dies."""
    import uvicorn
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    trap, scheduler, run = {}, engine.scheduler, uvicorn.run
    spring = partial(os.kill, os.getpid(), signal.SIGKILL)

    def truth(_):
        with scheduler.weights:  # no weight changes meanwhile
            found = {"paused": scheduler.paused, "version": scheduler.version, "bytes": fingerprint(engine._model)}
        return JSONResponse(found)

    async def set_trap(request):
        trap.clear()
        trap.update(await request.json())
        return JSONResponse({})

    def trapping(app):
        async def guarded(scope, receive, send):
            answer = send
            if trap and scope["type"] == "http" and scope["path"] not in _FREE:
                trap["calls"] -= 1
                if trap["calls"] == 0:
                    if trap["when"] == "before":
                        spring()
                    elif trap["when"] == "during":
                        threading.Timer(trap["after_s"], spring).start()
                    else:

                        async def answer(message):
                            spring()  # it has done what it was asked to, and nobody learns that
                            await send(message)

            await app(scope, receive, answer)

        return guarded

    uvicorn.run = lambda app, **settings: run(trapping(app), **settings)
    return [Route("/truth", truth), Route("/trap", set_trap, methods=["POST"])]


_FREE = ("/health", "/truth", "/trap", "/inference/v1/generate")


# in the trainer's process


@dataclass
class Life:
    """An engine's process."""

    url: str
    server: EmbeddedServer = field(repr=False)
    since: float  # when it answered
    until: float = float("inf")  # when it was seen to have ended
    armed: float | None = None  # since when it may die by itself

    @property
    def up(self):
        return self.until == float("inf")

    def covers(self, start, end):
        """Whether it was certainly up all the time."""
        return self.since <= start and end <= (self.until if self.armed is None else self.armed)


Look = namedtuple("Look", ("life", "when", "paused", "version", "bytes"))
"""What an engine had in service at some time."""


class Policy:
    """A model whose training steps are the same for the same seed; keeps the weights of each version."""

    def __init__(self, seed):
        self.model = tiny_model(0, **SIZES)
        self._steps = torch.Generator().manual_seed(seed)
        self.sent = {0: self._kept()}

    @torch.no_grad()
    def train(self):
        for parameter in self.model.parameters():
            some = torch.rand(parameter.shape, generator=self._steps) < 0.1
            some.view(-1)[0] = True
            parameter[some] += 0.3 * torch.randn(int(some.sum()), generator=self._steps)

    def note(self, newest):
        """An update had the numbers up to ``newest``; one that fails or is sent again uses several."""
        kept = self._kept()
        self.sent.update(dict.fromkeys(range(max(self.sent) + 1, newest + 1), kept))

    def _kept(self):
        return fingerprint(self.model), {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def drawn(seed):
    """The events of a schedule: their names, and the numbers that decide what they happen to."""
    draw = random.Random(seed)
    names, likely = zip(*{"update": 6, "trap": 4, "add": 3, "remove": 1, "kill": 2, "return": 4}.items(), strict=True)
    settings = {
        "engines": draw.randint(2, 4),
        "pause_mode": draw.choice(["keep", "keep", "keep", "abort", "wait"]),
        "keyframe_every": draw.choice([1, 3, 16]),
    }
    events = []
    for name in draw.choices(names, likely, k=draw.randint(6, 12)):
        event = {"name": name, "pick": draw.random(), "meanwhile": None, "dies": draw.random() < 0.5}
        if name == "trap":
            event |= {"calls": draw.randint(1, 24), "when": draw.choice(["before", "during", "after"])}
            event["after_s"] = round(draw.random() * 0.02, 4)
        if name == "update":
            event |= {"meanwhile": draw.choice([None, None, "kill", "add", "remove"]), "delay_s": draw.random() * 0.15}
        events.append(event)
    return settings, events


class Schedule:
    """One schedule; `run` it once."""

    def __init__(self, seed, transport, model_dir, folder):
        self.seed, self._name, self._model_dir, self._folder = seed, transport, model_dir, folder
        self.settings, self.events = drawn(seed)
        self._log, self._began = [], time.monotonic()
        self._draw = random.Random(f"load of {seed}")
        self.lives, self.requests, self.looks, self.faults = [], [], [], []
        self._fleet_urls = []
        self._changing = threading.Lock()
        self._stop = threading.Event()
        self._ends = ExitStack()
        self.policy, self.sender = Policy(seed), None
        self._began_last = 0.0  # when the last update began

    def __str__(self):
        lines = [f"seed {self.seed} by {self._name}: {self.settings}", *map(str, self.events), "what happened:"]
        return "\n".join([*lines, *self._log, "faults:", *self.faults])

    def run(self):
        """Live through the schedule, and return the faults found, with the schedule; "" if there are none."""
        ended = in_thread(self._run, f"schedule {self.seed}")
        try:
            ended.result(ENDS_S)
        except TimeoutError:
            self._fault(f"no end within {ENDS_S} s:\n{_stacks()}")
        except BaseException:  # noqa: BLE001 - it belongs to the report
            self._fault(traceback.format_exc())
        finally:
            self._stop.set()
            for life in self.lives:
                life.server.stop()
        return str(self) if self.faults else ""

    # events

    def _run(self):
        with self._ends:
            for _ in range(self.settings["engines"]):
                self._fleet_urls.append(self._start().url)
            self._connect()
            threads = [in_thread(self._load, f"load {i}") for i in range(LOADS)] + [in_thread(self._spy, "spy")]
            for event in self.events:
                self._note(f"- {event['name']}")
                getattr(self, f"_{event['name']}")(event)
            self._settle()
            self._stop.set()
            for thread in threads:
                thread.result(ENDS_S)
        self._check_requests()
        self._check_looks()

    def _connect(self):
        own = {"root": self._folder / "root", "keyframe_every": self.settings["keyframe_every"]}
        own = own if self._name == "delta" else {"bucket_bytes": 1 << 12}
        mode = self.settings["pause_mode"]
        self.fleet = tx.connect(
            members=self._fleet_urls.copy, timeout_s=FLEET_S, load_timeout_s=FLEET_S, pause_mode=mode
        )
        transport = tx.make_transport(self._name, timeout_s=FLEET_S, **own)
        self.sender = self._ends.enter_context(tx.WeightSender(transport, self.fleet))
        self.sender.register_model(self.policy.model)

    def _update(self, event, among=()):
        """Train and update; ``among`` are engines that something may happen to meanwhile."""
        known = {engine.url for engine in self.fleet.engines}.union(self._fleet_urls)
        self.policy.train()
        began, update = time.monotonic(), in_thread(self.sender.update_weights, "update")
        before, self._began_last = self._began_last, began
        touched = {life.url for life in among}
        if event["meanwhile"]:
            time.sleep(event["delay_s"])
            what = {"kill": self._kill, "add": self._add, "remove": self._remove}[event["meanwhile"]]
            touched |= {life.url for life in (what({**event, "dies": False}),) if life}
        error = None
        try:
            report = update.result(ENDS_S)
            newest, rows = report.version, report.engines
        except UpdateError as failed:
            error, newest, rows = failed, failed.report.version, failed.rows
        self.policy.note(self.sender._attempted)  # a number that no worker can have seen may be used again
        words = "ok" if error is None else f"{type(error).__name__}: {str(error)[:1500]}"
        self._note(f"  version {newest} in {time.monotonic() - began:.2f} s: {words}")
        self._observe_deaths()
        now = {life.url: self._look(life, timeout_s=30 if life.armed is None else 1) for life in self._alive()}
        self._observe_deaths()
        reported, lost = {row.engine for row in rows}, {row.engine for row in rows if row.state == "unreachable"}
        alive = [life for life in self._alive() if life.armed is None and life.url in reported - touched]
        # one that joins or returns may answer too late for this update
        sound = [life for life in alive if life.url not in lost or life.since < before]
        for life in sound:
            look = now.get(life.url)
            if not look or look.paused or look.version != newest:
                self._fault(f"after version {newest}, {life.url} has {look}")
        for row in rows:
            if row.engine not in known | touched:
                self._fault(f"the report names {row.engine}, which is not of the fleet")
            look = now.get(row.engine)
            if look and row.state == "serving" and (look.paused or look.version != (row.version or 0)):
                self._fault(f"the report says {row}, and there is {look}")
        if error is None and not any(row.version == newest and row.state == "serving" for row in rows):
            self._fault(f"version {newest} is in service nowhere, and nobody was told")
        if sound and error is not None and not self._names_cause(error, touched):
            self._fault(f"an error without a cause in the schedule: {error}")
        return error is None and reported - lost >= {life.url for life in self._members()}

    def _names_cause(self, error, touched):
        """Whether an error names an engine that died or left."""
        down = [life for life in self.lives if not life.up or life.armed is not None or life.url in touched]
        names = {name for life in down for name in (life.url, f"pid {life.server.pid} ")}  # a group knows its processes
        return any(name in str(error) for name in names)

    def _trap(self, event):
        life = self._picked(event, self._members())
        if life is None:
            return
        life.armed = time.monotonic()
        body = {name: event[name] for name in ("calls", "when", "after_s")}
        httpx.post(f"{life.url}/trap", json=body, timeout=30, verify=False).raise_for_status()
        self._note(f"  {life.url} falls {event['when']} call {event['calls']}")
        self._update(event, [life])

    def _add(self, event):
        life = self._start()
        with self._changing:
            self._fleet_urls.append(life.url)
        return life

    def _remove(self, event):
        life = self._picked(event, self._members())
        if life is None or len(self._fleet_urls) < 2:
            return None
        with self._changing:
            self._fleet_urls.remove(life.url)
        self._note(f"  {life.url} leaves")
        if event["dies"]:
            self._end(life)
        return life

    def _kill(self, event):
        life = self._picked(event, self._members())
        if life is not None:
            self._end(life)
        return life

    def _return(self, event):
        """An engine that died is back at its address."""
        if urls := self._dead():
            self._start(urls[int(event["pick"] * len(urls))])

    def _settle(self):
        """Nothing happens any more: some of the dead return, and the last updates reach everybody."""
        self._note("- nothing happens any more")
        self._observe_deaths()
        for life in self._alive():
            with suppress(httpx.HTTPError):
                httpx.post(f"{life.url}/trap", json={}, timeout=30, verify=False)
            if life.server.alive():
                life.armed = None
            if not life.server.alive() or life.url not in self._fleet_urls:
                self._end(life)  # or requests would wait for it, if it left while it was paused
        dead = self._dead()
        for url in dead if not self._members() else dead[: len(dead) // 2]:
            self._start(url)
        calm = {"meanwhile": None}
        self._update(calm)
        if not any(self._update(calm) for _ in range(3)):  # until one reaches everybody
            self._fault("the last updates did not reach everybody, although nothing happened")
        for life in self._members():
            look = self._look(life)
            if not look or look.paused or look.version != self.sender.version:
                self._fault(f"at the end {life.url} has {look}, and the trainer {self.sender.version}")

    # the fleet

    def _start(self, url=None):
        port = free_port() if url is None else int(url.rpartition(":")[2])
        server = EmbeddedServer(self._model_dir, port=port, dtype="float32", threads=1, routes="tests.schedules:routes")
        self.lives.append(life := Life(server.url, server, time.monotonic()))
        self._note(f"  {life.url} is up")
        return life

    def _end(self, life):
        life.until = time.monotonic()
        life.server.stop()
        self._note(f"  {life.url} dies")

    def _observe_deaths(self):
        for life in self._alive():
            if not life.server.alive():
                self._end(life)

    def _alive(self):
        return [life for life in self.lives if life.up]

    def _members(self):
        return [life for life in self._alive() if life.url in self._fleet_urls]

    def _dead(self):
        """Addresses of the fleet at which nobody is."""
        up = {life.url for life in self._alive()}
        return [url for url in self._fleet_urls if url not in up]

    @staticmethod
    def _picked(event, lives):
        return lives[int(event["pick"] * len(lives))] if lives else None

    # load and looks

    def _load(self):
        clients, draw = {}, random.Random(self._draw.random())
        while not self._stop.is_set():
            with self._changing:
                urls = tuple(self._fleet_urls)
            if not urls:
                self._stop.wait(0.05)
                continue
            if urls not in clients:
                clients[urls] = InferenceClient(urls, kind="embedded", timeout_s=ENDS_S, retire_s=0.3)
            self._ask(clients[urls], urls, draw)

    def _ask(self, client, urls, draw):
        prompt = [draw.randrange(3, 64) for _ in range(draw.randint(3, 8))]
        request = SimpleNamespace(urls=urls, prompt=prompt, start=time.monotonic(), answer=None, error=None)
        try:
            (request.answer,) = client.generate(
                [prompt], max_tokens=draw.choice([2, 4, 16]), temperature=0, ignore_eos=True
            )
        except Exception as error:  # noqa: BLE001 - judged later
            request.error = error
            self._stop.wait(0.05)
        request.end = time.monotonic()
        self.requests.append(request)
        self._stop.wait(draw.choice([0, 0.03, 0.1]))

    def _spy(self):
        with httpx.Client(verify=False) as http:
            while not self._stop.wait(0.1):
                for life in self._alive():
                    self._look(life, http, timeout_s=0.5)

    def _look(self, life, http=httpx, timeout_s=30):
        """What an engine has in service; None if it does not say."""
        settings = {"verify": False} if http is httpx else {}
        began = time.monotonic()
        try:
            found = http.get(f"{life.url}/truth", timeout=timeout_s, **settings).json()
        except (httpx.HTTPError, ValueError):
            return None
        if not life.since <= began <= time.monotonic() <= life.until:
            return None  # another process may have answered
        version = 0 if found["version"] == "default" else int(found["version"])
        look = Look(life, began, found["paused"], version, found["bytes"])
        self.looks.append(look)
        return look

    # checks

    def _check_looks(self):
        for look in self.looks:
            if look.paused:
                continue
            if look.version not in self.policy.sent:
                self._fault(f"a version that nobody sent: {look}")
            elif look.bytes != self.policy.sent[look.version][0]:
                self._fault(f"not the bytes of its version: {look}")

    def _check_requests(self):
        for request in self.requests:
            if request.error is not None:  # each of its engines was down with it, or while it ran
                covers = [life.url for life in self.lives if life.covers(request.start, request.end)]
                stayed = {*covers} & {*request.urls}
                if stayed or not isinstance(request.error, EngineError):
                    self._fault(f"lost although {stayed} were up: {request.error!r}")
            elif len(request.answer.token_versions()) != len(request.answer.token_ids):
                self._fault(f"tokens without a version: {request}")
        answered = [request for request in self.requests if request.error is None]
        self._check_logprobs(answered)
        if not answered:
            self._fault("no request had an answer")

    @torch.no_grad()
    def _check_logprobs(self, answered):
        model = tiny_model(0, **SIZES)
        rows = {(tuple(one.prompt), one.answer): one.answer.token_versions() for one in answered if one.answer}
        for version in sorted({version for versions in rows.values() for version in versions}):
            if version not in self.policy.sent:
                self._fault(f"tokens have version {version}, which nobody sent")
                continue
            own = [key for key, versions in rows.items() if version in versions]
            model.load_state_dict(self.policy.sent[version][1])
            full = [[*prompt, *answer.token_ids] for prompt, answer in own]
            width = max(map(len, full))
            padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in full])  # to the right: seen by nobody
            wanted = model(padded, use_cache=False).logits.float().log_softmax(-1)
            for (prompt, answer), logprobs in zip(own, wanted, strict=True):
                for i, carried in enumerate(rows[prompt, answer]):
                    if carried == version:
                        at = logprobs[len(prompt) + i - 1]
                        gap = abs(float(at[answer.token_ids[i]]) - answer.logprobs[i])
                        short = float(at.max() - at[answer.token_ids[i]])
                        if gap > CLOSE or short > CLOSE:
                            self._fault(f"token {i} is not of version {version}: {gap} nats, {short} short: {answer}")
                            break

    def _note(self, what):
        self._log.append(f"{time.monotonic() - self._began:7.3f} {what}")

    def _fault(self, what):
        self._log.append(f"{time.monotonic() - self._began:7.3f} FAULT {what[:300]}")
        self.faults.append(what)


def _stacks():
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)
