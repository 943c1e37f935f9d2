"""TRL's `AsyncGRPOTrainer` with our backend in place of its NCCL client; it runs where TRL and vLLM's packages are.

TRL pauses, gathers, streams and resumes by its own code; `Backend` is what the page has. Prompts and rewards are
made up, as in TRL's own test. Prints one line per update, and leaves the trained model in a folder.
"""

import json
import queue
import sys
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from tests.pages import ROOT, blocks


def backend_of(root):
    """The object of the page, which also prints its reports."""
    space = {}
    (block,) = [block for block in blocks(ROOT / "docs/migrate.md") if block.needs == "TRL"]
    exec(block.code.replace("/shared/updates", root), space)

    class Backend(space["Backend"]):
        def send_weights(self, iterator):
            super().send_weights(iterator)
            report = self.engine.last_report
            print(json.dumps({"proof": report.proof, "density": report.density}), flush=True)

    return Backend()


class Rollouts:
    """Made-up rollouts, a few per version."""

    def __init__(self):
        self.rollout_buffer, self.metrics_queue, self.version, self.made = queue.Queue(), queue.Queue(), 0, 0

    def fill(self):
        for _ in range(6):
            self.made += 1
            ids = np.random.default_rng(self.made).integers(3, 500, 12)
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[{"role": "user", "content": "0"}],
                    completion=[{"role": "assistant", "content": "1"}],
                    input_ids=ids,
                    completion_mask=np.array([0] * 4 + [1] * 8),
                    old_log_probs=np.array([0.0] * 4 + [-0.5] * 8, dtype=np.float32),
                    advantage=1.0 if self.made % 2 else -1.0,
                    model_version=self.version,
                    group_id=self.made // 3,
                    metrics={"reward": 1.0, "reward_std": 1.0},
                )
            )

    start = fill

    def update_model_version(self, version):
        self.version = version
        self.fill()

    def stop(self):
        pass

    def check_health(self, stale_after_s):
        pass


def attention(query, key, value, ends_q, ends_k, *_, softmax_scale, **__):
    """What TRL takes from a GPU's kernel: each stretch of queries attends to its keys, up to its own place."""
    found = torch.empty_like(query)
    for first, last, begin, end in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        q, k, v = (one.transpose(0, 1) for one in (query[first:last], key[begin:end], value[begin:end]))
        sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=softmax_scale, enable_gqa=True)
        found[first:last] = out.transpose(0, 1)
    return found


def main(url, checkpoint, root, trained):
    torch.set_num_threads(1)
    torch.cuda.get_device_name = lambda *_: "none"  # TRL asks it for the peak of a GPU, whatever the device
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    backend = backend_of(root)
    config = AsyncGRPOConfig(
        trained, learning_rate=1e-2, per_device_train_batch_size=2, gradient_accumulation_steps=1, max_steps=2,
        num_generations=3, token_budget=64, vllm_server_base_url=url, vllm_server_timeout=60.0, report_to="none",
        use_cpu=True, bf16=False, save_strategy="no", gradient_checkpointing=False,
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": "0"}]}] * 8  # the rollouts bring their own
    trainer = AsyncGRPOTrainer(
        model=checkpoint, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
        train_dataset=rows, rollout_worker=Rollouts(), weight_transfer=backend,
    )  # fmt: skip
    backend.trainer = trainer
    trainer.train()
    trainer.model.save_pretrained(trained)


if __name__ == "__main__":
    main(*sys.argv[1:])
