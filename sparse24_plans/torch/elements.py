"""Translates between PyTorch and the package: dtypes, devices, streams, and weights as tensors.

A weight W [M, K] has one of two forms. The canonical form is ``weight`` [M, K/2] in the element's dtype and
``meta`` [M, K/8] in int16 or uint16; its words are below 2^12, so both dtypes mean the same. The packed form
is ``weight`` alone, the tiles of weights/packing.py as [Mt, Kt, tile bytes / itemsize] in the element's
dtype. It doesn't tell M, so ops take ``m`` beside it. A quantized weight has the dtype of its stored values;
``scales`` stand beside its canonical form, and in the tiles of its packed form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.dlpack

from ..device.tensors import TensorView
from ..errors import InvalidProblemError, UnsupportedError, shown
from ..vocab import ElementKind
from ..weights.packed_layouts import Quantization, TileLayout, layout_of, quantized_tiles
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import PackedWeight, Sparse24Weight

DTYPE_OF = {
    ElementKind.F32: torch.float32,
    ElementKind.F16: torch.float16,
    ElementKind.BF16: torch.bfloat16,
    ElementKind.S8: torch.int8,
    ElementKind.U8: torch.uint8,
    ElementKind.FP8_E4M3: torch.float8_e4m3fn,
    ElementKind.FP8_E5M2: torch.float8_e5m2,
    ElementKind.I32: torch.int32,
}
_ELEMENT_OF = {dtype: element for element, dtype in DTYPE_OF.items()}
STORED_OF = {
    torch.uint8: ElementKind.S4,
    torch.int8: ElementKind.S8,
    torch.float8_e4m3fn: ElementKind.FP8_E4M3,
}
"""The elements that a quantized weight stores, by the dtype of its values. Two of ``s4`` are in a byte."""
META_DTYPES = (torch.int16, torch.uint16)


def element_of(dtype: torch.dtype, argument: str) -> ElementKind:
    """The element of a dtype. Raises InvalidProblemError for a dtype that no operand has."""
    if dtype not in _ELEMENT_OF:
        names = ", ".join(str(known) for known in _ELEMENT_OF)
        raise InvalidProblemError(f"{argument}: expected one of {names}, got {dtype}")
    return _ELEMENT_OF[dtype]


def device_of(device: Any) -> torch.device:
    """The device that an argument names; PyTorch's default for None.

    Raises InvalidProblemError for what is no device, and for one that PyTorch doesn't find.
    """
    try:
        return torch.empty(0, device=device).device
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise InvalidProblemError(
            f"device: expected one that PyTorch finds, such as cpu or cuda:0, got {shown(device)}: {why:.200}"
        ) from error


def plan_device(tensor: torch.Tensor) -> int | str:
    """The tensor's device as an argument of ``select``. Raises UnsupportedError unless it is cpu or cuda."""
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device: expected cpu or cuda, got {device}")
    return "host" if device.type == "cpu" else device.index


_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(ordinal: int) -> int:
    """The handle of PyTorch's current stream on a CUDA device; 0 for ordinal -1, the host."""
    if ordinal < 0:
        return 0
    if _raw_stream is not None:
        return int(_raw_stream(ordinal))
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


def stream_getter(ordinal: int) -> Callable[[], int]:
    """A function that returns :func:`current_stream` of the device at the least host cost."""
    if ordinal < 0 or _raw_stream is None:
        return partial(current_stream, ordinal)
    return partial(_raw_stream, ordinal)


