"""The coefficients that come with the library; `torchrl_ext.planning.fits` says what each one multiplies.

Fitted on two shared x86-64 cores with torch's CPU build to one run each of the commands named here, with ``--json``;
the machine was busy with other work, which the spreads show. ``torchrl-ext plan --fit FILE...`` takes other runs.
"""

from __future__ import annotations

from types import MappingProxyType

from torchrl_ext.planning.fits import Coefficient, Fit

__all__ = ["FITTED"]

_TRANSPORT = "torchrl-ext bench transport"
_DELTA = "torchrl-ext bench delta"
_LANDING = "torchrl-ext bench landing"
_PAUSE = "torchrl-ext bench landing --engine vllm"

FITTED: Fit = MappingProxyType(
    {
        "control": Coefficient(value=0.02623, unit="s", spread=2.65, command=_PAUSE),
        "collective": Coefficient(value=6.95e-10, unit="s/byte", spread=1.9, command=_TRANSPORT),
        "collective_tensor": Coefficient(value=0.0001176, unit="s/tensor", spread=3.87, command=_TRANSPORT),
        "publish": Coefficient(value=2.666e-09, unit="s/byte", spread=2.46, command=_TRANSPORT),
        "threads": Coefficient(value=2, unit="threads", spread=1, command=_DELTA),
        "copy": Coefficient(value=1.999e-10, unit="s/byte", spread=1.22, command=_DELTA),
        "ulp_bits_place": Coefficient(value=1.052, unit="bit/bit", spread=1.04, command=_DELTA),
        "ulp_bits_step": Coefficient(value=1.704, unit="bit/change", spread=1.04, command=_DELTA),
        "ulp_encode_byte": Coefficient(value=3.468e-10, unit="s/byte", spread=1.18, command=_DELTA),
        "ulp_encode_change": Coefficient(value=8.413e-09, unit="s/change", spread=1.18, command=_DELTA),
        "context_bits_place": Coefficient(value=0.7678, unit="bit/bit", spread=1.07, command=_DELTA),
        "context_bits_step": Coefficient(value=1.054, unit="bit/change", spread=1.07, command=_DELTA),
        "context_encode_byte": Coefficient(value=6.04e-10, unit="s/byte", spread=1.2, command=_DELTA),
        "context_encode_change": Coefficient(value=1.518e-08, unit="s/change", spread=1.2, command=_DELTA),
        "xor_bits_place": Coefficient(value=2.034, unit="bit/bit", spread=1.01, command=_DELTA),
        "xor_bits_step": Coefficient(value=6.083, unit="bit/change", spread=1.01, command=_DELTA),
        "xor_encode_byte": Coefficient(value=5.233e-10, unit="s/byte", spread=1.22, command=_DELTA),
        "xor_encode_change": Coefficient(value=1.903e-08, unit="s/change", spread=1.22, command=_DELTA),
        "overwrite_bits_place": Coefficient(value=0.9405, unit="bit/bit", spread=1.02, command=_DELTA),
        "overwrite_bits_step": Coefficient(value=27.74, unit="bit/change", spread=1.02, command=_DELTA),
        "overwrite_encode_byte": Coefficient(value=5.981e-10, unit="s/byte", spread=1.14, command=_DELTA),
        "overwrite_encode_change": Coefficient(value=1.411e-08, unit="s/change", spread=1.14, command=_DELTA),
        "commit_once": Coefficient(value=0.01476, unit="s", spread=1.31, command=_LANDING),
        "commit_line": Coefficient(value=4.718e-09, unit="s/line", spread=1.31, command=_LANDING),
        "stage_once": Coefficient(value=0.01723, unit="s", spread=1.34, command=_LANDING),
        "stage_line": Coefficient(value=1.427e-08, unit="s/line", spread=1.34, command=_LANDING),
        "stage_change": Coefficient(value=9.075e-10, unit="s/change", spread=1.34, command=_LANDING),
        "reload": Coefficient(value=7.908e-10, unit="s/byte", spread=1.09, command=_LANDING),
        "load": Coefficient(value=1.194e-10, unit="s/byte", spread=1, command=_LANDING),
    }
)
