"""What a plan says of itself: its kernel's identity, why it was chosen, whether it can run some arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..errors import Sparse24Error
from ..vocab import ArchSku, ElementKind, EpilogueKind, Listed, Model, OpCategory, Size
from .guarantee import PrecisionGuarantee


class KernelSku(Model):
    """Identity of the kernel behind a plan."""

    category: OpCategory
    """What the kernel does."""
    op: str
    """Its op: ``gemm_sparse24_forward``."""
    element: ElementKind
    """Element of the weight."""
    aux_element: ElementKind
    """Element of the result."""
    layout: str
    """Weight layout the kernel reads or writes: ``canonical``, or a packed ``layout_id``."""
    epilogue: EpilogueKind
    """What follows the product."""
    arch: ArchSku
    """The oldest architecture that it is built for."""
    backend: str
    """What launches it."""
    precision_guarantee: PrecisionGuarantee
    """What it promises about its numbers."""


class Explanation(Model):
    """Why this kernel, and why not the others."""

    device: str
    """What the selection was for."""
    chosen: str | None
    """Name of the chosen row; None where nothing can serve."""
    details: str
    """Of a plan: how its kernel cuts the problem. Else empty."""
    workspace_size: Size | None
    """Of a plan: the bytes that it needs. Else None."""
    rows: Annotated[tuple[tuple[str, str, str | None], ...], Listed]
    """(kernel, backend, reason why it can't serve or None) for every row of the table, in order."""

    def __str__(self) -> str:
        lines = [f"device: {self.device}", f"chosen: {self.chosen or 'none'}  {self.details}".rstrip()]
        for name, backend, reason in self.rows:
            state = "chosen" if name == self.chosen else reason or "can serve; a row above it was preferred"
            lines.append(f"  {name} ({backend}): {state}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Truthy where the plan can run the arguments; else ``error`` is what ``run`` would raise."""

    error: Sparse24Error | None = None

    def __bool__(self) -> bool:
        return self.error is None
