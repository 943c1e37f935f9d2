"""What a trainer says to an engine's workers: written, read back, and refused where it is something else."""

import json
import math
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchrl_ext
from tests.hostile import HOSTILE, worse_json
from torchrl_ext.base import messages
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineRefusedError,
    ManifestError,
    StaleBaseError,
    WeightSyncError,
)
from torchrl_ext.base.messages import (
    Connected,
    Join,
    Load,
    Message,
    Poll,
    Prefetch,
    answered,
    answers_of,
    read,
)
from torchrl_ext.base.routes import Flush, merged, salted, version_label
from torchrl_ext.base.types import Count, Info, ParamMeta, Params, Part, Seconds, Text

KINDS = [*{*Message.__subclasses__(), *Connected.__subclasses__()} - {Connected}]
assert Flush in KINDS  # of other modules, whose import makes them known

WORDS, COUNTS = st.text(max_size=9), st.integers(0, 2**62 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(WORDS, JSON, max_size=3)
SHAPES = st.lists(st.integers(0, 2**48 - 1), max_size=3).map(tuple)
VALUES = {
    bool: st.booleans(),
    type(None): st.none(),
    Text: WORDS,
    Count: COUNTS,
    Seconds: st.floats(0.001, 86400.0),
    Info: OBJECTS,
    list[Any]: st.lists(JSON, max_size=2),
    messages.Digests: st.dictionaries(WORDS, WORDS, max_size=3),
    Params: st.lists(
        st.builds(ParamMeta, WORDS, st.sampled_from([torch.bfloat16, torch.int8]), SHAPES), max_size=3
    ).map(tuple),
    Part: st.builds(Part, base=COUNTS, names=st.frozensets(WORDS, min_size=1, max_size=3)),
    messages.RehearsePolicy: st.sampled_from(["once", "never"]),
    messages.WeightsLost: st.sampled_from(["gone", "reloaded"]),
    messages.WorldSize: st.integers(1, 1 << 20),
}
"""Values of a field, by its type."""


def values(kind):
    if get_origin(kind) in (Union, UnionType):
        return st.one_of(map(values, get_args(kind)))
    return VALUES[kind]


MESSAGES = st.sampled_from(KINDS).flatmap(
    lambda kind: st.builds(kind, **{field.name: values(field.type) for field in msgspec.structs.fields(kind)})
)

PARAMS = (ParamMeta("w", torch.bfloat16, (2, 3)), ParamMeta("b", torch.float32, ()))
LOAD, JOIN = Load(version=7, handoff={}), Join(transport="disk", params=PARAMS, offer={})
REHEARSE, PREFETCH, COMMIT = messages.Rehearse(), Prefetch(version=7), messages.Commit(version=7)


@given(MESSAGES)
def test_every_message_survives_json(message):
    assert read(message.to_json()) == read(json.loads(json.dumps(message.to_json()))) == message


def test_words_of_a_transport_meet_no_field_of_an_envelope():
    own = {"version": 1, "params": "x", "rank_offset": 5, "connection": "y", "offer": 3, "kind": "z", "format": 0}
    for message in (Join(transport="disk", params=PARAMS, offer=own), Load(version=7, onto=6, handoff=own)):
        assert read(message.to_json()) == message


@pytest.mark.parametrize(
    ("message", "change", "words"),
    [
        (LOAD, {"version": 10**400}, r"Expected `int` <= 4611686018427387903 - at `\$.version`"),
        (LOAD, {"more": 1}, "a 'load' message is malformed: Object contains unknown field `more`"),
        (LOAD, {"kind": "pigeon"}, "no message of kind 'pigeon'.*one of .*join.*load"),
        (LOAD, {"kind": "connected"}, "no message of kind"),
        (COMMIT, {"version": None}, r"Expected `int`.* at `\$.version`"),
        (COMMIT, {"keep_cache": 1}, r"Expected `bool`, got `int` - at `\$.keep_cache`"),
        (messages.Undo(version=7), {"version": -1}, r"`int` >= 0 - at `\$.version`"),
        (messages.Keep(), {"version": 7}, "a 'keep' message is malformed: Object contains unknown field `version`"),
        (JOIN, {"params": [["w", "float9", [1]]]}, r"'float9' is not a dtype.* at `\$.params\[0\]\[1\]`"),
        (REHEARSE, {"how": "once\n"}, r"once\|never.* at `\$.how`"),
        (PREFETCH, {"part": {"base": 6, "names": []}}, r"length >= 1 - at `\$.part.names`"),
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
        Join.from_json({"transport": "disk", "offer": {}})
    with pytest.raises(ConfigError, match=r"'flush' message .*'load'"):
        Flush.from_json(LOAD.to_json())


NESTED = []
for _ in range(5000):  # deeper than Python and msgspec recurse
    NESTED = [NESTED]
BAD = [*HOSTILE, math.nan, -math.inf, "\ud800", {"\ud800": "\udfff"}, {3: 4}, NESTED, {"x": NESTED}]


@st.composite
def damaged(draw):
    """JSON of a message with a field replaced or added, or with changes deeper down; or something else."""
    info = json.loads(json.dumps(draw(MESSAGES).to_json()))
    bad, chance = draw(JSON | st.sampled_from(BAD)), draw(st.randoms())
    changes = {
        "replaced": lambda: info | {draw(st.sampled_from([*info])): bad},
        "added": lambda: info | {draw(st.sampled_from(["", "\ud800", "x" * 5000, 3])): bad},
        "deeper": lambda: worse_json(worse_json(info, chance), chance),
        "other": lambda: bad,
    }
    return changes[draw(st.sampled_from([*changes]))]()


@given(damaged())
def test_damaged_json_is_a_message_or_a_short_config_error(value):
    try:
        assert read(value).kind == value["kind"]
    except ConfigError as error:
        assert error.state == "unchanged" and len(str(error).encode()) < 1000


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"prefetch": 3}, "a message without a number came to release"),
        ({**Poll().to_json(), "format": 99, "release": "9.9"}, "release '9.9', format 99 of torchrl_ext"),
        ({**Poll().to_json(), "format": True}, "format True"),
    ],
)
def test_a_message_of_another_release_names_both(info, words):
    with pytest.raises(ConfigError, match=words) as refused:
        read(info)
    assert f"release {torchrl_ext.__version__}" in refused.value.what and "one release" in refused.value.hint


