"""What runs the Python blocks of a page of documentation, in order and in one namespace, and what pages presuppose.

A page speaks of addresses, folders and names that its reader has. Here the addresses are those of embedded engines of a
tiny model (each address on a page is another engine), the folders are temporary ones, and the names are below. Nothing
else of a block is changed. What a block lacks otherwise is to be written on the page. A block whose last line is
``# SomeError: words ...`` has to end with this error and these words.

A comment before a block says how it runs:

``<!-- needs WHAT -->``
    It runs where that is: what needs Ray in a cluster of this machine, what needs torchrun on two ranks, and what needs
    TRL with stand-ins (`tests.test_pages`); the rest on real engines (`on_servers`, in ``tests/real_engines``).
``<!-- as in MODULE: NAME -->``
    It shows our own source, and is compared with that.

No plugin of pytest does this: sybil and pytest-markdown-docs run blocks in the process that collects
them, and know neither other addresses, nor blocks that await, nor a page on several ranks or on engines of a fixture.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import re
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from tests.forking import MODULES
from tests.processes import python

ROOT = Path(__file__).parents[1]
PAGES = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in path.read_text()
]
ADDRESS = re.compile(r"\b(?:\d+(?:\.\d+){3}|host\d?|engine\d|router):\d{4,5}\b")
FOLDERS = ("/shared", "/models/policy", "checkpoints/step-400")
_RAISES = re.compile(r"^# (?P<name>\w+Error): (?P<words>.*) \.\.\.\n\Z", re.MULTILINE)
_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n+)?```python\n(?P<code>.*?)```", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """One block; ``line`` is where its fence stands in the page."""

    code: str
    mark: str
    line: int

    @property
    def needs(self):
        """What it needs beside embedded engines; empty for most."""
        return self.mark.removeprefix("needs ") if self.mark.startswith("needs ") else ""

    @property
    def shows(self):
        """The module and the name whose source it shows; empty for most."""
        return self.mark.removeprefix("as in ").split(": ") if self.mark.startswith("as in ") else []


def blocks(page):
    text = Path(page).read_text()
    return [
        Block(code=found["code"], mark=found["mark"] or "", line=text.count("\n", 0, found.start("code")))
        for found in _BLOCK.finditer(text)
    ]


def on_servers(name, checkpoint, *urls, what=None, timeout_s=300):
    """Run, in a process of its own, the blocks of the page ``name`` that need ``what``, or anything at all."""
    python(
        "import sys; from tests.real_engines.served import with_routers; from tests.pages import run\n"
        "with_routers()\n"
        f"run(sys.argv[1], sys.argv[3:], sys.argv[2], plain=False, needing={what or True!r})",
        ROOT / "docs" / f"{name}.md",
        checkpoint,
        *urls,
        timeout_s=timeout_s,
    )


def run(page, urls, folder, *, plain=True, needing=False):
    """Run a page.

    Args:
        page: its path.
        urls: of engines, for its addresses in their order.
        folder: a checkpoint of the tiny model.
        plain: whether the blocks run that need no more than embedded engines.
        needing: whether the others do; or what those need that do.
    """
    wanted = (lambda block: block.needs == needing) if isinstance(needing, str) else (lambda block: needing)
    running = [block for block in blocks(page) if not block.shows and (wanted(block) if block.needs else plain)]
    if any(
        "MultiSyncCollector(" in block.code for block in running
    ):  # its workers are forked: no interpreter imports all again
        runpy.run_path(str(ROOT / "tests/real_engines/site/sitecustomize.py"))["fork_from_a_helper"](MODULES)
    addresses = list(dict.fromkeys(ADDRESS.findall("".join(block.code for block in running))))
    assert len(addresses) <= len(urls), f"{page} has addresses of {len(addresses)} engines"
    table = {address: url.removeprefix("http://") for address, url in zip(addresses, urls, strict=False)}
    with tempfile.TemporaryDirectory() as own:
        os.chdir(own)  # of a process that ends with the page
        shutil.copytree(folder, Path(own, "models/policy"))
        shutil.copytree(folder, Path(own, "checkpoints/step-400"))
        table |= {name: str(Path(own, name.lstrip("/"))) for name in FOLDERS}
        sys.argv = [str(page)]
        space = {"__name__": "__main__", **named(Path(page).stem, folder, needing)}
        with contextlib.closing(
            asyncio.new_event_loop()
        ) as loop:  # one for the page: what a block makes may live in it
            for block in running:
                lines = "\n" * block.line + block.code
                for name, here in table.items():
                    lines = lines.replace(name, here)
                _execute(lines, page, space, loop)


def _execute(source, page, space, loop):
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    expected = _RAISES.search(source)
    try:
        found = eval(code, space)
        if found is not None:  # the block awaits
            loop.run_until_complete(found)
    except Exception as error:
        if expected is None or type(error).__name__ != expected["name"] or not str(error).startswith(expected["words"]):
            raise
    else:
        assert expected is None, f"the block did not raise {expected['name']}"


# what pages presuppose


def named(page, folder, needing=False):
    """The names that the reader of ``page`` has: a causal LM and its tokenizer, and what the page says of others."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for one in messages %}{{ one['role'] + ': ' + one['content'] }}{% endfor %}assistant: "
    )
    policy, model, net = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(3))
    names = {"policy": policy, "model": model, "net": net, "tokenizer": tokenizer, "weights": policy.state_dict()}
    return names | (_on_ray if needing == "ray" else _MORE.get(page, dict))()


