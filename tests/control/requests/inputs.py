"""Prompts for a policy, in each form that TorchRL knows."""

import torch
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

PROMPTS = ["the trainer sends", "a version"]
TEMPLATE = {"history": {"chat_template_name": "chatml_format"}, "text": {}, "tokens": {}}


def prompts(mode, tokenizer, *, padded=False, texts=PROMPTS):
    """A batch for input mode ``mode``; in tokens mode left-padded or a lazy stack of ragged tensors."""
    size = [len(texts)]
    if mode == "text":
        return TensorDict({"text": Text(prompt=list(texts), batch_size=size)}, batch_size=size)
    if mode == "history":
        chats = History.from_chats([[{"role": "user", "content": text}] for text in texts])
        return TensorDict({"history": ChatHistory(prompt=chats, batch_size=size)}, batch_size=size)
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    if padded:
        pad = tokenizer.pad_token_id
        ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad, padding_side="left")
    rows = [TensorDict({"tokens": Tokens(prompt=one)}, batch_size=[]) for one in ids]
    return TensorDict.lazy_stack(rows, 0)


def leaves(data):
    """Every tensor of ``data``, one per sequence: {key: [tensors]}."""
    rows = data.reshape(-1).unbind(0)
    keys = {key for row in rows for key in row.keys(include_nested=True, leaves_only=True)}
    found = {key: [row.get(key) for row in rows] for key in keys}
    return {key: values for key, values in found.items() if all(isinstance(value, torch.Tensor) for value in values)}
