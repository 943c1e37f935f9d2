"""Tensors that land in one memory: which those are, and whether it could hold them all, against torch's own views."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.weights.test_view import numbered, views_of
from torchrl_ext.base.errors import ManifestError
from torchrl_ext.data.weights.shared import Place, differing, refuse_digests, shared, shared_in, tied_by_config
from torchrl_ext.data.weights.source import MappingSource
from torchrl_ext.data.weights.view import View

SIZE = 48


SHAPES = st.sampled_from([(SIZE,), (6, 8), (2, 4, 6), (3, 4, 4)])
TARGETS = SHAPES.flatmap(lambda shape: views_of(numbered(shape), boxes=True)).map(View.seen)
"""Views of a memory of `SIZE` elements that have each of their elements once."""


def placed(name, target):
    return "memory", Place(name, target, View.whole(target.sizes))


def elements(target):
    return {*target.of(torch.arange(SIZE)).flatten().tolist()}


@given(st.lists(TARGETS, max_size=5))
def test_shared_memory_is_found_exactly_for_overlapping_tensors(views):
    own = {str(index): view for index, view in enumerate(views)}
    found = {place.name for places in shared(placed(*one) for one in own.items()) for place in places}
    meeting = [pair for pair in itertools.combinations(own, 2) if elements(own[pair[0]]) & elements(own[pair[1]])]
    assert found == {name for pair in meeting for name in pair}


@given(st.lists(TARGETS, min_size=2, max_size=4), st.integers(0, 3), st.data())
def test_differing_finds_values_that_one_memory_cannot_hold(views, moved, data):
    memory = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    own = {str(index): view for index, view in enumerate(views)}
    tensors = {name: view.of(memory).reshape(-1).clone().view(view.sizes) for name, view in own.items()}
    one = tensors[str(moved % len(own))]
    if data.draw(st.booleans()):
        one.view(-1)[data.draw(st.integers(0, one.numel() - 1))] += 1
    holding = torch.zeros(SIZE)
    for name, view in own.items():
        view.of(holding).copy_(tensors[name])
    held = all(torch.equal(view.of(holding), tensors[name]) for name, view in own.items())
    groups = shared(placed(*one) for one in own.items())
    assert held == (not any(differing(places, tensors) for places in groups))


def test_what_a_worker_names_reaches_the_trainer_as_it_is():
    groups = shared([placed("a", View((2, 3), (3, 1), 1)), placed("b", View((4,), (1,)))])
    assert shared_in(json.loads(json.dumps({"shared": groups}))) == [list(group) for group in groups] != []
    assert shared_in({"shared": groups}) == [list(group) for group in groups]
    assert shared_in({}) == []


@pytest.mark.parametrize(("digests", "refused"), [({"a": "1", "b": "1"}, False), ({"a": "1", "b": "2"}, True)])
def test_digests_of_one_memory_have_to_be_equal(digests, refused):
    groups = shared([placed("a", View((4,), (1,))), placed("b", View((4,), (1,))), placed("c", View((4,), (1,), 2))])
    found = digests | {"c": "3"}  # which has other elements of it, too: its digest says nothing of theirs
    if refused:
        with pytest.raises(ManifestError, match="one memory for 'a' and 'b'"):
            refuse_digests(groups, found)
    else:
        refuse_digests(groups, found)
    refuse_digests(groups, {"a": digests["a"], "b": ""})


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, False),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({}, False),
    ],
)
def test_a_config_ties_the_head_to_the_embedding_of_its_shape(config, tied):
    class Source(MappingSource):
        def files(self):
            return {"config.json": json.dumps(config).encode()}

    names = {"lm_head.weight": (6, 4), "model.embed_tokens.weight": (6, 4), "model.embed_positions.weight": (3, 4)}
    found = tied_by_config(Source({name: torch.zeros(shape) for name, shape in names.items()}))
    expected = [{"lm_head.weight", "model.embed_tokens.weight"}] if tied else []
    assert [{place.name for place in places} for places in found] == expected
