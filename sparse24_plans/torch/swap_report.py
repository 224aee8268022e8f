"""The report of ``to_sparse24``: which layers were swapped, and which matrices stay dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..checkpoints.selection import dense_lines


@dataclass(frozen=True)
class SwappedLayer:
    """One layer that was swapped.

    ``kept_energy`` is the kept share of the weight's sum of squares; NaN for a weight on the meta device.
    ``was_sparse`` says that the weight was 2:4 already: nothing was pruned.
    """

    name: str
    m: int
    k: int
    dtype: torch.dtype
    kept_energy: float
    dense_bytes: int
    sparse_bytes: int
    padded_k: int
    was_sparse: bool = False


@dataclass(frozen=True)
class DenseMatrix:
    """A matrix, or a stack of them, that stays dense.

    ``nbytes`` is 0 for a parameter that another name was listed for before.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    reason: str


@dataclass(frozen=True)
class SwapReport:
    """The result of ``to_sparse24``: swapped ``layers``, and every matrix that was ``left_dense``.

    ``earlier`` maps the layers that were a Sparse24Linear before to the bytes of their dense weights.
    ``model_bytes`` are those of all parameters if every weight were dense; shared ones count once.
    """

    layers: tuple[SwappedLayer, ...]
    left_dense: tuple[DenseMatrix, ...] = ()
    earlier: Mapping[str, int] = field(default_factory=dict)
    model_bytes: int = 0

    @property
    def skipped(self) -> dict[str, str]:
        """The reasons why matrices stay dense, by the names of their layers, or of lone parameters."""
        return {one.name: one.reason for one in self.left_dense}

    @property
    def sparse_share(self) -> float:
        """The share of ``model_bytes`` that is 2:4 now."""
        return (self.dense_bytes + sum(self.earlier.values())) / max(self.model_bytes, 1)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the swapped weights before."""
        return sum(layer.dense_bytes for layer in self.layers)

    @property
    def sparse_bytes(self) -> int:
        """Bytes of the swapped weights after."""
        return sum(layer.sparse_bytes for layer in self.layers)

    @property
    def least_kept_energy(self) -> float:
        """The kept energy of the layer that lost most; 1 if nothing was swapped."""
        return min((layer.kept_energy for layer in self.layers), default=1.0)

    def __str__(self) -> str:
        lines = []
        for layer in self.layers:
            kept = "2:4 already" if layer.was_sparse else f"kept {layer.kept_energy:.1%} of the energy"
            lines.append(
                f"{layer.name}: [{layer.m}, {layer.k}] {str(layer.dtype).removeprefix('torch.')}, "
                f"{kept}, {layer.dense_bytes} -> {layer.sparse_bytes} bytes"
            )
        lines += dense_lines((one.name, one.nbytes, one.reason) for one in self.left_dense)
        if self.earlier:
            lines.append(f"{len(self.earlier)} layers were swapped before")
        lines.append(
            f"{len(self.layers)} layers swapped, {len(self.left_dense)} matrices left dense; "
            f"{self.dense_bytes} -> {self.sparse_bytes} bytes of weights; "
            f"{self.sparse_share:.1%} of the model's bytes is 2:4"
        )
        return "\n".join(lines)
