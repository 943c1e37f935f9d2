"""The trainer of the demonstration: GRPO from TorchRL on a task whose reward anyone can check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch.utils.data import DataLoader, Dataset
from torchrl.data import Composite, LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
from torchrl.envs import EnvBase, InitTracker, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import AutoTokenizer

from torchrl_ext.cli.demo.policy import read_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DigitsReward", "DigitsTask", "Trainer", "read_rollouts", "write_rollouts"]

_PROMPTS = (
    "Count to ten: ",
    "The version is ",
    "Pause and load ",
    "Next weights: ",
    "one two three ",
    "Engine follows ",
    "0 1 2 3 4 5 6 ",
    "The policy is ",
)
_AS_IT_IS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class DigitsReward(Transform):  # type: ignore[misc]  # torchrl has no types
    """Rewards a response with the share of its tokens that are made of digits, 0 to 1, and ends the dialog.

    Args:
        tokenizer: of `transformers`.
        vocabulary: number of token ids that the model knows, which may exceed the tokenizer's.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        super().__init__()
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        self._is_digit = torch.zeros(vocabulary, dtype=torch.bool)
        self._is_digit[[token for token, text in enumerate(texts) if text.strip().isdecimal()]] = True

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        responses = [row["tokens", "response"] for row in tensordict.unbind(0)]
        shares = torch.tensor([self._is_digit[tokens].float().mean().item() for tokens in responses])
        done = torch.ones(len(responses), 1, dtype=torch.bool)
        next_tensordict.set("reward", shares.view(-1, 1, 1))  # batch, tokens (one reward for all of them), value
        return next_tensordict.set("done", done).set("terminated", done.clone())

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


class DigitsTask:
    """The task of continuing a prompt with digits only.

    Args:
        tokenizer: of `transformers`.
        vocabulary: number of token ids that the model knows.
        group: continuations per prompt, whose rewards are compared with each other.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, *, group: int) -> None:
        self._tokenizer, self._vocabulary, self._group = tokenizer, vocabulary, group
        self.prompts: list[list[int]] = [tokenizer(prompt)["input_ids"] for prompt in _PROMPTS]
        self.turns = len(_PROMPTS) * group

    def env(self) -> EnvBase:
        """Make a chat environment of batch size ``(turns,)``: one dialog turn of every prompt, ``group`` times."""
        prompts = cast("Dataset[str]", _PROMPTS)  # torch takes any sequence, and does not say so
        loader = DataLoader(prompts, batch_size=1, collate_fn=lambda rows: TensorDict(query=rows, batch_size=[1]))
        env = ChatEnv.from_dataloader(
            loader,
            repeats=self._group,
            batch_size=(self.turns,),
            input_mode="text",
            tokenizer=self._tokenizer,
            template_kwargs={"chat_template": _AS_IT_IS},
        )
        return env.append_transform(DigitsReward(self._tokenizer, self._vocabulary)).append_transform(InitTracker())


def write_rollouts(path: Path, batch: TensorDictBase) -> None:
    """Write what `Trainer.step` needs of rollouts: every tensor, and the query of each, by which they are grouped."""
    rows = batch.reshape(-1).unbind(0)
    tensors = {
        json.dumps([number, key]): row.get(key).detach().clone(memory_format=torch.contiguous_format)
        for number, row in enumerate(rows)
        for key in row.keys(include_nested=True, leaves_only=True)
    }
    save_file(tensors, path, {"queries": json.dumps([row["query"] for row in rows])})


def read_rollouts(path: Path) -> TensorDictBase:
    """Return the rollouts that `write_rollouts` wrote, one after the other."""
    with safe_open(path, "pt") as file:
        rows = [TensorDict({"query": query}) for query in json.loads(file.metadata()["queries"])]
        for name in file.keys():  # noqa: SIM118 - it cannot be iterated over
            number, key = json.loads(name)
            rows[number].set(key if isinstance(key, str) else tuple(key), file.get_tensor(name))
    return lazy_stack(rows)


class Trainer:
    """Trains a causal LM on rollouts, by GRPO.

    Several ranks can train one model, sharded by FSDP2. All of them take the same steps on the same rollouts.

    Args:
        model_dir: Hugging Face checkpoint directory, where training starts.
        group: generations per prompt; rewards are compared within a group.
        learning_rate: of Adam.
        epochs: passes over each batch.
        seed: of the order of minibatches; the same on every rank.
        mesh: the ranks that share the model; None for this process alone.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        group: int,
        learning_rate: float = 1e-2,
        epochs: int = 2,
        seed: int = 0,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._model_dir, self._mesh = model_dir, mesh
        self.model: Any = read_model(model_dir)
        if mesh is not None:
            _shard(self.model, mesh)
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self.task = DigitsTask(self.tokenizer, self.model.get_input_embeddings().weight.shape[0], group=group)
        actor = TransformersWrapper(self.model, tokenizer=self.tokenizer, input_mode="tokens", generate=False)
        self._loss = GRPOLoss(actor, clip_epsilon=0.2, entropy_coeff=0.001, masking_strategy="sft")
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)
        self._group, self._epochs = group, epochs
        self._seed, self._steps = seed, 0

    def step(self, batch: TensorDictBase) -> tuple[float, float]:
        """Take policy-gradient steps on fresh rollouts; every rank calls this with the same ones.

        Args:
            batch: rollouts of an `LLMCollector`, those of each prompt together.

        Returns:
            Mean reward of the rollouts, mean loss.
        """
        self._steps += 1
        rollouts = batch.reshape(-1)
        buffer = ReplayBuffer(
            storage=LazyStackStorage(len(rollouts)),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(grpo_size=self._group),
            batch_size=len(rollouts) // 2,
        )
        buffer.extend(rollouts)
        losses = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed * 1_000_003 + self._steps)  # so every rank takes the same minibatches
            for _ in range(self._epochs):
                for minibatch in buffer:
                    out = self._loss(minibatch)
                    loss = out.loss_objective + out.loss_entropy
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    self._optimizer.step()
                    self._optimizer.zero_grad()
                    losses.append(loss.item())
        return rollouts["next", "reward"].mean().item(), sum(losses) / len(losses)

    def whole(self) -> Any:
        """Return the model in one piece: the live one, or a copy of one that is sharded; every rank calls this.

        On ranks other than 0 the copy is None.
        """
        if self._mesh is None:
            return self.model
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        tensors = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self._mesh.get_rank() != 0:
            return None
        model = read_model(self._model_dir)
        model.load_state_dict(tensors)
        return model


def _shard(model: Any, mesh: DeviceMesh) -> None:
    """Shard ``model`` by FSDP2: each decoder layer by itself, and what is left with the root."""
    from torch.distributed.fsdp import fully_shard

    layers = set(model._no_split_modules or ())
    for part in list(model.modules()):
        if type(part).__name__ in layers:
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
