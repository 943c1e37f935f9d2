"""Which kinds of models are run, on which engine, by how many workers and in what form: a table of cells, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EVERY_TRANSPORT = ("disk", "delta", "collective", "ipc")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to run a kind.

    Attributes:
        engine: its make.
        kind: of `tests.kinds.KINDS`.
        parallel: workers and what they share, in words.
        quantisation: what the engine makes of the weights when it starts; "" for nothing. One of
            `tests.quantised.FORMS` stands for checkpoints, and updates, that are quantised already.
        dtype: of the trainer's weights and of the engine.
        settings: of the launcher; ``extra_args`` and ``environ`` among them.
        transports: by which updates come.
        refused: a regular expression for why updates are refused; "" where they are not.
        stays_paused: the rehearsal that showed it could not be undone: nothing is served any more.
        proofs: what its updates may prove.
        core: whether it is run without ``--exhaustive``.
    """

    engine: str
    kind: str
    parallel: str = "1"
    quantisation: str = ""
    dtype: str = "float32"
    settings: Mapping[str, object] = field(default_factory=dict)
    transports: Sequence[str] = EVERY_TRANSPORT
    refused: str = ""
    stays_paused: bool = False
    proofs: Sequence[str] = ("in place", "rehearsed")
    core: bool = False

    @property
    def name(self):
        """As ``vllm-mixtral-tp 2-fp8``."""
        parts = (self.engine, self.kind, self.parallel, self.quantisation, self.dtype)
        return "-".join(part for part in parts if part not in ("1", "float32", ""))


def vllm(kind, **fields):
    """A cell of vLLM."""
    return Cell(engine="vllm", kind=kind, **fields)


def sglang(kind, **fields):
    """A cell of SGLang."""
    return Cell(engine="sglang", kind=kind, **fields)


def by(**settings):
    """How two workers share a model, as `Cell` has it: ``by(tensor_parallel_size=2)``, ``by(flags=(...))``."""
    flags = settings.pop("flags", ())
    return {"settings": {**settings, **({"extra_args": flags} if flags else {})}}


TP_2 = {"parallel": "tp 2", **by(tensor_parallel_size=2)}
A_CORE_EACH = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # SGLang wants it told for more workers than there are NUMA nodes
NOT_AS_COLD = r"an update would leave \d+ layer\(s\) of this engine wrong: [^(]*\([^)]*\)"

CELLS = (
    vllm("qwen3-moe"),
    vllm("deepseek-v3"),
    vllm("qwen3-moe", **TP_2, core=True),
    vllm("mixtral"),
    vllm("qwen3"),
    vllm("qwen3-tied"),
    vllm("gemma3"),
    vllm("qwen3-moe", dtype="bfloat16"),
    vllm("mamba2", dtype="bfloat16"),
    vllm("deepseek-v3", **TP_2),
    vllm("mixtral", **TP_2),
    vllm("qwen3", parallel="dp 2", **by(flags=("--data-parallel-size", "2"))),
    vllm("qwen3", quantisation="fp8_per_channel", dtype="bfloat16", **by(flags=("--quantization", "fp8_per_channel"))),
    vllm("qwen3", quantisation="fp8 checkpoint", dtype="bfloat16"),
    vllm("qwen3", quantisation="int8 checkpoint", dtype="bfloat16", refused=NOT_AS_COLD, stays_paused=True),
    sglang("deepseek-v3", core=True),
    sglang("qwen3-moe", **TP_2, proofs=("in place",)),
    sglang("qwen3-moe"),
    sglang("mixtral"),
    sglang("qwen3-tied"),
    sglang("gemma3"),
    sglang("deepseek-v3", **TP_2),
    sglang("mixtral", **TP_2),
    sglang("qwen3-moe", parallel="ep 2", **by(tensor_parallel_size=2, flags=("--ep-size", "2"))),
    sglang(
        "qwen3",
        parallel="pp 2",
        **by(flags=("--pp-size", "2"), environ=A_CORE_EACH),
        refused=r"does not know engines with pipeline stages.*--pp-size 1",
    ),
    sglang(
        "qwen3-moe",
        parallel="ep 2, EPLB",
        **by(tensor_parallel_size=2, flags=("--ep-size", "2", "--enable-eplb")),
        refused=r"moves experts between its workers while it serves \(EPLB\)",
    ),
    sglang(
        "qwen3",
        parallel="dp 2",
        **by(flags=("--dp-size", "2"), environ=A_CORE_EACH),
        transports=("disk", "delta"),
    ),
)
