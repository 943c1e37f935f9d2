"""What a trainer says to an engine's workers: written, read back, and refused where it is something else."""

import json

import pytest
import torch

import torchrl_ext
from torchrl_ext import messages
from torchrl_ext.errors import ConfigError
from torchrl_ext.messages import Join, Load, Message, Poll, Prefetch, Verify, answers_in, loading, merged, read
from torchrl_ext.types import ParamMeta, Part

PARAMS = (ParamMeta("w", torch.bfloat16, (2, 3)), ParamMeta("b", torch.float32, ()))
EVERY = [
    messages.Inspect(root={"root": "/x"}, dial=["host", 1], token="0" * 32),
    Join(transport="disk", params=PARAMS, rank_offset=3, world_size=9, compares=False, offer={"root": "/x"}),
    messages.Rehearse(how="always", ask=True),
    Prefetch(version=7, part=Part(base=6, names=frozenset({"w", "b"}))),
    messages.Land(files=["a"], paused=True, label="7"),
    messages.Pull(source="/x", directory="/y", version=7),
    Poll(),
    messages.Start(bracketed=True),
    Load(version=7, handoff={"path": "/x/weight_v000007"}),
    Verify(digests={"w": "0" * 32}),
    messages.Seal(),
    messages.Finish(version=7),
    messages.Reset(weights="gone"),
    messages.State(),
    messages.Flush(),
    messages.CheckAdapter(params=PARAMS, root={"root": "/x"}),
    messages.CheckLoaded(label="a@7"),
    messages.ListAdapters(),
    messages.StageAdapter(name="a", version=7, path="/x"),
    messages.ServeAdapter(name="a", version=7),
    messages.UnloadAdapter(name="a"),
    messages.Keep(),
    messages.Leave(),
]


def test_every_message_survives_json():
    for message in EVERY:
        assert read(json.loads(json.dumps(message.to_json()))) == message
    assert {type(message) for message in EVERY} == set(Message.__subclasses__())


def test_what_a_transport_tells_its_worker_ends_travels_as_it_is():
    info = {"transport": "disk", "params": [meta.to_json() for meta in PARAMS], "root": "/x", "run_id": "r"}
    join = Join.of(info)
    assert join.params == PARAMS and join.offer == {"root": "/x", "run_id": "r"}
    assert join.info() == {**info, "rank_offset": 1}
    load = loading({"version": 7, "params": [], "group": "g"})
    assert load == Load(version=7, handoff={"params": [], "group": "g"})
    assert load.info() == {"version": 7, "params": [], "group": "g"}
    assert loading({"verify": {"w": "0"}}) == Verify(digests={"w": "0"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": None}, "version of a 'load' message is None.*a whole number from 0"),
        ({"version": True}, "version of a 'load' message is True"),
        ({"version": -1}, "version of a 'load' message is -1"),
        ({"version": 2**62}, "version of a 'load' message"),
        ({"handoff": []}, "handoff of a 'load' message is .*an object"),
        ({"handoff": {"timeout_s": 0}}, "timeout_s of the handoff is 0.*seconds, above 0"),
        ({"handoff": {"timeout_s": float("nan")}}, "timeout_s of the handoff is nan"),
        ({"handoff": {"wire": {"master_port": 0}}}, "master_port of the handoff is 0.*1 to 65535"),
        ({"handoff": {"wire": {"wire": 3}}}, "wire of the handoff is 3"),
        ({"handoff": {"root": "x" * 5000}}, "root of the handoff"),
        ({"more": 1}, "a 'load' message has a field 'more'.*of connection, version, handoff"),
        ({"kind": "pigeon"}, "no message of kind 'pigeon'.*one of .*join.*load"),
        ({"kind": ["load"]}, "no message of kind"),
    ],
)
def test_a_field_that_cannot_be_is_named_with_what_it_should_have_been(change, words):
    told = Load(version=7, handoff={}).to_json() | change
    with pytest.raises(ConfigError, match=words) as refused:
        read(told)
    assert refused.value.state == "unchanged"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"params": [["w", "float9", [1]]]}, "params of a 'join' message.*float9"),
        ({"params": [["w", "float32"]]}, "params of a 'join' message"),
        ({"params": {}}, "params of a 'join' message is {}"),
        ({"world_size": 0}, "world_size of a 'join' message is 0.*1 or more"),
        ({"compares": 1}, "compares of a 'join' message is 1.*true or false"),
        ({"offer": {"needs_base": "x"}}, "needs_base of the transport's offer is 'x'"),
    ],
)
def test_what_a_trainer_offers_is_checked_before_anything_is_opened(change, words):
    with pytest.raises(ConfigError, match=words):
        read(Join(transport="disk", params=PARAMS, offer={}).to_json() | change)


def test_a_field_that_is_missing_is_named():
    told = Load(version=7, handoff={}).to_json()
    for name in ("version", "handoff"):
        with pytest.raises(ConfigError, match=f"a 'load' message has no {name}"):
            read({other: value for other, value in told.items() if other != name})
    with pytest.raises(ConfigError, match="a 'join' message has no params"):
        Join.of({"transport": "disk"})


@pytest.mark.parametrize(
    "part", [[], {}, {"base": 6}, {"base": 6, "names": []}, {"base": -1, "names": ["w"]}, {"base": 6, "names": [7]}]
)
def test_what_is_no_part_of_a_model_is_refused(part):
    with pytest.raises(ConfigError, match="part of a 'prefetch' message"):
        read({**Prefetch(version=7).to_json(), "part": part})
    assert read({**Prefetch(version=7).to_json(), "part": None, "files": None, "label": None}) == Prefetch(version=7)


@pytest.mark.parametrize(
    "told", [{"files": []}, {"files": [7]}, {"files": "x"}, {"files": ["x"], "part": {"base": 6, "names": ["w"]}}]
)
def test_files_that_are_no_part_of_a_version_are_refused(told):
    with pytest.raises(ConfigError, match="files of a 'prefetch' message"):
        read({**Prefetch(version=7).to_json(), **told})
    assert read({**Prefetch(version=7, files=["x"]).to_json()}).files == ["x"]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"prefetch": 3}, "earlier releases of torchrl_ext and programs of others send them, came to release"),
        ({**Poll().to_json(), "format": 99, "release": "9.9"}, "release '9.9', format 99 of torchrl_ext"),
        ({**Poll().to_json(), "format": True}, "format True"),
    ],
)
def test_a_message_of_another_release_names_both(told, words):
    with pytest.raises(ConfigError, match=words) as refused:
        read(told)
    assert f"release {torchrl_ext.__version__}" in refused.value.what and "one release" in refused.value.hint


@pytest.mark.parametrize("told", [None, [], "poll", 7])
def test_what_is_no_object_is_no_message(told):
    with pytest.raises(ConfigError, match="a message is"):
        read(told)


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
    words = f'worker 0: {messages.ANSWERS}{{"a": 1}}; worker 1: {messages.ANSWERS}{{"a": 2}} and more'
    assert answers_in(words) == answers_in({"error": {"message": words}}) == [{"a": 1}, {"a": 2}]
    assert answers_in({"message": "done", "answer": {"a": 3}}) == [{"a": 3}]
    assert answers_in({"message": '{"a": 1} | {"a": 2}'}) == [{"a": 1}, {"a": 2}]
