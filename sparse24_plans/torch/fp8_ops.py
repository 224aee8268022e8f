"""The op ``fp8_linear``: a product with a 2:4 weight whose result is fp8, for delayed scaling.

``scale_y`` multiplies the result before its rounding, and ``amax`` is raised to the largest magnitude before
it. The scale of the next step can then be computed without another pass over the result. ``out_dtype`` is
``float8_e4m3fn`` (default) or ``float8_e5m2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidProblemError
from .gemm_call import Call, Kind, Operands, flat, scale_kind
from .product_op import ProductOp


@dataclass(frozen=True, eq=False)
class Fp8(Kind):
    """A product whose result is fp8."""

    scale_y: Tensor | None = None
    """float32, one element."""
    amax: Tensor | None = None
    """float32, one element, which is written."""

    def own_operands(self) -> Operands:
        return {"scale_y": self.scale_y, "amax": self.amax}

    def weight_count(self, call: Call) -> Any:
        for name, one in self.own_operands().items():
            if one is not None and (one.dtype != torch.float32 or one.numel() != 1):
                raise InvalidProblemError(
                    f"{name}: expected one torch.float32, got {one.dtype} {list(one.shape)}"
                )
        return super().weight_count(call)

    def fields(self, call: Call) -> dict[str, Any]:
        more = {"scale_y": scale_kind(self.scale_y), "amax": self.amax is not None}
        return {**super().fields(call), **more}

    def operands(self, call: Call) -> dict[str, Tensor | None]:
        return {**super().operands(call), "scale_y": flat(self.scale_y), "amax": flat(self.amax)}


def _with_fp8_result(call: Call) -> Call:
    return call if call.out_dtype is not None else call._replace(out_dtype=torch.float8_e4m3fn)


ProductOp(
    "fp8_linear(Tensor x, Tensor weight, Tensor? meta, Tensor? scale_x=None, Tensor? scale_w=None, "
    "Tensor? scale_y=None, Tensor(a!)? amax=None, Tensor? bias=None, SymInt? m=None, "
    'str activation="none", ScalarType? out_dtype=None, str preference="") -> Tensor',
    Fp8,
    _with_fp8_result,
).define()
