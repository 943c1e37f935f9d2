"""TorchRL's `AsyncVLLM` with real vLLM, Ray and TorchRL, in the environment of vLLM."""

import importlib.metadata
import os
import shutil
import subprocess
import tempfile

import pytest

from tests.engine.served import spec_of
from tests.engine.test_vllm_online import COMMON, read_rows
from tests.models import tiny_checkpoint
from torchrl_ext.serving.overlay import make_overlay, on_path

pytestmark = pytest.mark.engine
BESIDE = ("ray", "msgpack", "torchrl", "tensordict", "pyvers", "hoptorch", "importlib_metadata", "zipp", "orjson")

REPLICAS = (
    COMMON
    + """
def main():
    import ray
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=sys.argv[4])
    from torchrl.modules.llm.backends.vllm import AsyncVLLM
    from vllm import AsyncEngineArgs, SamplingParams
    import torchrl_ext as tx

    start, other, root = sys.argv[1:4]
    service = AsyncVLLM.launch(AsyncEngineArgs(model=start, compilation_config={"mode": 0}, **SETTINGS))
    (actor,) = service.actors

    def says(count=16, **sampling):
        wanted = SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **sampling})
        return actor.generate.remote(prompt_token_ids=PROMPT, sampling_params=wanted)

    def tokens():
        return list(ray.get(says()).outputs[0].token_ids)

    def versions(output):
        return [span.version for span in output.outputs[0].weight_versions]

    engine = tx.make_engine("ray", engine=service, load_timeout_s=120.0)
    models = {"other": load(other), "start": load(start)}
    rows["start"] = tokens() == greedy(models["start"])
    for transport in ("disk", "collective", "ipc"):
        settings = {"root": root} if transport == "disk" else {}
        sender = tx.WeightSender(tx.make_transport(transport, **settings), engine, verify="outputs", max_gap=1e-4)
        running = [says(200, temperature=1.0, seed=seed) for seed in range(4)]
        for name, model in models.items():
            rows[f"{transport} {name}"] = sender.update_weights(model).verified and tokens() == greedy(model)
        rows[f"{transport} keeps"] = all(len(out.outputs[0].token_ids) == 200 for out in ray.get(running))
        rows[f"{transport} labels"] = versions(ray.get(says())) == [str(sender.version)]
        sender.shutdown()
    ray.shutdown()
    print("ROWS", json.dumps(rows))

if __name__ == "__main__":
    main()
"""
)


def link_distributions(folder, names):
    """Link what this interpreter has of some distributions, for another one of the same version to import."""
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))


@pytest.fixture
def rays():
    """A folder with a short path: sockets have 107 characters."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_asyncvllm_says_what_the_trainer_says_by_each_transport(tmp_path, rays):
    pytest.importorskip("ray")
    spec, overlay, beside = spec_of("vllm"), make_overlay(tmp_path / "overlay"), tmp_path / "beside"
    beside.mkdir()
    link_distributions(beside, BESIDE)
    file = tmp_path / "own.py"
    file.write_text(REPLICAS)
    start, other = (tiny_checkpoint(tmp_path / f"seed{seed}", seed) for seed in (0, 1))
    environ = {**os.environ, **spec.variables(), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [spec.interpreter, file, start, other, tmp_path / "root", rays],
        env={**environ, "PYTHONPATH": os.pathsep.join([on_path(overlay), str(beside)])},
        capture_output=True,
        text=True,
        timeout=500,
    )
    rows = read_rows(done)
    assert len(rows) == 13 and all(found is True for found in rows.values()), rows
