"""``Sparse24QuantizedLinear``: a linear layer whose weight is 2:4 in 8 bits, and whose input is quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidProblemError, UnsupportedError
from ..vocab import ElementKind, ScaleKind
from ..weights import quantize as quantize_weights
from .elements import DTYPE_OF, element_of
from .gemm_ops import SCALED_LINEAR
from .layer_state import VALUES_KEY, words_of
from .library import only_dispatches
from .linear import DTYPES, Sparse24Linear
from .prepare_ops import quantize_rows

_ops: Any = torch.ops.sparse24
LARGEST = {DTYPE_OF[element]: largest for element, largest in quantize_weights.LARGEST.items()}
"""The largest value of each dtype that a weight may be quantized to."""
SCALES = WEIGHT_SCALE, INPUT_SCALE = "weight_scale", "input_scale"
"""Keys of the scales in a state_dict, which are those of compressed-tensors' checkpoints."""
_PADDED_GROUP = 0x0404
"""A metadata word of two groups without non-zeros."""


def quantize(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """x / scale, rounded to nearest even and clamped to the range of ``dtype``, int8 or float8_e4m3fn.

    NaN stays NaN in float8_e4m3fn and is 0 in int8.
    """
    largest = LARGEST[dtype]
    scaled = (x.float() / scale).clamp(-largest, largest)
    return (scaled.round().nan_to_num(nan=0.0) if dtype == torch.int8 else scaled).to(dtype)


def scale_of(x: Tensor, dtype: torch.dtype, dim: int | None = -1) -> Tensor:
    """The float32 scale that maps the largest |x| to the largest value of ``dtype``, for each row or for all.

    It is at least 2^-100. A row with NaN or Inf has a scale of NaN or Inf, so that its results show it.
    """
    size = x.float().abs()
    if dim is None:
        most = size.amax() if size.numel() else size.new_zeros(())
    else:  # amax refuses an empty dimension, whose sum is 0
        most = size.amax(dim, keepdim=True) if size.shape[dim] else size.sum(dim, keepdim=True)
    return (most / LARGEST[dtype]).clamp(min=quantize_weights.MIN_SCALE)


def keeping_dtypes(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` on a tensor's bytes, for layers whose dtypes stay. It raises UnsupportedError for a new one."""

    def moved(tensor: Tensor) -> Tensor:
        found = fn(tensor.detach().contiguous().view(torch.uint8))
        if found.dtype != torch.uint8:
            raise UnsupportedError(f"dtype: a quantized layer keeps its dtypes, got {found.dtype}")
        return found.view(tensor.dtype)

    return moved


class Sparse24QuantizedLinear(Sparse24Linear):
    """``activation(x W^T + bias)`` with W [out_features, in_features] 2:4 in float8_e4m3fn or int8.

    W is ``weight_scale`` times what is stored. x is quantized to W's dtype at each call, with one scale for
    each token, or with the given ``input_scale``, in one pass on CUDA. The product's sums are
    scaled and biased in float32. The result has x's dtype unless ``out_dtype`` is given. Scales and bias stay
    float32, and ``to`` changes the device alone. The ``state_dict`` has ``weight.values24`` and
    ``weight.meta24``, ``weight_scale`` (float32 [M, 1] or [1]), ``input_scale`` ([1], if it is given) and
    ``bias``. ``dense_weight`` is float32, and ``plan`` is for x in bfloat16. The layer has no gradients. A
    new layer is zero.

    Parameters
    ----------
    in_features, out_features, bias, activation, require, preference, device
        Arguments of Sparse24Linear. W and x are padded with zeros to the next multiple of 16 columns.
    dtype : torch.dtype
        ``torch.float8_e4m3fn`` or ``torch.int8``.
    out_dtype : torch.dtype, optional
        bfloat16, float16 or float32; by default x's dtype.
    scales : str
        ``row``: each row of W has a scale. ``tensor``: W has one.
    static_input : bool
        Whether the layer has an ``input_scale``, 1.0 in a new layer.

    Raises InvalidProblemError naming the argument; UnsupportedError for other dtypes.
    """

    _K_STEP = 16
    _DTYPES = tuple(LARGEST)
    _SCALES: Mapping[str, str] = {name: name for name in SCALES}
    weight_scale: Tensor
    input_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        scales: str = "row",
        static_input: bool = False,
        device: Any = None,
        dtype: torch.dtype = torch.float8_e4m3fn,
        **options: Any,
    ) -> None:
        if options.get("trainable"):
            raise UnsupportedError(f"trainable: expected False, since {dtype} has no gradients, got True")
        if scales not in ("row", "tensor"):
            raise InvalidProblemError(f"scales: expected row or tensor, got {scales!r}")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype, **options)
        shape = (out_features, 1) if scales == "row" else (1,)
        f32 = {"dtype": torch.float32, "device": device}
        self.register_buffer(WEIGHT_SCALE, torch.ones(shape, **f32))
        self.register_buffer(INPUT_SCALE, torch.ones(1, **f32) if static_input else None)

    @classmethod
    def from_linear(  # type: ignore[override]
        cls,
        linear: nn.Linear,
        *,
        dtype: torch.dtype = torch.float8_e4m3fn,
        scales: str = "row",
        input_scale: float | None = None,
        method: str = "prune",
        scores: Tensor | None = None,
        **options: Any,
    ) -> Sparse24QuantizedLinear:
        """A layer with the pruned and quantized weight of ``linear``, which stays as it is.

        ``method``, ``scores`` and further options are those of ``Sparse24Linear.from_linear``. Without an
        ``input_scale`` each token of x has its own.
        """
        activation = options.get("activation", "none")
        pruned = {"rule": options.pop("rule")} if "rule" in options else {}
        sparse = Sparse24Linear.from_linear(
            linear, method=method, scores=scores, activation=activation, **pruned
        )
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            dtype=dtype,
            scales=scales,
            static_input=input_scale is not None,
            device=linear.weight.device,
            **options,
        )
        with torch.no_grad():
            values, meta = (one.detach() for one in sparse.canonical())
            scale = scale_of(values, dtype, -1 if scales == "row" else None).reshape(layer.weight_scale.shape)
            bias = None if sparse.bias is None else sparse.bias.detach().float()
            layer._hold(*layer.padded(quantize(values, dtype, scale), meta), bias)
            layer.weight_scale.copy_(scale)
            if layer.input_scale is not None:
                layer.input_scale.fill_(_checked_scale(input_scale))
        layer._follow(sparse)
        return layer

    def padded(self, values: Tensor, meta: Tensor) -> tuple[Tensor, Tensor]:
        """A canonical weight of fewer columns, with zeros up to the layer's."""
        columns = (self.k - 2 * values.shape[1]) // 8
        words = nn.functional.pad(meta.view(torch.int16), (0, columns), value=_PADDED_GROUP)
        wide = nn.functional.pad(values.view(torch.int8), (0, 4 * columns))
        return wide.view(values.dtype), words

    def form(self) -> dict[str, Any]:
        kind = "row" if self.weight_scale.dim() == 2 else "tensor"
        return {"scales": kind, "static_input": self.input_scale is not None}

    def _scaled(self, dense: Tensor) -> Tensor:
        return dense.float() * self.weight_scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Sparse24QuantizedLinear:
        super()._apply(keeping_dtypes(fn), recurse)
        return self

    def _clear(self) -> None:
        super()._clear()
        for scale in self._scales().values():
            scale.fill_(1.0)

    def _taken(self, key: str, given: Tensor, own: Tensor) -> Tensor:
        if key == VALUES_KEY and given.dtype != own.dtype:
            raise InvalidProblemError(f"{key}: expected {own.dtype}, got {given.dtype}")
        if key in SCALES and given.numel() == own.numel():  # checkpoints differ in dimensions of size 1
            return given.float().reshape(own.shape)
        return given

    def product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Compute what ``forward`` does, with the given bias [out_features] or none instead of the layer's.

        x is bfloat16, float16 or float32. Raises InvalidProblemError for another width or dtype, and
        UnsupportedError for an x that requires gradients.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError(
                "x: expected a tensor without gradients: a quantized layer has no backward; "
                "call the model in torch.no_grad()"
            )
        if x.dtype not in DTYPES:
            raise InvalidProblemError(f"x: expected one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
        self._check_width(x)  # another K may fill as many tiles
        # The dispatcher would take as long as everything else that the host does.
        alone = not torch.compiler.is_compiling() and only_dispatches(x, self._weight, bias, residual)
        rows, scale = self._quantized(x, alone)
        meta = None if self.metadata is None else words_of(self.metadata)
        m, activation, out_dtype, wishes, *_ = self._direct_options
        given = (
            rows, self._weight, meta, scale, self.weight_scale, bias, m, activation,
            out_dtype or x.dtype, wishes, residual,
        )  # fmt: skip
        y: Tensor = SCALED_LINEAR.kernel(*given) if alone else _ops.scaled_linear(*given)
        return y

    def _quantized(self, x: Tensor, alone: bool = False) -> tuple[Tensor, Tensor]:
        """x in 8 bits, padded like W, and its scales: by one kernel, or by operations that compile to one.

        ``alone`` says that the dispatcher has nothing to do.
        """
        dtype, scale = self._weight.dtype, self.input_scale
        if x.is_cuda and not torch.compiler.is_compiling():
            if alone:
                return quantize_rows(x, dtype, scale, x.shape[-1] + self._padding)
            rows, scales = _ops.quantize(x, dtype, scale, x.shape[-1] + self._padding)
            return rows, scales if scale is None else scale
        if scale is None:
            scale = scale_of(x, dtype)
        rows = quantize(x, dtype, scale)
        if self._padding:
            rows = nn.functional.pad(rows.view(torch.int8), (0, self._padding)).view(dtype)
        return rows, scale

    def _problem(self, n: int) -> dict[str, Any]:
        """The descriptor's fields for x in bfloat16."""
        return {
            **super()._problem(n),
            "out_element": element_of(self.out_dtype or torch.bfloat16, "out_dtype"),
            "bias_element": ElementKind.F32,
            "scale_x": ScaleKind.TENSOR if n == 1 or self.input_scale is not None else ScaleKind.ROW,
            "scale_w": ScaleKind.TENSOR if self.weight_scale.numel() == 1 else ScaleKind.ROW,
        }


def _checked_scale(scale: float | None) -> float:
    if not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise InvalidProblemError(f"input_scale: expected a number above 0, got {scale!r}")
    return float(scale)
