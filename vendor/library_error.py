"""Errors that the ABIs of CUDA's libraries and driver raise."""

from __future__ import annotations


class LibraryError(Exception):
    """``call`` answered with a ``status`` other than success, which the library may call ``name``."""

    def __init__(self, call: str, status: int, name: str = "") -> None:
        super().__init__(f"{call} answered status {status}{f' ({name})' if name else ''}")
        self.call, self.status, self.name = call, status, name
