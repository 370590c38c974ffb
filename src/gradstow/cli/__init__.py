"""The ``gradstow`` command. typer and rich are imported only in here, and only when a command runs."""

from __future__ import annotations

import io
import os
import sys

_QUIET = {
    # torch's profiler, which measures memory, writes notices of its own to stderr from C++
    "KINETO_LOG_LEVEL": "99",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 well, 1 refused or unequal, 2 bad input."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know "×", and a file's name may be no text
    try:
        from gradstow.cli._app import run
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        print(
            f"gradstow: the command line needs {error.name}, which is not installed. Run: pip install 'gradstow[cli]'",
            file=sys.stderr,
        )
        return 2
    return run(sys.argv[1:] if arguments is None else arguments)


__all__ = ["main"]
