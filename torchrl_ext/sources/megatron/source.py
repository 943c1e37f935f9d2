"""Weights of a Megatron-Core trainer, under the names of their Hugging Face checkpoint; Megatron is never imported."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.sources.megatron.chunks import Chunk, numbers_of, require_plain_values, tensors_of
from torchrl_ext.sources.megatron.families import Architecture, config_of
from torchrl_ext.sources.megatron.gather import gathered
from torchrl_ext.sources.megatron.layout import EMBEDDING, OUTPUT, Extra, Origin, Ranks, layers_of, origins
from torchrl_ext.types import ParamMeta, dtype_name
from torchrl_ext.weights.shards.blocks import Shard
from torchrl_ext.weights.source import WeightSource

__all__ = ["MegatronSource"]


class MegatronSource(WeightSource):
    """The part of a Megatron-Core trainer's checkpoint that this rank holds.

    `shards` yields views of the local tensors, without a gather or a copy. Iteration gathers, one full tensor at a
    time, over torch's default process group, for the transports that move whole tensors. Ranks with the same place in
    all groups (data and context parallel ones) hold the same blocks, and any of them may serve them.

    Args:
        model: this rank's part: a module or a mapping of Megatron's names to local tensors; or a list of these, one for
            each of its virtual pipeline stages. ``module.`` before names, ``_extra_state`` and the state of optimizers
            are left out.
        config: the Hugging Face config: a mapping, an object with attributes, a ``config.json``, or the folder of one.
        tp_size, tp_rank: tensor parallelism.
        pp_size, pp_rank: pipeline parallelism.
        ep_size, ep_rank: expert parallelism.
        etp_size, etp_rank: tensor parallelism of experts; default: as for the other layers, as in Megatron.
        layers: number of layers of each pipeline stage, or of each of its chunks as a list. Default: the layer numbers
            of Megatron's modules, or else an equal number on each stage.
        tied: whether the output layer is the embedding; default: as in the config.
        dtype: dtype in which tensors are sent; default: the dtype of the local tensors, which must agree.
        names: further tensors of the model: Megatron's name -> checkpoint name, full shape, and the dimension that
            tensor parallelism splits, or None where each rank has all of it. ``{layer}`` in both names stands for every
            layer.
        ignore: prefixes of the names, without ``module.``, of tensors that are not sent.

    Raises:
        ConfigError: transformers is missing or cannot build the config's model, the checkpoint has a tensor whose
            layout in Megatron is unknown (the message names it), the sizes do not fit, or modules store other values
            (``--apply-layernorm-1p``, interleaved gates).
        ManifestError: a local tensor is unknown, missing, or has another shape; the message names it.

    Example:
        >>> config = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 10,
        ...           "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
        >>> held = {"module.module.embedding.word_embeddings.weight": torch.zeros(6, 8)}
        >>> source = tx.MegatronSource(held, config, tp_size=2, tp_rank=1, pp_size=2, pp_rank=0, layers=[0, 2])
        >>> [(shard.meta.name, shard.block.start, shard.block.stop) for shard in source.shards()]
        [('model.embed_tokens.weight', (6, 0), (10, 8))]
        >>> len(source.params())
        25
    """

    def __init__(
        self,
        model: Chunk | Sequence[Chunk],
        config: Any,
        *,
        tp_size: int = 1,
        tp_rank: int = 0,
        pp_size: int = 1,
        pp_rank: int = 0,
        ep_size: int = 1,
        ep_rank: int = 0,
        etp_size: int | None = None,
        etp_rank: int | None = None,
        layers: Sequence[int | Sequence[int]] | None = None,
        tied: bool | None = None,
        dtype: torch.dtype | None = None,
        names: Mapping[str, Extra] | None = None,
        ignore: Sequence[str] = (),
    ) -> None:
        etp_size = tp_size if etp_size is None else etp_size
        if etp_rank is None:
            if etp_size not in (1, tp_size):
                raise ConfigError(f"etp_size is {etp_size}, but this rank's number is missing", hint="pass etp_rank")
            etp_rank = tp_rank if etp_size == tp_size else 0
        self._ranks = Ranks(
            tp=(tp_size, tp_rank), pp=(pp_size, pp_rank), ep=(ep_size, ep_rank), etp=(etp_size, etp_rank)
        )
        self._config, self._ignore = config, tuple(ignore)
        self._architecture = Architecture.of(config_of(config), tied)
        self._chunks = [model] if isinstance(model, (nn.Module, Mapping)) else list(model)
        self._names = dict(names or {})
        for chunk in self._chunks:
            require_plain_values(chunk)
        self._layers = self._layers_of_chunks(layers)
        shapes = self._all_shapes()
        self._require_layout(shapes)
        sent = self._dtype_of_tensors() if dtype is None else dtype
        self._params = tuple(ParamMeta(name, sent, shape) for name, shape in shapes.items())
        self._held()

    @classmethod
    def from_parallel_state(cls, model: Any, config: Any, parallel_state: Any, **more: Any) -> MegatronSource:
        """Return the source with the sizes and ranks of Megatron's parallel state.

        Args:
            model: this rank's part, as above.
            config: the Hugging Face config, as above.
            parallel_state: ``megatron.core.parallel_state``, or anything with its functions.
            more: further arguments of the constructor.

        Raises:
            ConfigError: the numbers of chunks and of virtual pipeline stages differ; or as above.
            ManifestError: as above.
        """

        def asked(what: str) -> int | None:
            ask = getattr(parallel_state, f"get_{what}", None)  # not every release has groups of experts
            return None if ask is None else ask()

        kinds = {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "etp": "expert_tensor"}
        for short, kind in kinds.items():
            size = asked(f"{kind}_parallel_world_size")
            if size:  # none, or 0, where there are no such groups
                more = {f"{short}_size": size, f"{short}_rank": asked(f"{kind}_parallel_rank")} | more
        chunks = 1 if isinstance(model, (nn.Module, Mapping)) else len(model)
        stages = asked("virtual_pipeline_model_parallel_world_size") or 1
        if chunks != stages:
            raise ConfigError(
                f"there are {chunks} model chunk(s), and {stages} virtual pipeline stage(s)",
                hint="pass the list of all chunks that this rank trains",
            )
        return cls(model, config, **more)

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def shards(self) -> Iterator[Shard]:
        held = self._held()
        for meta in self._params:
            yield from held.get(meta.name, ())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return gathered(self._params, self.shards)

    def tied(self) -> Mapping[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self._architecture.tied else {}

    def files(self) -> Mapping[str, bytes]:
        from torchrl_ext.weights.checkpoint import companion_files

        if isinstance(self._config, (str, os.PathLike)):
            path = Path(self._config)
            return companion_files(path if path.is_dir() else path.parent)
        text = getattr(self._config, "to_json_string", None)
        said = text() if callable(text) else json.dumps(dict(config_of(self._config)), indent=2, default=str)
        return {"config.json": said.encode()}

    def _require_layout(self, shapes: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of which some tensor has no place in Megatron's layout, on any rank."""
        found = origins(self._architecture, Ranks(), range(self._architecture.layers), 0, self._names)
        known = {span.name for several in found.values() for origin in several for span in origin.spans}
        unknown = [name for name in shapes if name not in known]
        if unknown:
            raise ConfigError(
                f"the layout of {unknown[0]!r} in Megatron is not known, nor of {len(unknown) - 1} other(s) of the "
                f"{len(shapes)} tensors of a {self._architecture.family} checkpoint",
                expected="a decoder with grouped queries and gated MLPs, as llama, mistral, mixtral, qwen2 and qwen3",
                hint="name the tensor with `names`; or derive a WeightSource, with `params`, `shards` and iteration",
            )

    def _all_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = dict(self._architecture.shapes)
        for name, (result, shape, axis) in self._names.items():
            each = range(self._architecture.layers) if "{layer}" in name else range(1)
            made = [result.replace("{layer}", str(layer)) for layer in each]
            if axis not in (None, *range(len(shape))) or not shape:
                raise ConfigError(f"names: {name!r} cannot be split along dimension {axis} of {list(shape)}")
            if len({*made, *shapes}) < len(made) + len(shapes):
                raise ConfigError(
                    f"names: {name!r} makes a {made[0]!r} that there is already",
                    expected="checkpoint names that nothing else has; {layer} in both names, or in neither",
                )
            shapes |= dict.fromkeys(made, tuple(shape))
        return shapes

    def _layers_of_chunks(self, layers: Sequence[Any] | None) -> list[range]:
        """Return the layers of each chunk: what Megatron's modules say, or else what the constructor was told."""
        said = [numbers_of(chunk) for chunk in self._chunks]
        if layers is None and any(said):
            found = [range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0) for numbers in said]
        else:
            found = layers_of(self._architecture.layers, self._ranks.pp, len(self._chunks), layers)
        for numbers, own in zip(said, found, strict=True):
            if numbers and (numbers != list(own) or own.stop > self._architecture.layers):
                raise ConfigError(
                    f"a chunk's modules are the layers {numbers} of the model, counted from 0",
                    expected=f"{list(own)}, of {self._architecture.layers} layers",
                    hint="check `layers`, which you can leave out if you pass modules, and the config",
                )
        return found

    def _dtype_of_tensors(self) -> torch.dtype:
        of = {tensor.dtype: name for chunk in self._chunks for name, tensor in tensors_of(chunk, self._ignore)}
        if len(of) != 1:
            several = ", ".join(f"{dtype_name(dtype)} ({name})" for dtype, name in of.items())
            raise ConfigError(
                f"the tensors of this rank are of several dtypes: {several}" if of else "this rank has no tensors",
                hint="set `dtype` to the checkpoint's dtype, the same on every rank",
            )
        return next(iter(of))

    def _held(self) -> dict[str, list[Shard]]:
        """Return what this rank holds of each parameter, by name.

        Raises:
            ManifestError: a local tensor that is not known, missing, or of another shape.
        """
        held: dict[str, list[Shard]] = {}
        metas = {meta.name: meta for meta in self._params}
        for chunk, layers in enumerate(self._layers):
            tensors = dict(tensors_of(self._chunks[chunk], self._ignore))
            table = [tensors[name] for name in (EMBEDDING, OUTPUT) if name in tensors and tensors[name].dim()]
            rows = table[0].shape[0] if table else 0
            known = origins(self._architecture, self._ranks, layers, rows, self._names)
            where = f"chunk {chunk} of pipeline stage {self._ranks.pp[1]}"
            for name, tensor in tensors.items():
                for origin in self._known(name, tensor, known, where):
                    made = dict[str, list[Shard]]()
                    for span in origin.spans:
                        shards, meta = made.setdefault(span.name, []), metas[span.name]
                        if span.size:
                            block = origin.block(span, meta.shape)
                            shards.append(Shard(meta, block, partial(origin.cut, tensor, span)))
                    twice = next((result for result in made if result in held), None)
                    if twice is None:
                        held |= made
                    elif twice != "model.embed_tokens.weight":  # tied, or kept again for other heads
                        raise ManifestError(
                            f"{name!r} in {where} is {twice!r}, which another tensor there is already",
                            expected="one tensor for each parameter",
                        )
            self._require(held, known, chunk, where)
        return held

    def _known(
        self, name: str, tensor: Tensor, known: Mapping[str, tuple[Origin, ...]], where: str
    ) -> tuple[Origin, ...]:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ManifestError(
                f"{name!r} in {where} is not a tensor of a {self._architecture.family} model with this config",
                expected=f"names such as {near[0]!r}" if near else None,
                hint="check the config and the parallel sizes; use `names` for additional tensors of the checkpoint, "
                "and `ignore` for tensors that are not sent",
            )
        if known[name] and tuple(tensor.shape) != known[name][0].held:
            raise ManifestError(
                f"{name!r} in {where} has the shape {list(tensor.shape)}",
                expected=f"{list(known[name][0].held)} on rank "
                + ", ".join(f"{rank} of {size} ({kind})" for kind, (size, rank) in vars(self._ranks).items()),
                hint="check the config and the parallel sizes",
            )
        return known[name]

    def _require(
        self, held: Mapping[str, Any], known: Mapping[str, tuple[Origin, ...]], chunk: int, where: str
    ) -> None:
        """Refuse a chunk that lacks what it has to have, by the checkpoint names that it could be."""
        (stages, stage), layers = self._ranks.pp, self._layers[chunk]
        last = stage == stages - 1 and chunk == len(self._layers) - 1
        for name, found in known.items():
            if name == EMBEDDING:
                needed = stage == chunk == 0
            elif name == OUTPUT:
                needed = last and not self._architecture.tied
            elif name == "decoder.final_layernorm.weight":  # in some layouts of pipelines it is not in the last stage
                needed = last and self._architecture.layers - 1 in layers
            else:
                needed = name not in self._names
            lacking = next((span.name for origin in found for span in origin.spans if span.name not in held), None)
            if needed and lacking is not None:
                could = [
                    repr(other)
                    for other, several in known.items()
                    if any(lacking == span.name for origin in several for span in origin.spans)
                ]
                raise ManifestError(
                    f"{where} has no {' nor '.join(could)}, of which {lacking!r} would be made",
                    hint="check the config (`tied` for an output layer) and how layers are distributed (`layers`)",
                )
