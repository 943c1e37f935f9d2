"""Some hundreds of damaged requests to every route of ours on real servers, which go on serving what they served."""

import json
import random

import httpx
import pytest

from tests.engines.test_damaged_calls import EVERY
from tests.hostile import worse_json
from torchrl_ext.base.errors import WeightSyncError
from torchrl_ext.base.messages import FORMAT, read
from torchrl_ext.base.routes import CALL, CHANNEL

pytestmark = pytest.mark.engine

LOAD = {"model_path": "/nothing/weight_v000003", "load_format": "delta", "weight_version": "3"}
ACTIONS = ["", "no json", "[]", "{}", "[" * 100_000, f'{{"format": {FORMAT}, "kind": "poll", "connection": "\ud800"}}']


def damaged_message(chance):
    """A message that no worker can read."""
    while True:
        message = worse_json(chance.choice(EVERY).to_json(), chance)
        try:
            read(message)
        except WeightSyncError:
            return message


def damaged_texts(chance):
    text = json.dumps(damaged_message(chance))
    return text, text[: chance.randrange(len(text))], chance.choice(ACTIONS)


def of_vllm(chance):
    return [
        *(("/collective_rpc", {"method": CALL, "args": [text]}) for text in damaged_texts(chance)),
        ("/update_weights_from_disk", worse_json(LOAD, chance) | {"load_format": "delta"}),
    ]


def of_sglang(chance):
    return [
        *(("/weights_checker", {"action": CHANNEL + text}) for text in damaged_texts(chance)),
        ("/update_weights_from_disk", worse_json(LOAD, chance) | {"load_format": "delta"}),
    ]


def refused(answer):
    """Whether workers answered with an error, or the server did."""
    if answer.status_code != 200:
        return 400 <= answer.status_code <= 500
    told = answer.json()
    rows = told["results"] if "results" in told else [json.loads(told["message"])]
    return all("error" in row for row in rows)


@pytest.mark.parametrize(("kind", "requests"), [("vllm", of_vllm), ("sglang", of_sglang)])
def test_damaged_requests_neither_end_nor_change_a_server(request, kind, requests):
    served, chance = request.getfixturevalue(kind), random.Random(8)
    pid, label, said = served.server.pid, served.version(), served.tokens()
    # vLLM's server closes a connection after it has answered 500, so that the next request on it might be reset
    fresh = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=served.url, timeout=120, limits=fresh) as http:
        for _ in range(80):
            for route, body in requests(chance):
                content = json.dumps(body)  # NaN as well
                try:
                    answer = http.post(route, content=content, headers={"content-type": "application/json"})
                except httpx.TransportError as error:
                    raise AssertionError((route, content[:500], served.server.alive())) from error
                assert refused(answer), (route, body, answer.text)
    assert served.server.pid == pid and served.server.alive() and not served.paused()
    assert (served.version(), served.tokens()) == (label, said)
