"""How Megatron-Core lays out a decoder: which block of which checkpoint tensor each local tensor holds, by its name.

The layouts are those of Megatron-Core 0.8 to 0.19: ``transformer/attention.py`` (queries, keys and values, by group),
``transformer/mlp.py`` (gate above up, on each rank), ``transformer/moe/experts.py`` (experts, three ways), and
``transformer/transformer_layer.py`` (``get_transformer_layer_offset``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from torchrl_ext.errors import ConfigError
from torchrl_ext.sources.megatron.families import Architecture, Shape
from torchrl_ext.weights.shards.blocks import Block

__all__ = ["EMBEDDING", "Extra", "Origin", "Ranks", "Span", "layers_of", "origins"]

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

Extra = tuple[str, Shape, int | None]
"""Checkpoint name, full shape, and the dimension that tensor parallelism splits; None where every rank has it whole."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A rank's place in Megatron's parallel groups: a size, and which of them it is, for each kind.

    Attributes:
        tp, pp, ep, etp: ``(size, rank)`` of tensor, pipeline, expert and expert tensor parallelism.

    Raises:
        ConfigError: a rank that is not below its size.
    """

    tp: tuple[int, int] = (1, 0)
    pp: tuple[int, int] = (1, 0)
    ep: tuple[int, int] = (1, 0)
    etp: tuple[int, int] = (1, 0)

    def __post_init__(self) -> None:
        for kind, (size, rank) in vars(self).items():
            if not 0 <= rank < size:
                raise ConfigError(f"{kind}_rank is {rank} and {kind}_size {size}", expected="a rank below the size")


class Span(NamedTuple):
    """Rows or columns of a local tensor, and those of a checkpoint tensor that they are.

    Attributes:
        at: the first, in the local tensor.
        name: the checkpoint tensor.
        start, size: the first, in the checkpoint tensor, and how many; a size of 0 says that this rank has none.
    """

    at: int
    name: str
    start: int
    size: int


class Origin(NamedTuple):
    """What a local tensor, or one expert of those that are stacked in it, is in the checkpoint.

    Attributes:
        spans: along `axis`; each is whole in the other dimension.
        shape: of the local tensor, seen as the checkpoint has it.
        axis: the dimension that the spans divide.
        stack: of stacked experts, which of how many this is; each of them is transposed in the stack.
        held: the shape of the local tensor as it lies in memory.
    """

    spans: tuple[Span, ...]
    shape: Shape
    axis: int
    stack: tuple[int, int] | None
    held: Shape

    def cut(self, tensor: Tensor, span: Span) -> Tensor:
        """Return the elements of a span as the checkpoint has them: a view of the local tensor."""
        tensor = tensor.detach()
        if self.stack is not None:
            index, count = self.stack
            tensor = tensor.view(count, *self.shape[::-1])[index].t()
        return tensor.narrow(self.axis, span.at, span.size)

    def block(self, span: Span, full: Shape) -> Block:
        """Return where the elements of a span are in the checkpoint tensor, whose shape is ``full``."""
        start, stop = [0] * len(full), list(full)
        start[self.axis], stop[self.axis] = span.start, span.start + span.size
        return Block(tuple(start), tuple(stop))


def layers_of(count: int, pp: tuple[int, int], chunks: int, stages: Sequence[Any] | None) -> list[range]:
    """Return the layers of each of a pipeline stage's chunks, by their numbers in the model, from 0.

    Layers go round the stages once for each virtual stage: chunk 0 of every stage, then chunk 1 of every stage, ...

    Args:
        count: layers of the model.
        pp: number of stages, and which this is.
        chunks: model chunks (virtual stages) of a stage.
        stages: of each stage the number of its layers, or a list of those of its chunks; default: all have as many.

    Raises:
        ConfigError: the layers cannot be shared out so.
    """
    hint = "set `layers` to the number of layers of each stage, or of each of its chunks"
    size, rank = pp
    if stages is None:
        if count % (size * chunks):
            raise ConfigError(
                f"{count} layers cannot be shared evenly by {size} stages of {chunks} chunk(s)", hint=hint
            )
        stages = [count // size] * size
    shares = [[stage // chunks] * chunks if isinstance(stage, int) else list(stage) for stage in stages]
    uneven = any(isinstance(stage, int) and stage % chunks for stage in stages)
    if uneven or len(shares) != size or {len(share) for share in shares} != {chunks} or sum(map(sum, shares)) != count:
        raise ConfigError(
            f"layers={list(stages)} does not share {count} layers out to {size} stages of {chunks} chunk(s)", hint=hint
        )
    found, first = [], 0
    for chunk in range(chunks):
        for stage in range(size):
            if stage == rank:
                found.append(range(first, first + shares[stage][chunk]))
            first += shares[stage][chunk]
    return found


def origins(
    model: Architecture, ranks: Ranks, layers: Sequence[int], rows: int, extra: Mapping[str, Extra]
) -> dict[str, tuple[Origin, ...]]:
    """Return what the tensors of a model chunk are, by each of the names that Megatron may have for them.

    Args:
        model: the checkpoint.
        ranks: this rank's place.
        layers: the chunk's layers, by their numbers in the model.
        rows: how many rows of the (padded) vocabulary this rank has.
        extra: further tensors, by name; ``{layer}`` stands for the number of a layer, in the chunk and in the model.

    Raises:
        ConfigError: sizes that cannot be split so.
    """
    local = _Local(model, ranks)
    found = {
        EMBEDDING: local.vocabulary("model.embed_tokens.weight", rows),
        OUTPUT: local.vocabulary("model.embed_tokens.weight" if model.tied else "lm_head.weight", rows),
        "decoder.final_layernorm.weight": local.whole("model.norm.weight"),
    }
    for number, layer in enumerate(layers):
        for name, origin in local.layer(f"model.layers.{layer}.", layer in model.routed):
            found[f"decoder.layers.{number}.{name}"] = origin
        for name, (result, shape, axis) in extra.items():
            if "{layer}" in name:
                here, there = name.replace("{layer}", str(number)), result.replace("{layer}", str(layer))
                found[here] = local.split(there, axis, ranks.tp, shape)
    for name, (result, shape, axis) in extra.items():
        if "{layer}" not in name:
            found[name] = local.split(result, axis, ranks.tp, shape)
    return {name: origin for name, origin in found.items() if origin}


Found = tuple[Origin, ...]


class _Local:
    """The layout on one rank; what the checkpoint lacks (a bias, say) has no origins."""

    def __init__(self, model: Architecture, ranks: Ranks) -> None:
        self._model, self._ranks, self._shapes = model, ranks, model.shapes

    def layer(self, to: str, routed: bool) -> Iterator[tuple[str, Found]]:
        """Yield names in a layer with their origins; ``to`` is where the layer is in the checkpoint."""
        for name in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"):
            yield name, self.whole(f"{to}input_layernorm.weight")
        for name in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
            yield name, self.whole(f"{to}post_attention_layernorm.weight")
        for kind in ("weight", "bias"):
            yield f"self_attention.linear_qkv.{kind}", self._qkv(to, kind)
        yield "self_attention.linear_proj.weight", self.split(f"{to}self_attn.o_proj.weight", 1, self._ranks.tp)
        yield "self_attention.linear_proj.bias", self.whole(f"{to}self_attn.o_proj.bias")
        yield "self_attention.q_layernorm.weight", self.whole(f"{to}self_attn.q_norm.weight")
        yield "self_attention.k_layernorm.weight", self.whole(f"{to}self_attn.k_norm.weight")
        if not routed:
            yield from self._mlp("mlp", f"{to}mlp")
            return
        yield "mlp.router.weight", self.whole(f"{to}{self._model.block}.gate.weight")
        yield from self._experts(to)
        yield "mlp.shared_experts.gate_weight", self.whole(f"{to}mlp.shared_expert_gate.weight")
        yield from self._mlp("mlp.shared_experts", f"{to}mlp.shared_expert")

    def whole(self, name: str) -> Found:
        """Every rank has all of it."""
        return self.split(name, None, (1, 0))

    def split(self, name: str, axis: int | None, ranks: tuple[int, int], shape: Shape | None = None) -> Found:
        """Each rank has an equal part of a dimension, or where that is None the whole."""
        shape = self._shapes.get(name) if shape is None else shape
        if shape is None:
            return ()
        if axis is None:
            axis, ranks = 0, (1, 0)
        size = _part(name, shape[axis], ranks[0])
        return _one((Span(0, name, ranks[1] * size, size),), (*shape[:axis], size, *shape[axis + 1 :]), axis)

    def vocabulary(self, name: str, rows: int) -> Found:
        """Each rank has as many rows, the last of which are padding; ``rows`` too few are refused by their shape."""
        if name not in self._shapes:
            return ()
        (vocabulary, hidden), (size, rank) = self._shapes[name], self._ranks.tp
        rows = max(rows, -(-vocabulary // size))
        start = min(rank * rows, vocabulary)
        size = min(start + rows, vocabulary) - start
        return _one((Span(0, name, start, size),), (rows, hidden))

    def _mlp(self, name: str, to: str) -> Iterator[tuple[str, Found]]:
        tp = self._ranks.tp
        for kind in ("weight", "bias"):
            yield f"{name}.linear_fc1.{kind}", self._gate_and_up(f"{to}.gate_proj.{kind}", f"{to}.up_proj.{kind}", tp)
        yield f"{name}.linear_fc2.weight", self.split(f"{to}.down_proj.weight", 1, tp)
        yield f"{name}.linear_fc2.bias", self.whole(f"{to}.down_proj.bias")

    def _gate_and_up(self, gate: str, up: str, ranks: tuple[int, int]) -> Found:
        """A rank's rows of the gate, and below them its rows of the other."""
        if gate not in self._shapes:
            return ()
        rows, *rest = self._shapes[gate]
        size = _part(gate, rows, ranks[0])
        first = ranks[1] * size
        return _one((Span(0, gate, first, size), Span(size, up, first, size)), (2 * size, *rest))

    def _qkv(self, to: str, kind: str) -> Found:
        """Of each group its heads of queries, its head of keys and its head of values; ranks cut that evenly.

        With fewer groups than ranks a cut may go through a group, even through a head.
        """
        q, k, v = (f"{to}self_attn.{letter}_proj.{kind}" for letter in "qkv")
        if not {q, k, v} <= self._shapes.keys():
            return ()
        groups = self._model.groups
        head = self._shapes[k][0] // groups
        queries = self._model.heads // groups * head
        if [self._shapes[name][0] for name in (q, k, v)] != [groups * queries, groups * head, groups * head]:
            return ()  # gates beside the queries, say
        group = queries + 2 * head
        mine = _part(q, groups * group, self._ranks.tp[0])
        first, spans = self._ranks.tp[1] * mine, []
        for index in range(groups):
            fused = index * group
            for name, rows in ((q, queries), (k, head), (v, head)):
                start, stop = max(fused, first), min(fused + rows, first + mine)
                if start < stop:
                    spans.append(Span(start - first, name, index * rows + start - fused, stop - start))
                fused += rows
        held = {span.name for span in spans}
        spans += [Span(0, name, 0, 0) for name in (q, k, v) if name not in held]
        return _one(tuple(spans), (mine, *self._shapes[q][1:]))

    def _experts(self, to: str) -> Iterator[tuple[str, Found]]:
        size, rank = self._ranks.ep
        count = _part("the number of experts", self._model.experts, size)
        first, second = [], []
        for index in range(count):
            gate, up, down = (f"{to}{name}.weight" for name in self._model.expert(rank * count + index))
            ((rows,), (columns,)) = self._gate_and_up(gate, up, self._ranks.etp), self.split(down, 1, self._ranks.etp)
            for fc1, fc2 in (
                (f"local_experts.{index}.linear_fc1.weight", f"local_experts.{index}.linear_fc2.weight"),
                (f"linear_fc1.weight{index}", f"linear_fc2.weight{index}"),
            ):
                yield f"mlp.experts.{fc1}", (rows,)
                yield f"mlp.experts.{fc2}", (columns,)
            hidden, ffn = columns.shape
            first.append(rows._replace(stack=(index, count), held=(hidden, count * rows.shape[0])))
            second.append(columns._replace(stack=(index, count), held=(count * ffn, hidden)))
        yield "mlp.experts.weight1", tuple(first)
        yield "mlp.experts.weight2", tuple(second)


def _one(spans: tuple[Span, ...], shape: Shape, axis: int = 0) -> Found:
    return (Origin(spans, shape, axis, None, shape),)


def _part(what: str, size: int, parts: int) -> int:
    if size % parts:
        raise ConfigError(
            f"{what}: {size} cannot be split in {parts} equal parts",
            hint="pass the model's own config, and the parallel sizes that the trainer was started with",
        )
    return size // parts
