"""What an engine says of parameters that cannot land in its model: the same words whichever engine it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchrl_ext.errors import ConfigError, IntegrityError, ManifestError
from torchrl_ext.landing.placement import Placement
from torchrl_ext.types import ParamMeta, dtype_name
from torchrl_ext.weights.checkpoint import CheckpointSource

__all__ = [
    "UNCHANGED",
    "incomplete",
    "missing",
    "rebalanced",
    "refuse_other_shapes",
    "refuse_rounding",
    "refuse_unfinished",
    "shapes_of",
    "unknown",
    "unreadable",
]

UNCHANGED = "nothing was changed; the engine serves what it served"

_EVERY = "every parameter of the checkpoint that the engine was started with"


def shapes_of(checkpoint: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint that the engine was started with, where it is a local one; else none.

    Loaders of sharded layers narrow before they compare, and would let a larger tensor pass.
    """
    try:
        return {meta.name: meta.shape for meta in CheckpointSource(checkpoint).params()}
    except (ConfigError, IntegrityError):
        return {}


def refuse_other_shapes(params: Iterable[ParamMeta], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Hold parameters against `shapes_of`.

    Raises:
        ManifestError: names the first that has another shape.
    """
    for meta in params:
        expected = shapes.get(meta.name, meta.shape)
        if expected != meta.shape:
            raise ManifestError(
                f"parameter {meta.name!r} arrives with shape {list(meta.shape)}",
                expected=f"{list(expected)}, as in the checkpoint that the engine was started with",
                state=UNCHANGED,
            )


def refuse_rounding(placement: Placement) -> None:
    """Let no value change on its way into the model.

    Raises:
        ManifestError: names the first parameter that the engine would round.
    """
    for meta, landing in placement.lossy():
        raise ManifestError(
            f"parameter {meta.name!r} arrives as {dtype_name(meta.dtype)}, and the engine would round it",
            expected=f"{dtype_name(landing.dtype)}, in which the engine computes",
            state=UNCHANGED,
            hint=f"give WeightSender dtype=torch.{dtype_name(landing.dtype)}, or the engine another --dtype",
        )


def refuse_unfinished(names: Sequence[str]) -> None:
    """End no load that lacks some of its parameters.

    Args:
        names: those that were announced and did not come.

    Raises:
        IntegrityError: there are any.
    """
    if names:
        raise IntegrityError(
            f"{len(names)} of the parameters that were announced did not come, first {names[0]!r}",
            state="the model holds part of an update",
            hint="send the version again",
        )


def unknown(name: str) -> ManifestError:
    """No parameter of the model takes ``name``."""
    return ManifestError(
        f"the engine's model has no parameter {name!r}",
        expected="the names of the checkpoint that the engine was started with",
        state=UNCHANGED,
        hint="map the trainer's names with WeightSender(..., mapper=...)",
    )


def missing(name: str) -> ManifestError:
    """The checkpoint has ``name``, the update has not."""
    return ManifestError(f"parameter {name!r} is missing from the update", expected=_EVERY, state=UNCHANGED)


def incomplete(placement: Placement, param: str, numel: int) -> ManifestError:
    """The update would write fewer than the ``numel`` elements of runtime parameter ``param``."""
    sources = ", ".join(placement.sources(param)) or "no parameter of the update"
    return ManifestError(
        f"the update leaves parameter {param!r} of the engine's model incomplete: "
        f"{placement.written[param]} of {numel} elements, from {sources}",
        expected=_EVERY,
        state=UNCHANGED,
    )


def unreadable() -> ConfigError:
    """The engine cannot tell what it holds."""
    return ConfigError(
        "this engine cannot read its weights back, and they are not those that it was started with",
        hint="let the trainer send a full version first: leave base= out",
    )


def rebalanced() -> ConfigError:
    """Experts move between workers (EPLB)."""
    return ConfigError(
        "this engine moves experts between its workers while it serves (EPLB)",
        expected="an engine started without --enable-eplb",
        state=UNCHANGED,
        hint="where an expert's weights lie changes from step to step, so that no update could be proved",
    )
