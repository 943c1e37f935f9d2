"""What a trainer says to an engine's workers: written, read back, and refused where it is something else."""

import json
import math
import random
import re
from contextlib import suppress

import pytest
import torch

import torchrl_ext
from tests.hostile import HOSTILE, refused_or_right, worse_json
from torchrl_ext import messages
from torchrl_ext.collectors.worker_end import Keep
from torchrl_ext.errors import ConfigError, WeightSyncError
from torchrl_ext.messages import Connected, Join, Load, Message, Poll, Port, Prefetch, Seconds, Text, Verify, Wire, read
from torchrl_ext.plugins.sglang.adapters import CheckLoaded
from torchrl_ext.plugins.sglang.routes import Land
from torchrl_ext.routes import ANSWERS, Flush, ListAdapters, answers_in, escaped, merged, unescaped
from torchrl_ext.types import ParamMeta, Part

PARAMS = (ParamMeta("w", torch.bfloat16, (2, 3)), ParamMeta("b", torch.float32, ()))
EVERY = [
    messages.Inspect(root={"root": "/x"}, dial=["host", 1], token="0" * 32),
    Join(transport="disk", params=PARAMS, rank_offset=3, world_size=9, compares=False, offer={"root": "/x"}),
    messages.Rehearse(how="always", ask=True),
    Prefetch(version=7, part=Part(base=6, names=frozenset({"w", "b"}))),
    Land(files=["a"], paused=True, label="7"),
    messages.Pull(source="/x", directory="/y", version=7),
    Poll(),
    messages.Start(bracketed=True),
    Load(version=7, handoff={"path": "/x/weight_v000007"}),
    Verify(digests={"w": "0" * 32}),
    messages.Seal(),
    messages.Finish(version=7),
    messages.Reset(weights="gone"),
    messages.State(),
    Flush(),
    messages.CheckAdapter(params=PARAMS, root={"root": "/x"}),
    CheckLoaded(label="a@7"),
    ListAdapters(),
    messages.StageAdapter(name="a", version=7, path="/x"),
    messages.ServeAdapter(name="a", version=7),
    messages.UnloadAdapter(name="a"),
    Keep(),
    messages.Leave(),
]

LOAD, JOIN = Load(version=7, handoff={}), Join(transport="disk", params=PARAMS, offer={})
REHEARSE, PREFETCH = messages.Rehearse(), Prefetch(version=7)


