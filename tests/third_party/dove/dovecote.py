"""The worker's half of an engine: a server that hosts a causal LM, and lands a trainer's weights in it.

Start it by ``python dovecote.py MODEL PORT``.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM

import torchrl_ext as tx
from torchrl_ext.base.errors import EngineRefusedError, WeightSyncError
from torchrl_ext.base.messages import Inspect, Load, Start, answered
from torchrl_ext.sync.inspection import followed, inspect


class Dovecote(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self.receiver = tx.WeightReceiver(self.model)  # joins a trainer's transport and writes into the model
        self.folder, self.running, self.alone = str(folder), True, threading.Lock()
        self.routes = {f"/{name}": getattr(self, name) for name in ("info", "pause", "resume", "message", "logprobs")}

    def info(self, text):
        version = self.receiver.version  # the one in service, 0 for the start weights
        return {"model": self.folder, "running": self.running, "version": version, "transports": followed()}

    def pause(self, text):
        self.running = False
        return {}

    def resume(self, text):
        if not self.receiver.whole:  # part of a version landed: only a complete update ends that
            raise EngineRefusedError("the engine holds a part of a version", state="paused")
        self.running = True
        return {}

    def message(self, text):  # decodes a message, and turns an error of `handle` into an answer
        return answered(self.handle, text)

    def handle(self, message):
        if isinstance(message, Inspect):
            return inspect(message)
        if isinstance(message, (Start, Load)) and self.running:
            raise EngineRefusedError("the engine serves", expected="a pause first", state="unchanged")
        return self.receiver.handle(message)

    @torch.no_grad()
    def logprobs(self, text):
        if not self.running:
            raise EngineRefusedError("the engine is paused", state="paused")
        rows = []
        for tokens in map(torch.tensor, json.loads(text)):
            scores = self.model(tokens[None, :-1]).logits[0].float().log_softmax(-1)
            rows.append(scores.gather(1, tokens[1:, None])[:, 0].tolist())
        return rows


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        try:
            if self.path not in self.server.routes:
                self.respond(404, {"error": f"there is no route {self.path}"})
            else:
                with self.server.alone:  # no request is computed while a message is handled
                    self.respond(200, self.server.routes[self.path](text))
        except WeightSyncError as error:
            self.respond(409, {"error": str(error)})

    do_GET = do_POST

    def respond(self, status, answer):
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Requests are not worth a line each."""


if __name__ == "__main__":
    Dovecote(sys.argv[1], int(sys.argv[2])).serve_forever()
