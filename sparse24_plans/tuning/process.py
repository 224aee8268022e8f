"""Python processes of this very package, wherever the caller works."""

from __future__ import annotations

import sys
from pathlib import Path

_HOME = str(Path(__file__).parents[2])


def python_command(code: str) -> list[str]:
    """The command that runs ``code`` with this package at hand, and nothing of the working directory."""
    return [sys.executable, "-c", f"import sys; sys.path = [{_HOME!r}, *filter(None, sys.path)]; {code}"]
