"""vLLM's own objects switch weights by direct calls, in the process that owns them and in vLLM's environment."""

import json
import os
import subprocess

import pytest

from tests.engine.served import spec_of
from tests.models import tiny_checkpoint
from torchrl_ext.serving.overlay import make_overlay, on_path

pytestmark = pytest.mark.engine

COMMON = """
import asyncio, json, sys
import torch

PROMPT = list(range(20, 44))
rows = {}

def load(path):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

def greedy(model, count=16):
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
                         min_new_tokens=count, eos_token_id=None, pad_token_id=2)
    return out[0, len(PROMPT):].tolist()

SETTINGS = dict(dtype="float32", max_model_len=256, enforce_eager=True)  # and none of our own
"""

OFFLINE = (
    COMMON
    + """
def main():
    from vllm import LLM, SamplingParams
    import torchrl_ext as tx

    start, other, root = sys.argv[1:]
    llm = LLM(start, weight_transfer_config={"backend": "nccl"}, **SETTINGS)
    engine = tx.make_engine("inprocess", engine=llm)
    greedily = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def says():
        (out,) = llm.generate([{"prompt_token_ids": PROMPT}], greedily, use_tqdm=False)
        return list(out.outputs[0].token_ids)

    rows["start"] = says() == greedy(load(start))
    for transport in ("disk", "delta", "ipc"):
        settings = {} if transport == "ipc" else {"root": root + transport}
        sender = tx.WeightSender(tx.make_transport(transport, **settings), engine, verify="outputs", max_gap=1e-4)
        for source in (other, start):
            model = load(source)
            rows[f"{transport} {source == start}"] = sender.update_weights(model).verified and says() == greedy(model)
        sender.shutdown()
    asyncio.run(engine.update_model_weights(other))
    rows["by path"] = says() == greedy(load(other))
    print("ROWS", json.dumps(rows))

if __name__ == "__main__":
    main()
"""
)

ONLINE = (
    COMMON
    + """
async def main():
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    import torchrl_ext as tx
    from torchrl_ext.proof.outputs import gaps
    from torchrl_ext.proof.scoring import score

    start, other, wide = sys.argv[1:]
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=start, **SETTINGS))
    engine = tx.make_engine("inprocess", engine=llm)
    numbers = iter(range(10**6))

    async def says(count=16, **sampling):
        wanted = SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **sampling})
        async for out in llm.generate({"prompt_token_ids": PROMPT}, wanted, str(next(numbers))):
            pass
        return out.outputs[0]

    async def tokens():
        return list((await says()).token_ids)

    async def refused(coroutine, *words):
        try:
            await coroutine
        except tx.WeightSyncError as error:
            return all(word in str(error) for word in words) or str(error)
        return "was not refused"

    old, new = load(start), load(other)
    await engine.update_model_weights(other)
    rows["by path"] = await tokens() == greedy(new)
    await engine.update_model_weights_from_state_dict(old.state_dict())
    rows["by state dict"] = await tokens() == greedy(old)
    prompts = ((3, 17, 42, 7), (5, 400, 31))
    rows["log-probabilities"] = gaps(score(old, prompts), await asyncio.to_thread(engine.logprobs, prompts))[0] < 1e-4
    layer = {name: tensor for name, tensor in new.state_dict().items() if ".layers.1." in name}
    await engine.update_model_weights_from_state_dict(layer)
    mixed = load(start)
    mixed.load_state_dict({**mixed.state_dict(), **layer})
    rows["one layer"] = await tokens() == greedy(mixed)
    strange = {"nobody.knows": torch.ones(2)}
    rows["strange name"] = await refused(engine.update_model_weights_from_state_dict(strange), "nobody.knows")
    rows["another model"] = await refused(engine.update_model_weights(wide), "shape")
    rows["no checkpoint"] = await refused(engine.update_model_weights(start + "-not-there"))
    rows["none of them changed it"] = await tokens() == greedy(mixed)

    norms = {f"decoder.layers.{i}.norm": torch.full((128,), 1.5) for i in (0, 1)}
    megatron = {r"decoder\\.layers\\.(\\d+)\\.norm": r"model.layers.\\1.post_attention_layernorm.weight"}
    await engine.update_model_weights_from_state_dict(norms, mapper=megatron)
    for block in mixed.model.layers:
        block.post_attention_layernorm.weight.data.fill_(1.5)
    rows["another framework's names"] = await tokens() == greedy(mixed)

    running = [asyncio.create_task(says(200, temperature=1.0, seed=seed)) for seed in range(8)]
    reports = await asyncio.gather(*(engine.update_model_weights(path) for path in (other, start, other)))
    outputs = [await task for task in running]
    rows["running ones complete"] = all(len(out.token_ids) == 200 for out in outputs)
    rows["updates queue"] = len({report.version for report in reports}) == 3
    rows["label"] = await llm.get_weight_version() == str(max(report.version for report in reports))
    rows["serves"] = await tokens() in (greedy(new), greedy(old))

    await llm.sleep(level=1)
    rows["asleep"] = await refused(engine.update_model_weights(start), "asleep")
    await llm.wake_up()
    await engine.update_model_weights(start)
    rows["awake"] = await tokens() == greedy(old)
    llm.shutdown()
    print("ROWS", json.dumps(rows))

if __name__ == "__main__":
    asyncio.run(main())
"""
)


def rows_of(script, tmp_path, *arguments):
    overlay, file, spec = make_overlay(tmp_path / "overlay"), tmp_path / "own.py", spec_of("vllm")
    file.write_text(script)
    done = subprocess.run(
        [spec.interpreter, file, *arguments],
        env={**os.environ, **spec.variables(), "PYTHONPATH": on_path(overlay)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    return read_rows(done)


def read_rows(done):
    rows = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
    assert rows, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(rows[0].removeprefix("ROWS "))


@pytest.fixture
def checkpoints(tmp_path):
    return [tiny_checkpoint(tmp_path / f"seed{seed}", seed) for seed in (0, 1)]


def test_an_llm_follows_a_sender_by_disk_delta_and_ipc_and_takes_a_path(tmp_path, checkpoints):
    rows = rows_of(OFFLINE, tmp_path, *checkpoints, tmp_path / "root-")
    assert len(rows) == 8 and all(found is True for found in rows.values()), rows


def test_an_async_llm_switches_between_and_within_requests_or_keeps_what_it_has(tmp_path, checkpoints):
    wide = tiny_checkpoint(tmp_path / "wide", 2, hidden_size=64)
    rows = rows_of(ONLINE, tmp_path, *checkpoints, wide)
    assert len(rows) == 15 and all(found is True for found in rows.values()), rows
