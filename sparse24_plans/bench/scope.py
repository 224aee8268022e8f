"""A record's contents, and the part of them that a run measures. Imports nothing that needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidProblemError
from ..gemm.kernel_table import ENTRIES
from ..vocab import ElementKind

LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LLAMA_70B = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
SHAPES = LLAMA_8B + LLAMA_70B
"""(M, K)."""
PREPARE_SHAPES = ((8192, 8192), (28672, 4096))
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PARTS = ("gemm", "epilogues", "variants", "prepare", "host")
ELEMENTS = (ElementKind.F32, ElementKind.F16, ElementKind.BF16, ElementKind.S8, ElementKind.FP8_E4M3)
BACKENDS = tuple(dict.fromkeys(entry.backend for entry in ENTRIES if not entry.on_host))
"""The backends that multiply on a GPU."""


@dataclass(frozen=True)
class Scope:
    """The part of a record that is measured. Raises InvalidProblemError for what no record has.

    ``backends``: the backends that are forced beside what selection chooses; none names all of them.
    """

    elements: Sequence[ElementKind] = (ElementKind.BF16,)
    tokens: Sequence[int] = TOKENS
    shapes: Sequence[tuple[int, int]] = SHAPES
    parts: Sequence[str] = PARTS
    backends: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, given, known in (
            ("element", self.elements, ELEMENTS),
            ("part", self.parts, PARTS),
            ("backend", self.backends, BACKENDS),
        ):
            for one in given:
                if one not in known:
                    raise InvalidProblemError(f"{name}: expected one of {', '.join(known)}, got {one}")
        for n in self.tokens:
            if not 0 < n <= TOKENS[-1]:
                raise InvalidProblemError(f"n: expected from 1 to {TOKENS[-1]}, got {n}")

    @property
    def prepare_shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple(shape for shape in PREPARE_SHAPES if shape in self.shapes)
