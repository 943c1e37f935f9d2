"""Programs that own vLLM's objects and switch their weights by direct calls; they run in vLLM's environment.

``python -m tests.real_engines.in_process NAME ARGUMENT...`` runs one of the functions below, which fails where an
engine says other tokens than the trainer.
"""

import asyncio
import sys

import torch

import torchrl_ext as tx
from tests.models import PROMPT, greedy, tiny_model

SETTINGS = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True}  # and none of our own


def sampling(count=16, **settings):
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **settings})


def follows(engine, tokens, transport, root):
    """A sender whose updates an engine has followed to another model and back; ``tokens`` asks it."""
    settings = {} if transport in ("collective", "ipc") else {"root": f"{root}/{transport}"}
    sender = tx.WeightSender(tx.make_transport(transport, **settings), engine)
    for seed in (1, 0):
        model = tiny_model(seed)
        assert sender.update_weights(model).verified and tokens() == greedy(model, count=16), (transport, seed)
    return sender


def offline(start, other, root):
    from vllm import LLM

    llm = LLM(start, weight_transfer_config={"backend": "nccl"}, **SETTINGS)
    engine = tx.make_engine("inprocess", engine=llm)

    def tokens():
        (out,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling(), use_tqdm=False)
        return list(out.outputs[0].token_ids)

    assert tokens() == greedy(tiny_model(0), count=16)
    for transport in ("disk", "delta", "ipc"):
        follows(engine, tokens, transport, root).shutdown()
    asyncio.run(engine.update_model_weights(other))
    assert tokens() == greedy(tiny_model(1), count=16)


async def switching(start, other, wide):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=start, **SETTINGS))
    engine = tx.make_engine("inprocess", engine=llm)
    numbers = iter(range(10**6))

    async def says(count=16, **settings):
        asked = llm.generate({"prompt_token_ids": PROMPT}, sampling(count, **settings), str(next(numbers)))
        return [out async for out in asked][-1].outputs[0]

    async def is_at(*models):
        return list((await says()).token_ids) in [greedy(model, count=16) for model in models]

    async def refuses(call, word=""):
        try:
            await call
        except tx.WeightSyncError as error:
            return word in str(error)
        return False

    old, new = tiny_model(0), tiny_model(1)
    await engine.update_model_weights(other)
    assert await is_at(new)
    await engine.update_model_weights_from_state_dict(old.state_dict())
    assert await is_at(old)

    layer = {name: tensor for name, tensor in new.state_dict().items() if ".layers.1." in name}
    await engine.update_model_weights_from_state_dict(layer)
    mixed = tiny_model(0)
    mixed.load_state_dict({**mixed.state_dict(), **layer})
    assert await is_at(mixed)
    strange = {"nobody.knows": torch.ones(2)}
    assert await refuses(engine.update_model_weights_from_state_dict(strange), "nobody.knows")
    assert await refuses(engine.update_model_weights(wide), "shape")
    assert await refuses(engine.update_model_weights(start + "-not-there"))
    assert await is_at(mixed)

    norms = {f"decoder.layers.{i}.norm": torch.full((128,), 1.5) for i in (0, 1)}  # as another framework names them
    await engine.update_model_weights_from_state_dict(
        norms, mapper=lambda name: name.replace("decoder", "model").replace("norm", "post_attention_layernorm.weight")
    )
    for block in mixed.model.layers:
        block.post_attention_layernorm.weight.data.fill_(1.5)
    assert await is_at(mixed)

    running = [asyncio.create_task(says(200, temperature=1.0, seed=seed)) for seed in range(8)]
    reports = await asyncio.gather(*(engine.update_model_weights(path) for path in (other, start, other)))
    assert all([len((await task).token_ids) == 200 for task in running])
    versions = {report.version for report in reports}
    assert len(versions) == 3 and await llm.get_weight_version() == str(max(versions))
    assert await is_at(new, old)

    await llm.sleep(level=1)
    assert await refuses(engine.update_model_weights(start), "asleep")
    await llm.wake_up()
    await engine.update_model_weights(start)
    assert await is_at(old)
    llm.shutdown()


def replicas(start, root, folder):
    """TorchRL's `AsyncVLLM`; ``folder`` is Ray's."""
    import ray
    from vllm import AsyncEngineArgs

    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder)
    from torchrl.modules.llm.backends.vllm import AsyncVLLM

    service = AsyncVLLM.launch(AsyncEngineArgs(model=start, compilation_config={"mode": 0}, **SETTINGS))
    (actor,) = service.actors

    def says(count=16, **settings):
        return actor.generate.remote(prompt_token_ids=PROMPT, sampling_params=sampling(count, **settings))

    def tokens():
        return list(ray.get(says()).outputs[0].token_ids)

    engine = tx.make_engine("ray", engine=service, load_timeout_s=120.0)
    assert tokens() == greedy(tiny_model(0), count=16)
    for transport in ("disk", "collective", "ipc"):
        running = [says(200, temperature=1.0, seed=seed) for seed in range(4)]
        sender = follows(engine, tokens, transport, root)
        assert all(len(out.outputs[0].token_ids) == 200 for out in ray.get(running))
        spans = ray.get(says()).outputs[0].weight_versions
        assert [span.version for span in spans] == [str(sender.version)]
        sender.shutdown()
    ray.shutdown()


def page(path, checkpoint):
    """Run the blocks of a page that are for a process with vLLM."""
    import multiprocessing

    from tests.pages import run

    try:
        run(path, (), checkpoint, plain=False, needing="vllm in this process")
    finally:
        for child in multiprocessing.active_children():  # vLLM's engine, for which the interpreter would wait
            child.terminate()


def online(*paths):
    asyncio.run(switching(*paths))


PROGRAMS = {"offline": offline, "online": online, "replicas": replicas, "page": page}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
