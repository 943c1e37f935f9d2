"""Triton's compiler needs no device: every program becomes machine code here, whatever machine this is."""

import pytest

pytest.importorskip("triton", reason="triton is not installed (it is in the extra 'test' on Linux)")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchrl_ext.kernels import cuda_programs as triton_loops

HOPPER = GPUTarget("cuda", 90, 32)
BITS = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}
PROGRAMS = {
    "count_changes": ({"counts": "*i64"}, {}),
    "list_changes": ({"ends": "*i64", "places": "*i32"}, {}),
    "view_words": ({}, {"WIDTH", "DIMS", "LINEAR"}),
    "land": (
        {"positions": "*i32", "inside": "*i8", "offsets": "*i32"},
        {"WIDTH", "DIMS", "STEPS", "ORDERED", "LINEAR"},
    ),
    "write": ({"addresses": "*i64"}, {}),
    "read": ({"addresses": "*i64"}, {}),
}
NUMBERS = {"size": "i32", "offset": "i64", "dims": "*i64", "keys": "*i32", "out": "*i64"}


@pytest.mark.parametrize("width", (2, 8))
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_compiles_for_a_gpu(name, width, tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    types, settings = PROGRAMS[name]
    program = getattr(triton_loops, name)
    values = {"BLOCK": 1024, "WIDTH": width, "DIMS": 2, "STEPS": True, "ORDERED": True, "LINEAR": True}
    constants = {key: values[key] for key in {"BLOCK", *settings}}
    assert constants.keys() == {key for key in program.arg_names if key.isupper()}
    known = {**NUMBERS, **types, **dict.fromkeys(constants, "constexpr")}
    signature = {key: known.get(key, BITS[width]) for key in program.arg_names}
    source = ASTSource(
        fn=program,
        signature=signature,
        constexprs={(program.arg_names.index(key),): value for key, value in constants.items()},
    )
    assert triton.compile(source, target=HOPPER).asm["cubin"]
