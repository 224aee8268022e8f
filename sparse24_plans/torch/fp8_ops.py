"""The op ``fp8_linear``: a product with a 2:4 weight whose result is fp8, for delayed scaling.

``scale_y`` multiplies the result before its rounding, and ``amax`` is raised to the largest magnitude before
it. The scale of the next step can then be computed without another pass over the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblemError
from .gemm_call import Call, check_devices, fake_result
from .gemm_dispatch import CheckedProduct, about, aligned
from .library import define
from .plan_cache import plans


class Fp8(NamedTuple):
    """The operands and options of a product with an fp8 result, in the order of the op's arguments."""

    x: Tensor
    weight: Tensor
    meta: Tensor | None
    scale_x: Tensor | None = None
    scale_w: Tensor | None = None
    scale_y: Tensor | None = None
    """float32, one element."""
    amax: Tensor | None = None
    """float32, one element, which is written."""
    bias: Tensor | None = None
    m: int | None = None
    activation: str = "none"
    out_dtype: torch.dtype | None = None
    """``float8_e4m3fn`` (default) or ``float8_e5m2``."""
    preference: str = ""

    @property
    def product(self) -> Call:
        """All but ``scale_y`` and ``amax``. Raises InvalidProblemError for these two."""
        for name in ("scale_y", "amax"):
            one = getattr(self, name)
            if one is not None and (one.dtype != torch.float32 or one.numel() != 1):
                raise InvalidProblemError(
                    f"{name}: expected one torch.float32, got {one.dtype} {list(one.shape)}"
                )
        check_devices(self, "scale_y", "amax")
        return Call(
            self.x,
            self.weight,
            self.meta,
            bias=self.bias,
            scale_x=self.scale_x,
            scale_w=self.scale_w,
            m=self.m,
            activation=self.activation,
            out_dtype=self.out_dtype or torch.float8_e4m3fn,
            preference=self.preference,
        )


def _fp8_linear(*args: Any, **kwargs: Any) -> Tensor:
    given = Fp8(*args, **kwargs)
    form = (Fp8, *(about(one) if isinstance(one, Tensor) else one for one in given))
    found = plans.get(form)
    if found is None:
        found = plans.keep(form, CheckedProduct(given.product, None, given.scale_y, given.amax))
    others = given.bias, given.scale_x, given.scale_w, given.scale_y, given.amax
    y: Tensor | None = found.run(given.x, given.weight, given.meta, others, None)
    return _fp8_linear(aligned(given.x, found.column_major), *given[1:]) if y is None else y


def _fake_fp8_linear(*args: Any, **kwargs: Any) -> Tensor:
    return fake_result(Fp8(*args, **kwargs).product)


define(
    "fp8_linear(Tensor x, Tensor weight, Tensor? meta, Tensor? scale_x=None, Tensor? scale_w=None, "
    "Tensor? scale_y=None, Tensor(a!)? amax=None, Tensor? bias=None, SymInt? m=None, "
    'str activation="none", ScalarType? out_dtype=None, str preference="") -> Tensor',
    _fp8_linear,
    _fake_fp8_linear,
)