_empty_on_current: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def allocation(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A function that makes uninitialised contiguous tensors at the least host cost."""
    strides = torch.empty(shape, device="meta").stride()
    general = partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    if device.type != "cuda" or _empty_on_current is None or _current_device is None:
        return general
    ordinal = device.index

    def empty() -> torch.Tensor:
        """Allocate past the dispatcher, which works on the current device alone."""
        if _current_device() != ordinal:
            return general()
        found: torch.Tensor = _empty_on_current(shape, strides, dtype)
        return found

    return empty


def in_dtype(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The result rounded to nearest, ties to even, and clamped to the range of an integer dtype."""
    if result.dtype == dtype:
        return result
    if dtype.is_floating_point:
        return result.to(dtype)
    limits = torch.iinfo(dtype)
    rounded = result.round() if result.is_floating_point() else result
    return rounded.clamp(limits.min, limits.max).to(dtype)


def host_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's bytes as a NumPy array, in its own memory if it is contiguous and on the host."""
    return tensor.detach().cpu().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


# Weights ------------------------------------------------------------------------------------------


def stored_form(by: Quantization, element: ElementKind) -> dict[str, Any]:
    """The arguments of a module that stores its values by ``by`` and multiplies them as ``element``."""
    scale_dtype = DTYPE_OF[by.scale_element]
    return {"stored": by.element, "group": by.group, "scale_dtype": scale_dtype, "dtype": DTYPE_OF[element]}


def weight_sizes(
    weight: torch.Tensor,
    meta: torch.Tensor | None,
    m: int | None,
    k: int | None,
    by: Quantization | None = None,
) -> tuple[int, int]:
    """M and K of a weight in either form. ``m`` and ``k`` are the caller's values, or None.

    ``by`` says how the weight is quantized. Raises InvalidProblemError if shapes, dtypes or devices don't fit
    together.
    """
    if meta is None:
        return _packed_sizes(weight, m, k, by)
    each = 4 if by is not None and by.element is ElementKind.S4 else 2
    if weight.dim() != 2 or weight.shape[1] * each % 8:
        raise InvalidProblemError(
            f"weight: expected values [M, K/{each}] with K a multiple of 8, got {list(weight.shape)}"
        )
    rows, columns = weight.shape[0], each * weight.shape[1]
    if meta.dtype not in META_DTYPES or tuple(meta.shape) != (rows, columns // 8):
        raise InvalidProblemError(
            f"meta: expected int16 or uint16 {[rows, columns // 8]}, got {meta.dtype} {list(meta.shape)}"
        )
    if meta.device != weight.device:
        raise InvalidProblemError(f"meta: expected a tensor on {weight.device}, got {meta.device}")
    for name, given, found in (("m", m, rows), ("k", k, columns)):
        if given is not None and given != found:
            raise InvalidProblemError(f"{name}: expected {found}, like the weight, got {given}")
    return rows, columns


def packed_layout(weight: torch.Tensor, by: Quantization | None = None) -> TileLayout:
    """The layout of a packed weight. Raises UnsupportedError for an element without a layout."""
    return layout_of(element_of(weight.dtype, "weight")) if by is None else quantized_tiles(by)


def _packed_sizes(
    weight: torch.Tensor, m: int | None, k: int | None, by: Quantization | None
) -> tuple[int, int]:
    if m is None or k is None:
        raise InvalidProblemError("m: expected the rows of a packed weight (one without meta), got None")
    layout = packed_layout(weight, by)
    down, across, nbytes = layout.packed_shape(m, k)
    wanted = (down, across, nbytes // weight.element_size())
    if tuple(weight.shape) != wanted:
        raise InvalidProblemError(
            f"weight: expected tiles {list(wanted)} of a packed weight [{m}, {k}], got {list(weight.shape)}"
        )
    return m, k


def meta_view(meta: torch.Tensor) -> TensorView:
    """Metadata as uint16, which plans take."""
    return TensorView.of(meta, element=ElementKind.U16, argument="meta")


def canonical_weight(values: torch.Tensor, meta: torch.Tensor, *, validate: bool = False) -> Sparse24Weight:
    """The weight that shares the tensors' memory."""
    return Sparse24Weight(values, meta_view(meta), validate=validate)


def quantized_weight(
    values: torch.Tensor, meta: torch.Tensor, scales: torch.Tensor, group: int, dtype: torch.dtype
) -> Sparse24QuantizedWeight:
    """The quantized weight that shares the tensors' memory; W has ``dtype`` when it is multiplied."""
    return Sparse24QuantizedWeight(
        *(values, meta_view(meta), scales),
        element=element_of(dtype, "dtype"),
        stored=STORED_OF[values.dtype],
        group=group,
        scale_element=element_of(scales.dtype, "scales"),
        validate=False,
    )


def packed_weight(
    weight: torch.Tensor,
    m: int,
    k: int,
    by: Quantization | None = None,
    dtype: torch.dtype | None = None,
) -> PackedWeight:
    """The packed weight that shares the tensor's memory. A quantized one has ``dtype`` when multiplied."""
    element = element_of(dtype or weight.dtype, "weight")
    if not weight.is_contiguous():
        raise InvalidProblemError(f"weight: expected contiguous memory, got strides {weight.stride()}")
    view = TensorView.of(weight.view(torch.uint8), argument="weight")
    return PackedWeight(packed_layout(weight, by).layout_id, m, k, element, view.device, (view,), by)


def tensor_of(array: Any, element: ElementKind) -> torch.Tensor:
    """A NumPy or CuPy array of the element, or of its bits, as a tensor that shares its memory."""
    view = TensorView.of(array, element=element)
    bits = view.bits()
    signed = bits.view(f"i{element.itemsize}")  # PyTorch has few unsigned types
    dtype = torch.int16 if element is ElementKind.U16 else DTYPE_OF[element]
    return torch.utils.dlpack.from_dlpack(signed).view(dtype)


def tensors_of(weight: Sparse24Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and metadata int16 of a canonical weight, in its memory."""
    return tensor_of(weight.values, weight.element), tensor_of(weight.metadata, ElementKind.U16)