class _Collector:
    """What a sender tells of a new version."""

    def increment_version(self):
        pass


class _Bridge:
    """Megatron-Bridge, for a model of one rank that has Hugging Face names already."""

    def export_hf_weights(self, model, cpu, show_progress):
        yield from model.state_dict().items()


def _collectors():
    """An environment and a policy of TorchRL's common kind, and a chat environment whose dialogs end."""
    from transformers import AutoTokenizer

    from tests.rl.collecting import Walk, make_policy, train
    from torchrl_ext.cli.training import DigitsTask

    return {
        "make_env": Walk,
        "policy": make_policy(),
        "train": lambda policy, batch: train(policy, 1),
        "train_on": lambda batch: 0.0,
        "env": DigitsTask(AutoTokenizer.from_pretrained("models/policy"), 512, group=2).env(),
    }


def _on_ray():
    """What actors call is found by its name in a module; ``policy`` is the causal LM."""
    from torchrl.modules.llm.backends.vllm import LocalLLMWrapper

    from tests import models
    from tests.rl import collecting
    from tests.rl.chat import make_env
    from tests.sync.vllm_objects import LLM

    return {
        "make_policy": functools.partial(models.tiny_model, 0),
        "async_vllm": LocalLLMWrapper(LLM(models.tiny_model(1)), 1, "policy"),
        "make_env": make_env,
        "make_gym_env": collecting.Walk,
        "gym_policy": collecting.make_policy(),
        "my_ip": "127.0.0.1",
        "rollout": models.greedy,
        "prompts": models.PROMPT,
        "train_step": collecting.train,
    }


def _plan():
    """The plan of the page about owned engines, for engines that start in a second."""
    groups = [{"worker_type": "regular", "num_gpus": 1, "overrides": {"dtype": "float32", "threads": 1}}]
    models = [{"name": name, "server_groups": groups} for name in ("actor", "reward")]
    models[1]["update_weights"] = False
    Path("engines.yaml").write_text(json.dumps({"embedded": models}))  # YAML as well
    return {}


def _transports():
    from tests.models import tiny_model

    return {"bridge": _Bridge(), "rank": 0, "base": tiny_model(0)}


def _loop():
    return {"collector": [0, 1], "train_on": lambda batch: 0.0}


_MORE = {
    "README": _loop,
    "torchrl": _collectors,
    "quickstart": _loop,
    "migrate": lambda: {"collector": _Collector()},
    "start_engine": _plan,
    "transports": _transports,
}
