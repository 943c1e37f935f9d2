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
        0; 1 where the command found damage, or that an update would fail; 2 for arguments that make no sense; 3 where
        an engine or a transport failed, 4 where a file or a store did; 130 after an interrupt. One line on standard
        error says why; with ``--json`` a document with ``error`` and ``type`` on standard output says it, too.
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
