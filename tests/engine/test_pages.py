"""Blocks of the documentation that need real engines run as they are printed; `tests.pages` says what for."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from tests.engine.served import ServedSGLang, ServedVLLM, forked_children, spec_of
from tests.models import tiny_checkpoint
from tests.pages import ROOT, on_servers
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.serving.overlay import make_overlay, on_path
from torchrl_ext.serving.router import RouterProcess

pytestmark = pytest.mark.engine


def test_the_page_about_colocated_engines(vllm, checkpoint):
    on_servers("colocated", checkpoint, vllm.url)


def test_the_page_about_routers(vllm, second_vllm, checkpoint):
    with RouterProcess([vllm.url, second_vllm.url], **settings_for_router("vllm")) as router:
        on_servers("routers", checkpoint, router.url, vllm.url, second_vllm.url)


def test_the_page_about_lora(checkpoint, tmp_path):
    def serve(served):
        log = tmp_path / f"{served.kind}.log"
        return served.start(checkpoint, dtype="float32", max_model_len=256, lora_rank=16, log_path=log)

    with forked_children(), ThreadPoolExecutor(2) as pool, ExitStack() as ends:
        started = [pool.submit(serve, served) for served in (ServedVLLM, ServedSGLang)]
        urls = [ends.enter_context(future.result()).url for future in started]
        on_servers("lora", checkpoint, *urls)


ALL = """
import multiprocessing, sys
from tests.pages import run
try:
    run(sys.argv[1], (), sys.argv[2], needing=True)
finally:
    for child in multiprocessing.active_children():  # vLLM's engine, for which the interpreter would wait
        child.terminate()
"""


def test_the_page_about_switching_runs_in_the_process_that_has_vllm(tmp_path):
    """With all its blocks: what it makes of vLLM is what it switches."""
    checkpoint = tiny_checkpoint(tmp_path / "model", dtype=torch.bfloat16)  # what vLLM computes in by default
    overlay, spec = make_overlay(tmp_path / "overlay"), spec_of("vllm")
    done = subprocess.run(
        [spec.interpreter, "-c", ALL, ROOT / "docs/online_switching.md", checkpoint],
        cwd=ROOT,
        env={
            **os.environ,
            **spec.variables(),
            "PYTHONPATH": on_path(overlay),
            "VLLM_CPU_CI_ENV": "1",  # vLLM's own, for tests: it captures graphs and leaves out their compiler
        },
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
