"""The two ends that vLLM's trainer API has beside a backend, as programs of others write them: clients and sources."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx

from torchrl_ext.data.weights.source import full


class Client:
    """As vLLM's own: an error of a status, with the response; it has no words of the server's."""

    def __init__(self, *urls):
        self.base_url, self.urls = urls[0], urls
        self.http = httpx.Client(timeout=60)

    def call(self, route, body=None):
        self.post(self.base_url, route, body)

    def post(self, url, route, body):
        self.http.post(f"{url}/{route}", json=body).raise_for_status()

    def init_weight_transfer_engine(self, init_info):
        self.call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self):
        self.call("start_weight_update")

    def update_weights(self, update_info):
        self.call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version=None):
        self.call("finish_weight_update", weight_version and {"weight_version": weight_version})


class TRLs(Client):
    """As TRL's: an error with the body behind words of its own, and no versions."""

    def post(self, url, route, body):
        answer = self.http.post(f"{url}/{route}", json=body)
        if answer.status_code != 200:
            raise Exception(f"Request failed: {answer.status_code}, {answer.text}")

    def finish_weight_update(self, timeout=1800):
        self.call("finish_weight_update")


class FanOut(Client):
    """As SkyRL's: to every server at once; when all have answered, the words of the first that failed.

    ``offsets`` has it give each server a rank offset of its own.
    """

    def __init__(self, *urls, offsets=None):
        super().__init__(*urls)
        self.offsets = offsets or [None] * len(urls)
        self.threads = ThreadPoolExecutor(len(urls))

    def call(self, route, body=None):
        def post(url, offset):
            told = body
            if offset is not None and "init_info" in (body or {}):
                assert int(body["init_info"]["world_size"]) > offset
                told = {"init_info": {**body["init_info"], "rank_offset": offset}}
            answer = self.http.post(f"{url}/{route}", json=told)
            if answer.status_code >= 400:
                error = answer.json()["error"]
                detail = error["message"] if isinstance(error, dict) else error
                raise RuntimeError(f"call {route} to {url} failed [{answer.status_code}]: {detail}")

        calls = [self.threads.submit(post, *to) for to in zip(self.urls, self.offsets, strict=True)]
        for error in filter(None, [call.exception() for call in calls]):
            raise error


class Declared:
    """A source of vLLM 0.32's form, over tensors by name."""

    def __init__(self, tensors, held=None):
        self.tensors, self.held = tensors, held

    def metadata(self):
        return [SimpleNamespace(name=name, dtype=one.dtype, shape=one.shape) for name, one in self.tensors.items()]

    def held_names(self):
        return self.held

    def __iter__(self):
        for name, tensor in self.tensors.items():
            yield name, full(tensor) if self.held is None or name in self.held else None
