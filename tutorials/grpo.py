"""GRPO with TorchRL's GRPOTrainer, on rollouts of a running vLLM that follows by delta, disk or collective."""

import argparse
import tempfile

import torch
from tensordict import TensorDict, set_list_to_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
from torchrl.envs import InitTracker, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from torchrl.trainers.algorithms import GRPOTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchrl_ext as tx

PROMPTS = ["Count to ten: ", "The version is ", "Next weights: ", "one two three ", "0 1 2 3 4 5 6 ", "Dial "]
GROUP = 8  # answers per prompt; GRPO compares them with each other
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # the prompt as it is


class DigitsReward(Transform):
    """Reward an answer with the share of its characters that are digits, and end the dialog."""

    def _step(self, before, after):
        answers = [row["text", "response"] for row in before.unbind(0)]
        shares = [sum(map(str.isdigit, answer)) / max(len(answer), 1) for answer in answers]
        done = torch.ones(len(answers), 1, dtype=torch.bool)
        after.set("reward", torch.tensor(shares).view(-1, 1, 1))
        return after.set("done", done).set("terminated", done.clone())

    def transform_reward_spec(self, spec):
        spec["reward"] = Unbounded(shape=(*spec.shape, 1, 1))
        return spec


@set_list_to_stack(True)  # TorchRL's chat environments need it
def train(model_dir, engine, transport, *, steps=20, seed=0, lr=5e-3):
    """Train for some steps; returns the model, the mean reward of each batch, and the report of each update."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    turns, rewards, reports = GROUP * len(PROMPTS), [], []

    def show(report):
        if report.error is not None:
            return  # update_weights() raises it
        reports.append(report)
        row, sampled = report.engines[0], f"reward {rewards[-1]:.3f}" if rewards else "start weights"
        pause = "live" if row.commit == "live" else f"{1e3 * row.pause_s:.0f} ms paused"
        size, proof = f"{report.bytes:,} of {report.model_bytes:,} bytes", f"{row.proof} within {row.max_gap:.4f} nats"
        print(f"{sampled} | version {report.version}: {size}, {pause}, {proof}")

    def note(batch):
        rewards.append(batch["next", "reward"].mean().item())
        return batch

    data = DataLoader(PROMPTS, batch_size=1, collate_fn=lambda rows: TensorDict(query=rows, batch_size=[1]))
    own = {"chat_template": TEMPLATE}
    env = ChatEnv.from_dataloader(
        data, repeats=GROUP, batch_size=(turns,), tokenizer=tokenizer, input_mode="text", template_kwargs=own
    )
    env = env.append_transform(DigitsReward()).append_transform(InitTracker())
    storage, sampler, advantage = LazyStackStorage(turns), SamplerWithoutReplacement(), MCAdvantage(grpo_size=GROUP)
    actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
    sampling = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True}

    with tx.WeightSender(transport, tx.connect(engine), dtype=torch.bfloat16, verify="outputs") as sender:
        sender.register_model(model)
        sender.log_to(show)
        sender.update_weights()  # GRPOTrainer sends after a batch, so start equal
        policy = tx.RemoteLLMPolicy(
            engine, tokenizer=tokenizer, input_mode="text", generate_kwargs=sampling, seed=seed * 1_000_003
        )
        collector = LLMCollector(
            env, policy=policy, dialog_turns_per_batch=turns, total_dialog_turns=steps * turns, postproc=note
        )
        GRPOTrainer(
            collector=collector,
            total_frames=steps * turns,
            loss_module=GRPOLoss(actor, clip_epsilon=0.2, entropy_coeff=0.001, masking_strategy="sft"),
            optimizer=torch.optim.Adam(model.parameters(), lr=lr),
            # four optimizer steps per batch
            replay_buffer=ReplayBuffer(storage=storage, sampler=sampler, transform=advantage, batch_size=turns // 4),
            weight_sync_sender=sender,  # its update_weights() runs after each batch
            empty_replay_buffer_on_weight_update=True,
            progress_bar=False,
        ).train()
    return model, rewards, reports


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="policy", help="checkpoint directory")
    parser.add_argument("--engine", default="127.0.0.1:8000")
    parser.add_argument("--transport", default="delta", choices=["delta", "disk", "collective"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # trainer and engine share a few cores, and the model is tiny
    files = {} if args.transport == "collective" else {"root": tempfile.mkdtemp()}  # a directory that the engine sees
    transport = tx.make_transport(args.transport, **files)
    model, rewards, reports = train(args.model, args.engine, transport, steps=args.steps, seed=args.seed)
