"""Packaging of torchrl_ext; tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "torchrl_ext" / "__init__.py").read_text())[1]
README = HERE / "README.md"

CLI = ["typer>=0.29", "rich>=13", "pyyaml>=6", "filelock>=3.12"]
EMBEDDED = ["transformers>=4.56", "starlette>=0.37", "uvicorn>=0.29"]
EXTRAS = {
    # For an engine's environment into which this package went with --no-deps; a plain installation has them.
    "cli": CLI,  # the command torchrl-ext, and topologies of engines in YAML
    "embedded": EMBEDDED,  # an engine of this package, for a transformers model
    "ray": ["ray>=2.40"],
    "hydra": ["hydra-core>=1.3"],
    "peft": ["peft>=0.14"],
    "nccl": ["nccl4py>=0.6", "cuda-bindings>=12"],  # NCCL without torch's watchdog; NCCL itself comes with torch
    "s3": ["s3fs>=2024.6"],
    "plot": ["matplotlib>=3.8"],
    "router": ["vllm-router>=0.1.17"],  # vLLM's; a job that starts its own routers needs it
    "vllm": ["vllm>=0.32"],  # a CUDA build; `torchrl-ext serve vllm` installs the CPU one by itself
    "sglang": ["sglang>=0.5.23"],  # likewise: `torchrl-ext serve sglang`
    "docs": ["sphinx>=7", "myst-nb>=1.2", "furo", "hydra-core>=1.3"],
    "lint": ["ruff>=0.6", "mypy>=1.13", "types-PyYAML", "build>=1.2", "towncrier>=24.8", "twine>=5"],
    "tutorials": ["nbclient>=0.10", "ipykernel>=6", "nbformat>=5", "matplotlib>=3.8"],
}
EXTRAS["testing"] = ["pytest>=8"]
EXTRAS["test"] = [
    *EXTRAS["testing"], "hypothesis>=6.100", *EXTRAS["peft"], *EXTRAS["s3"], *EXTRAS["hydra"], *EXTRAS["plot"],
    "pytest-timeout>=2.3", "pytest-xdist>=3.5", "pytest-cov>=5", "psutil>=5.9", "httpx>=0.27",
    "moto[server]>=5",
]  # fmt: skip

setup(
    name="torchrl_ext",
    version=VERSION,
    description="Weight synchronisation from TorchRL trainers to running inference engines, by interchangeable transports",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The torchrl_ext authors",
    license="MIT",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["torchrl_ext", "torchrl_ext.*"]),
    package_data={"torchrl_ext": ["__init__.pyi", "py.typed"]},
    python_requires=">=3.10",
    install_requires=[  # nothing here moves a version that an engine pins
        "torch>=2.6",
        "torchrl>=0.14,<0.16",  # some private names of it are used
        "tensordict>=0.14,<0.16",
        "numpy>=1.26",
        "safetensors>=0.4",
        "zstandard>=0.22",
        "xxhash>=3.4",
        "msgspec>=0.23",  # messages between processes are frozen structs, checked as they are read; before, two threads
        # that read one for the first time ended the process
        "numba>=0.60",  # compiled loops of the codecs; imported when a delta is first coded
        "aiohttp>=3.11",
        "yarl>=1.17",
        *CLI,
        *EMBEDDED,
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["torchrl-ext = torchrl_ext.cli.main:main"],
        "vllm.general_plugins": ["torchrl_ext = torchrl_ext.engines.vllm.register:register"],
        "sglang.srt.plugins": ["torchrl_ext = torchrl_ext.engines.sglang.register:register"],
        "pytest11": [
            "torchrl_ext.testing.engine.plugin = torchrl_ext.testing.engine.plugin"
        ],  # adds options to its runs
        "vllm.endpoint_plugins": ["torchrl_ext = torchrl_ext.engines.vllm.endpoint:UpdateFromDisk"],
    },
)
