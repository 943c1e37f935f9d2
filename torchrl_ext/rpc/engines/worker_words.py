"""What a worker of vLLM said, without what its executors put around it."""

from __future__ import annotations

import re

__all__ = ["unwrapped"]

_WRAPPING = re.compile(
    r"Call to \w+ method failed: "
    r"(?:Worker failed with error '(?=.*please check the stack))?"
    r"(?P<words>.*?)"
    r"(?:', please check the stack trace above for the root cause)?\.?$",
    re.DOTALL,
)


def unwrapped(words: str) -> str:
    """``words`` with the worker's own in place of the executor's sentence around them."""
    return _WRAPPING.sub(r"\g<words>", words)
