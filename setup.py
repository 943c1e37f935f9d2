"""Packaging of torchrl_ext; tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "torchrl_ext" / "__init__.py").read_text())[1]
README = HERE / "README.md"

EXTRAS = {
    "ray": ["ray>=2.40"],
    "hydra": ["hydra-core>=1.3"],
    "peft": ["peft>=0.14"],
    "s3": ["s3fs>=2024.6"],
    # for torch without CUDA or with CUDA 12, and brings nothing but itself; with CUDA 13, install nixl-cu13 by its name.
    # The package `nixl` itself would bring both, with CUDA's libraries
    "nixl": ['nixl-cu12>=1.5; platform_system == "Linux"'],
    "router": ["vllm-router>=0.1.17"],  # else made in an environment of its own on first use
    "vllm": ["vllm>=0.31"],  # a CUDA build; `torchrl-ext serve vllm` installs the CPU one by itself
    "sglang": ["sglang>=0.5.19"],  # likewise: `torchrl-ext serve sglang`
    "docs": ["sphinx>=7", "myst-parser>=3", "furo", "hydra-core>=1.3"],
    "lint": ["ruff>=0.6", "mypy>=1.13", "types-PyYAML"],
    "tutorials": ["nbclient>=0.10", "ipykernel>=6", "nbformat>=5", "matplotlib>=3.8"],
}
EXTRAS["testing"] = ["pytest>=8"]
EXTRAS["test"] = [*EXTRAS["testing"], "pytest-timeout>=2.3", "pytest-xdist>=3.5", "psutil>=5.9", "moto[server]>=5"]
EXTRAS["test"] += ["httpx>=0.27", "pytest-cov>=5"]  # which tests run a line, for tests/mutants.py
EXTRAS["test"] += ['triton>=3.6; platform_system == "Linux"']  # its interpreter and compiler need no GPU
EXTRAS["test"] += ['nixl-cu12>=1.5; platform_system == "Linux" and platform_machine == "x86_64"']  # 69 MB
EXTRAS["test"] += [*EXTRAS["peft"], *EXTRAS["s3"], *EXTRAS["hydra"]]

setup(
    name="torchrl_ext",
    version=VERSION,
    description="Weight synchronisation from TorchRL trainers to running inference engines, by interchangeable transports",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["torchrl_ext", "torchrl_ext.*"]),
    package_data={"torchrl_ext": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "torchrl>=0.14",
        "tensordict>=0.14",
        "numpy",
        "safetensors>=0.4",
        "zstandard>=0.22",
        "xxhash>=3.4",
        "numba>=0.60",  # compiled loops of the codecs; imported when a delta is first coded
        "aiohttp>=3.11",
        "yarl",
        "certifi",
        "rich>=13",
        "transformers>=4.56",
        "starlette>=0.37",
        "uvicorn>=0.29",
        "filelock>=3.12",
        "pyyaml>=6",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["torchrl-ext = torchrl_ext.cli.main:main"],
        "vllm.general_plugins": ["torchrl_ext = torchrl_ext.plugins.vllm.register:register"],
        "sglang.srt.plugins": ["torchrl_ext = torchrl_ext.plugins.sglang.register:register"],
        "vllm.endpoint_plugins": ["torchrl_ext = torchrl_ext.plugins.vllm.endpoint:UpdateFromDisk"],
    },
)
