"""`torchrl-ext`, the command line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes the process's.

    Returns:
        0; 1 if the command found damage or a reason why an update would fail; 2 for invalid arguments; 3 if an engine
        or a transport failed; 4 if a file or a store failed; 130 after an interrupt. A line on standard error gives the
        reason; with ``--json``, so does a document with ``error`` and ``type`` on standard output.
    """
    try:
        from torchrl_ext.cli import frame
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(f"torchrl-ext needs {missing}: pip install 'torchrl_ext[cli]'", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    return frame.run(list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
