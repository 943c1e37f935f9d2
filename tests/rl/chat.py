"""A chat environment, and an actor on an engine that plays in it."""

from __future__ import annotations

from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.envs.llm import ChatEnv

import torchrl_ext as tx
from tests.models import tiny_tokenizer


def as_batch(rows):
    return TensorDict(query=rows, batch_size=[1])


def make_env():
    """A chat of one turn, whose prompt is the text as it is."""
    return ChatEnv.from_dataloader(
        DataLoader(["the engine serves"] * 4, batch_size=1, collate_fn=as_batch),
        batch_size=(1,),
        input_mode="text",
        tokenizer=tiny_tokenizer(),
        template_kwargs={"chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}"},
    )


def make_remote_policy(url):
    """An actor that samples four tokens, always the likeliest, from the engine at ``url``."""
    greedy = {"max_new_tokens": 4, "do_sample": False, "ignore_eos": True}
    return tx.RemoteLLMPolicy(url, tokenizer=tiny_tokenizer(), input_mode="text", generate_kwargs=greedy)
