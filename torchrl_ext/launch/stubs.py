"""Stand-ins for compiled packages that SGLang imports and that have no build for CPUs.

They are written into the environment that `torchrl_ext.launch.environments` makes, and nowhere else.
"""

from __future__ import annotations

__all__ = ["SGLANG_CPU_STUBS"]

_KERNELS = '''\
"""Stand-in for sgl_kernel, which is built for accelerators: anything can be imported from it, and nothing called."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no build for this CPU")

    missing.__name__ = missing.__qualname__ = name
    return missing
'''

_HOOK = '''\
"""torchvision registers its fakes for operators that only its compiled part defines, which this build lacks.

Their schemas are defined just before torchvision is imported; nobody calls them.
"""

import importlib.abc
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
kept = []  # a library's definitions go when it does


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in SCHEMAS:
                library.define(schema)
            kept.append(library)
        return None


sys.meta_path.insert(0, Finder())
'''

SGLANG_CPU_STUBS = {
    "sgl_kernel.py": _KERNELS,
    "torchrl_ext_vision_schemas.py": _HOOK,
    "torchrl_ext_vision_schemas.pth": "import torchrl_ext_vision_schemas\n",
}
"""Files for site-packages, by name."""