def test_paths_in_the_words_of_a_worker_get_past_the_server_of_vllm():
    """`vllm.entrypoints.serve.exception_handling.utils.sanitize_message` (0.32)."""

    def sanitised(words):
        words = re.sub(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+", "<path>", words)
        return re.sub(r"(?:/[\w\-]+)+/[\w\-]+\.\w+", "<path>", words)

    answer = {"root": "/root/a/b", "file": "/shared/a/model.safetensors", "odd": "\\/"}
    words = f"StoreError: /tmp/root and /shared/a/b.json are not there, {ANSWERS}{json.dumps(answer)}"
    assert sanitised(words).count("<path>") == 4
    assert unescaped(sanitised(escaped(words))) == words
    assert answers_in(escaped(words)) == [answer]


def test_every_message_survives_json():
    for message in EVERY:
        assert read(json.loads(json.dumps(message.to_json()))) == message
        assert read(message.to_json()) == message
    classes = {*Message.__subclasses__(), *Connected.__subclasses__()} - {Connected}
    assert {type(message) for message in EVERY} == classes


def test_what_a_transport_tells_its_worker_ends_travels_as_it_is():
    info = {"transport": "disk", "params": [meta.to_json() for meta in PARAMS], "root": "/x", "run_id": "r"}
    join = Join.of(info)
    assert join.params == PARAMS and join.offer == {"root": "/x", "run_id": "r"}
    assert join.info() == {**info, "rank_offset": 1}
    load = Load.of({"version": 7, "params": [], "group": "g"})
    assert load == Load(version=7, handoff={"params": [], "group": "g"})
    assert load.info() == {"version": 7, "params": [], "group": "g"}
    with pytest.raises(ConfigError, match="version"):
        Load.of({"path": "/x"})


@pytest.mark.parametrize(
    ("message", "change", "words"),
    [
        (LOAD, {"version": None}, r"a 'load' message .*Expected `int`, got `null` - at `\$.version`"),
        (LOAD, {"version": True}, r"Expected `int`, got `bool` - at `\$.version`"),
        (LOAD, {"version": 7.0}, r"Expected `int`, got `float` - at `\$.version`"),
        (LOAD, {"version": -1}, r"Expected `int` >= 0 - at `\$.version`"),
        (LOAD, {"version": 2**62}, r"Expected `int` <= 4611686018427387903 - at `\$.version`"),
        (LOAD, {"version": 10**400}, r"Expected `int` <= 4611686018427387903 - at `\$.version`"),
        (LOAD, {"handoff": []}, r"Expected `object`, got `array` - at `\$.handoff`"),
        (LOAD, {"connection": "x" * 5000}, r"Expected `str` of length <= 4096 - at `\$.connection`"),
        (LOAD, {"more": 1}, "a 'load' message is malformed: Object contains unknown field `more`"),
        (LOAD, {"\ud800": 1}, "a 'load' message is malformed"),
        (LOAD, {"kind": "pigeon"}, "no message of kind 'pigeon'.*one of .*join.*load"),
        (LOAD, {"kind": "\ud800"}, "no message of kind"),
        (LOAD, {"kind": ["load"]}, "no message of kind"),
        (LOAD, {"kind": "connected"}, "no message of kind"),
        (JOIN, {"params": [["w", "float9", [1]]]}, r"'float9' is no dtype.* at `\$.params\[0\]\[1\]`"),
        (JOIN, {"params": [["w", "float32"]]}, r"at least length 3, got 2 - at `\$.params\[0\]`"),
        (JOIN, {"params": [["w", "float32", [-1]]]}, r"Expected `int` >= 0 - at `\$.params\[0\]\[2\]\[0\]`"),
        (JOIN, {"params": {}}, r"Expected `array`, got `object` - at `\$.params`"),
        (JOIN, {"world_size": 0}, r"Expected `int` >= 1 - at `\$.world_size`"),
        (JOIN, {"compares": 1}, r"Expected `bool`, got `int` - at `\$.compares`"),
        (REHEARSE, {"how": "once\n"}, r"a 'rehearse' message .* at `\$.how`"),
        (REHEARSE, {"how": "twice"}, r"once\|never\|always.* at `\$.how`"),
        (PREFETCH, {"part": []}, r"a 'prefetch' message .* at `\$.part`"),
        (PREFETCH, {"part": {"base": 6}}, r"required field `names` - at `\$.part`"),
        (PREFETCH, {"part": {"base": 6, "names": []}}, r"length >= 1 - at `\$.part.names`"),
        (PREFETCH, {"part": {"base": -1, "names": ["w"]}}, r">= 0 - at `\$.part.base`"),
        (PREFETCH, {"part": {"base": 6, "names": [7]}}, r"Expected `str`, got `int` - at `\$.part.names"),
        (PREFETCH, {"files": []}, r"length >= 1 - at `\$.files`"),
        (PREFETCH, {"files": [7]}, r"Expected `str`, got `int` - at `\$.files\[0\]`"),
        (PREFETCH, {"files": ["x"], "part": {"base": 6, "names": ["w"]}}, "`files` or `part`, got both"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_named_with_its_bound(message, change, words):
    with pytest.raises(ConfigError, match=words) as refused:
        read(message.to_json() | change)
    assert refused.value.state == "unchanged" and len(str(refused.value).encode()) < 1000


def test_a_field_that_is_missing_is_named():
    for name in ("version", "handoff"):
        with pytest.raises(ConfigError, match=f"a 'load' message .* missing required field `{name}`"):
            read({other: value for other, value in LOAD.to_json().items() if other != name})
    with pytest.raises(ConfigError, match=r"a 'join' message .* missing required field `params`"):
        Join.of({"transport": "disk"})
    with pytest.raises(ConfigError, match=r"'land' message .*'load'"):
        Land.from_json(LOAD.to_json())


NESTED = []
for _ in range(5000):  # deeper than Python and msgspec recurse
    NESTED = [NESTED]
BAD = [*HOSTILE, math.nan, -math.inf, "\ud800", {"\ud800": "\udfff"}, {3: 4}, NESTED, {"x": NESTED}]


@pytest.mark.parametrize("message", EVERY, ids=lambda message: message.kind)
def test_whatever_comes_is_a_message_or_an_error_that_says_what_is_wrong(message):
    chance, info = random.Random(message.kind), json.loads(json.dumps(message.to_json()))
    bad = [*BAD, *(info | {field: value} for field in info for value in BAD)]
    bad += [info | {name: 1} for name in ("", "\ud800", "x" * 5000, 3)]
    bad += [worse_json(worse_json(info, chance), chance) for _ in range(300)]
    refused = 0
    for value in bad:
        with suppress(WeightSyncError):
            assert read(value).kind == value["kind"]
            continue
        with pytest.raises(ConfigError) as error:
            read(value)
        refused += len(str(error.value).encode()) < 1000
    assert refused > len(BAD)


class Offer(Wire, frozen=True, kw_only=True):
    """As a transport's trainer end makes one for its worker ends."""

    root: Text
    port: Port
    timeout_s: Seconds = 60.0
    params: messages.Params = ()


def test_what_a_transport_sends_is_decoded_by_its_own_struct():
    offer = Offer(root="/x", port=9, params=PARAMS)
    info = json.loads(json.dumps(offer.to_json()))
    assert Offer.from_json(info | {"of another release": 1}) == Offer.from_json(offer.to_json()) == offer
    for value in (*BAD, *(info | {field: value} for field in info for value in BAD)):
        refused_or_right(Offer.from_json, value, right=lambda found: isinstance(found, Offer))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timeout_s": 0}, r"> 0.0 - at `\$.timeout_s`"),
        ({"timeout_s": math.nan}, r"> 0.0 - at `\$.timeout_s`"),
        ({"timeout_s": math.inf}, r"<= 86400.0 - at `\$.timeout_s`"),
        ({"port": 0}, r">= 1 - at `\$.port`"),
        ({"port": 65536}, r"<= 65535 - at `\$.port`"),
        ({"root": "x" * 5000}, r"length <= 4096 - at `\$.root`"),
    ],
)
def test_a_field_of_an_offer_is_named_with_its_bound(change, words):
    info = {"root": "/x", "port": 9}
    with pytest.raises(ConfigError, match=f"the offer of transport 'disk' is malformed: .*{words}"):
        Offer.from_json(info | change, "the offer of transport 'disk'")
    assert Offer.from_json(info | {"timeout_s": 3}).timeout_s == 3


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"prefetch": 3}, "earlier releases of torchrl_ext and programs of others send them, came to release"),
        ({**Poll().to_json(), "format": 99, "release": "9.9"}, "release '9.9', format 99 of torchrl_ext"),
        ({**Poll().to_json(), "format": True}, "format True"),
    ],
)
def test_a_message_of_another_release_names_both(info, words):
    with pytest.raises(ConfigError, match=words) as refused:
        read(info)
    assert f"release {torchrl_ext.__version__}" in refused.value.what and "one release" in refused.value.hint


@pytest.mark.parametrize("info", [None, [], "poll", 7])
def test_what_is_no_object_is_no_message(info):
    with pytest.raises(ConfigError, match="a message is"):
        read(info)


def test_answers_of_several_workers_are_one_answer():
    assert merged([]) == {}
    found = merged(
        [
            {"worker": 0, "working": False, "flushed": True, "proof": "rehearsed"},
            {"worker": 1, "working": True, "flushed": False, "proof": "in place", "restored": False},
        ]
    )
    assert found == {"worker": 1, "working": True, "flushed": False, "proof": "in place", "restored": False}


def test_answers_are_found_in_the_words_of_an_error_and_in_json():
    words = f'worker 0: {ANSWERS}{{"a": 1}}; worker 1: {ANSWERS}{{"a": 2}} and more'
    assert answers_in(words) == answers_in({"error": {"message": words}}) == [{"a": 1}, {"a": 2}]
    assert answers_in({"message": "done", "answer": {"a": 3}}) == [{"a": 3}]
    assert answers_in({"message": '{"a": 1} | {"a": 2}'}) == [{"a": 1}, {"a": 2}]
