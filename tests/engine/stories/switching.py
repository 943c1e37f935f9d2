"""Online switching: an engine object takes other weights between requests, in the process that owns it.

Run by vLLM's interpreter as ``python -m torchrl_ext.cli.demo.stories.switching START OTHER WIDE SEEN``, it does so to
vLLM's own `AsyncLLM`, and writes what it saw to the file SEEN, as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import torchrl_ext as tx
from torchrl_ext.cli.demo.policy import MAX_TOKENS, greedy, read_model
from torchrl_ext.errors import DeadlineError, EngineError, WeightSyncError

if TYPE_CHECKING:
    from torchrl_ext.cli.demo.stage import Stage

__all__ = ["run"]

_LONG = 200
_RUNNING = 4
_LIMIT_S = 600.0
_PROMPT = (7, 300, 41, 5, 256, 99, 17, 3)
_MEGATRON = {r"decoder\.layers\.(\d+)\.pre_mlp_layernorm\.weight": r"model.layers.\1.post_attention_layernorm.weight"}

Generate = Callable[[int], Awaitable[list[int]]]
Note = Callable[[str, Any, Any], None]


def run(stage: Stage) -> None:
    """Switch an engine object's weights by path, by state dict and by layer; refuse what does not fit."""
    other = stage.other_model("other", seed=1)
    wide = stage.other_model("wide", seed=2, hidden_size=64)
    if stage.kind == "embedded":
        asyncio.run(_embedded(stage.model_dir, other, wide, stage.check))
    else:
        _beside(stage, other, wide)


def _beside(stage: Stage, other: str, wide: str) -> None:
    """Run this file with vLLM's interpreter, and take over what it saw."""
    from torchrl_ext.serving.engines.vllm import VLLMSpec
    from torchrl_ext.serving.processes import GuardedProcess

    spec, seen = VLLMSpec(stage.model_dir, **stage.environment), stage.folder / "seen.json"
    stage.say("starting vLLM's AsyncLLM in a process of its own")
    program = [str(spec.interpreter), "-m", __name__, stage.model_dir, other, wide, str(seen)]
    log = stage.folder / "vllm.log"
    with GuardedProcess(program, name="vLLM", environ=spec.variables(), log_path=log, plugin=True) as child:
        if not child.wait(_LIMIT_S):
            raise DeadlineError(
                f"vLLM did not end within {_LIMIT_S:g} s", state="it was ended", hint=child.log()[-2000:]
            )
        if not seen.exists():
            raise EngineError(f"vLLM ended: {child.errors() or child.log()[-2000:]}")
    for what, found, expected in json.loads(seen.read_text()):
        stage.check(what, found, expected)


async def switch(engine: Any, generate: Generate, start: str, other: str, wide: str, check: Note) -> None:
    """Switch the weights of one engine, and note what it says in between.

    Args:
        engine: an `InProcessEngine`.
        generate: continues the prompt greedily, by so many tokens.
        start: checkpoint that the engine serves.
        other: another one, of the same shapes.
        wide: one of other shapes.
        check: notes what was seen beside what was expected.
    """
    old, new = read_model(start), read_model(other)

    async def says(what: str, model: Any) -> None:
        check(f"{what}: its tokens are those of the weights", await generate(MAX_TOKENS), _greedy(model))

    await says("the start", old)
    await engine.update_model_weights(other)
    await says("by path", new)
    await engine.update_model_weights_from_state_dict(old.state_dict())
    await says("by state dict, and back", old)
    layer = {name: tensor for name, tensor in new.state_dict().items() if ".layers.1." in name}
    await engine.update_model_weights_from_state_dict(layer)
    mixed = read_model(start)
    mixed.load_state_dict({**mixed.state_dict(), **layer})
    await says("one layer, the rest stays", mixed)
    renamed = {f"decoder.layers.{i}.pre_mlp_layernorm.weight": torch.full_like(_norm(mixed, i), 1.5) for i in (0, 1)}
    await engine.update_model_weights_from_state_dict(renamed, mapper=_MEGATRON)
    for i in (0, 1):
        _norm(mixed, i).data.fill_(1.5)
    await says("under Megatron's names", mixed)
    for what, refused in (
        ("a name that nobody knows", engine.update_model_weights_from_state_dict({"nobody.knows": torch.ones(2)})),
        ("a checkpoint of another shape", engine.update_model_weights(wide)),
        ("a directory that is none", engine.update_model_weights(start + "-not-there")),
    ):
        check(f"{what} is refused", await _refused(refused), True)
    await says("after refusals", mixed)
    before = {future: None for future in [asyncio.ensure_future(generate(_LONG)) for _ in range(_RUNNING)]}
    reports = await asyncio.gather(*(engine.update_model_weights(path) for path in (other, start, other, start)))
    lengths = [len(await future) for future in before]
    check("requests under way lose no token over four switches", lengths, [_LONG] * _RUNNING)
    versions = sorted(report.version for report in reports)
    check("switches at the same time queue", versions, [*range(versions[0], versions[0] + 4)])
    check("every switch was verified", all(report.verified for report in reports), True)
    last = max(zip(reports, (new, old, new, old), strict=True), key=lambda pair: pair[0].version)
    await says("the last of them", last[1])


async def _refused(switching: Awaitable[Any]) -> bool:
    try:
        await switching
    except WeightSyncError:
        return True
    return False


def _greedy(model: Any) -> list[int]:
    return list(greedy(model, _PROMPT, MAX_TOKENS))


def _norm(model: Any, layer: int) -> torch.Tensor:
    tensor: torch.Tensor = model.model.layers[layer].post_attention_layernorm.weight
    return tensor


async def _embedded(start: str, other: str, wide: str, check: Note) -> None:
    from torchrl_ext.embedded.engine import Engine
    from torchrl_ext.embedded.protocol import GenerateRequest

    engine = Engine(start, dtype="float32")

    async def generate(count: int) -> list[int]:
        sampling = {"temperature": 0, "max_tokens": count, "ignore_eos": True}
        asked = GenerateRequest.from_json({"token_ids": list(_PROMPT), "sampling_params": sampling}, "request")
        (output,) = await asyncio.wrap_future(engine.scheduler.submit(asked).future)
        return list(output.token_ids)

    try:
        await switch(tx.make_engine("inprocess", engine=engine), generate, start, other, wide, check)
    finally:
        engine.close()


async def _vllm(start: str, other: str, wide: str, check: Note) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    settings = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True}
    arguments = AsyncEngineArgs(model=start, weight_transfer_config={"backend": "torchrl_ext"}, **settings)
    llm, numbers = AsyncLLM.from_engine_args(arguments), itertools.count()

    async def generate(count: int) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        async for out in llm.generate({"prompt_token_ids": list(_PROMPT)}, sampling, str(next(numbers))):
            last = out.outputs[0]
        return list(last.token_ids)

    try:
        await switch(tx.make_engine("inprocess", engine=llm), generate, start, other, wide, check)
    finally:
        llm.shutdown()


def _main(start: str, other: str, wide: str, path: str) -> None:
    seen: list[tuple[str, Any, Any]] = []
    asyncio.run(_vllm(start, other, wide, lambda *row: seen.append(row)))
    Path(path).write_text(json.dumps(seen))


if __name__ == "__main__":
    _main(*sys.argv[1:])
