"""A plan's answers about itself: its kernel's identity, why it was chosen, whether it can run arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..errors import Sparse24Error
from ..vocab import ArchSku, ElementKind, EpilogueKind, Flag, Listed, Model, OpCategory, Size, Text
from .guarantee import PrecisionGuarantee


class KernelSku(Model):
    """Identity of the kernel behind a plan."""

    category: OpCategory
    """The kind of work: a product, pruning, packing."""
    op: Text
    """The op, such as ``gemm_sparse24_forward``."""
    element: ElementKind
    """Element of the weight."""
    aux_element: ElementKind
    """Element of the result."""
    layout: Text
    """Weight layout the kernel reads or writes: ``canonical``, or a packed ``layout_id``."""
    epilogue: EpilogueKind
    """The epilogue of a product; ``identity`` for other ops."""
    arch: ArchSku
    """The oldest architecture that the kernel is built for."""
    backend: Text
    """The name of the backend that launches the kernel."""
    kernel: Text
    """The name of the kernel entry, which ``explain`` lists and ``prefer_kernel`` takes."""
    precision_guarantee: PrecisionGuarantee
    """The kernel's promises about its numbers."""


class Explanation(Model):
    """The reason why a kernel was chosen, and why each other one was not."""

    device: Text
    """The device that the selection was for."""
    chosen: Text | None
    """Name of the chosen kernel; None if no kernel can serve."""
    details: Text
    """Description of how the chosen kernel cuts the problem, or why nobody can tell without the GPU. Empty
    for the host unless a plan explains itself."""
    workspace_size: Size | None
    """Bytes of workspace that a plan needs, or at most needs. None if no bound is known, and for the host
    unless a plan explains itself."""
    workspace_is_exact: Flag = False
    """Whether ``workspace_size`` is exact. A library tells its exact need on the GPU alone."""
    rows: Annotated[tuple[tuple[Text, Text, Text | None], ...], Listed]
    """(kernel, backend, reason why it can't serve or None) for every kernel, in order of preference."""

    def __str__(self) -> str:
        lines = [f"device: {self.device}", f"chosen: {self.chosen or 'none'}  {self.details}".rstrip()]
        for name, backend, reason in self.rows:
            state = (
                "chosen" if name == self.chosen else reason or "can serve; a kernel above it was preferred"
            )
            lines.append(f"  {name} ({backend}): {state}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Truthy if the plan can run the arguments. If not, ``error`` is what ``run`` would raise."""

    error: Sparse24Error | None = None

    def __bool__(self) -> bool:
        return self.error is None