def test_a_namespace_of_cached_keys_is_that_of_no_other_version_or_request():
    found = [salted(own, switches) for own in (None, "a", "b", "1") for switches in (0, 1, 2, 12)]
    assert found[0] is None and found[4] == "a" and len({*found}) == len(found)
    assert (version_label(0), version_label(7)) == ("default", "7")


def test_answers_of_several_workers_are_one_answer():
    assert merged([]) == {}
    found = merged(
        [
            {"worker": 0, "working": False, "flushed": True, "proof": "rehearsed"},
            {"worker": 1, "working": True, "flushed": False, "proof": "in place", "restored": False},
        ]
    )
    assert found == {"worker": 1, "working": True, "flushed": False, "proof": "in place", "restored": False}
    assert merged([{"obstacle": ""}, {"obstacle": "one"}, {"obstacle": "two"}, {}]) == {"obstacle": "one"}
    assert merged([{"obstacle": ""}, {"obstacle": ""}]) == {"obstacle": ""}


def raising(error):
    def handle(message):
        raise error

    return handle


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ManifestError("w is odd", hint="cast it"), EngineRefusedError, "ManifestError: w is odd. Next: cast it."),
        (EngineRefusedError("no", expected="b", state="c"), EngineRefusedError, "no. Expected: b. State: c."),
        (DeadlineError("late"), DeadlineError, "late."),
        (StaleBaseError("old"), EngineRefusedError, "StaleBaseError: old. Code: stale_base."),
        (ValueError("\ud800"), EngineRefusedError, "ValueError: ?"),
    ],
)  # fmt: skip
def test_an_error_of_a_worker_keeps_its_parts_and_its_code(error, kind, text):
    """What a worker answers to a message it fails on is raised again where it is read."""
    answer = json.loads(json.dumps(answered(raising(error), json.dumps(Poll().to_json()))).encode())
    with pytest.raises(WeightSyncError) as raised:
        answers_of([{}, answer], "engine")
    assert type(raised.value) is kind and str(raised.value) == text
    assert raised.value.code == getattr(error, "code", "")


def test_what_is_no_message_or_no_answer_is_an_error():
    for text in ("", "{", "[" * 100_000, "null", '"\\ud800"', "{}", b"", None, 3, {}):
        assert answered(lambda message: 1 / 0, text)["error"]["what"]
    for rows in (None, "junk", [None], [{}, 3], [{"error": 3}], [{"error": {"kind": []}}]):
        with pytest.raises(EngineRefusedError):
            answers_of(rows, "engine")
