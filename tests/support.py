"""What the tests share: places to run on, guarded buffers, an independent float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparse24_plans import (
    DgradSparse24Args,
    ElementKind,
    EpilogueKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    Sparse24Weight,
)
from sparse24_plans.devices import cuda_device_count
from sparse24_plans.tensors import HOST, Device, TensorView

GUARD_BYTES, GUARD, POISON = 256, 0xA5, 0xFF  # 0xFF.. is a NaN in every float type

HAS_GPU = cuda_device_count() > 0
ELEMENTS = ("f32", "f16", "bf16")
EPILOGUES = tuple(kind.value for kind in EpilogueKind)


def place_of(device: int | str) -> Device:
    return HOST if device == "host" else Device("cuda", int(device))


def to_place(array: np.ndarray, device: Device) -> Any:
    """The bits of ``array`` in memory of ``device``."""
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    if device == HOST:
        return bits
    import cupy

    with cupy.cuda.Device(device.ordinal):
        return cupy.asarray(bits)


def view_on(array: np.ndarray, device: int | str, element: ElementKind) -> TensorView:
    bits = to_place(array, place_of(device))
    view = TensorView.of(bits)
    return TensorView(view.address, array.shape, element, view.device, owner=bits)


class Guarded:
    """A tensor [rows, width] with poison inside and guard bytes before, after and between its rows."""

    def __init__(
        self, shape: tuple[int, ...], element: ElementKind, device: int | str, row_stride: int | None = None
    ) -> None:
        rows, width = shape if len(shape) == 2 else (1, shape[0])
        stride = width if row_stride is None else row_stride
        size = element.itemsize
        raw = np.full(2 * GUARD_BYTES + rows * stride * size, GUARD, np.uint8)
        self._inside = np.zeros_like(raw, dtype=bool)
        body = self._inside[GUARD_BYTES : GUARD_BYTES + rows * stride * size].reshape(rows, stride * size)
        body[:, : width * size] = True
        raw[self._inside] = POISON
        self._memory = to_place(raw, place_of(device))
        base = TensorView.of(self._memory)
        strides = (stride, 1) if len(shape) == 2 else (1,)
        self.view = TensorView(
            base.address + GUARD_BYTES, shape, element, base.device, strides=strides, owner=self._memory
        )

    def fill(self, array: np.ndarray) -> Guarded:
        bits = array.view(self.view.element.bits_dtype)
        self.view.bits()[...] = to_place(bits, self.view.device)
        return self

    def _bytes(self) -> np.ndarray:
        return self._memory if isinstance(self._memory, np.ndarray) else self._memory.get()

    def numpy(self) -> np.ndarray:
        """The tensor's contents, typed; checks the guards."""
        raw = self._bytes()
        assert (raw[~self._inside] == GUARD).all(), "guard bytes were overwritten"
        inside = raw[self._inside].view(self.view.element.dtype)
        return inside.reshape(self.view.shape)

    def untouched(self) -> bool:
        raw = self._bytes()
        return bool((raw[self._inside] == POISON).all() and (raw[~self._inside] == GUARD).all())


def scratch(nbytes: int, device: int | str) -> Guarded | None:
    return Guarded((nbytes,), ElementKind.U8, device) if nbytes else None


def random_weight(
    rng: np.random.Generator, m: int, k: int, element: ElementKind, device: int | str
) -> Sparse24Weight:
    dense = rng.standard_normal((m, k)).astype(np.float32).astype(element.dtype)
    weight = Sparse24Weight.prune_compress(dense)
    return weight.to(device if device == "host" else int(device))


@dataclass
class Case:
    """One problem with its operands in guarded memory and its float64 reference."""

    plan: GemmSparse24Plan
    args: GemmSparse24Args | DgradSparse24Args
    result: Guarded
    workspace: Guarded | None
    inputs: tuple[Guarded, ...]
    x: np.ndarray
    dense: np.ndarray
    bias: np.ndarray | None

    def run(self, stream: Any = None) -> np.ndarray:
        self.plan.run(self.args, workspace=self.workspace and self.workspace.view, stream=stream)
        return self.fetch()

    def fetch(self) -> np.ndarray:
        synchronize(self.plan)
        if self.workspace is not None:
            self.workspace.numpy()
        for operand in self.inputs:
            operand.numpy()
        return self.result.numpy()

    def check(self, got: np.ndarray) -> float:
        """Assert that ``got`` is inside the guarantee's bound; returns the worst error / tolerance."""
        exact, tolerance = reference(self.plan, self.x, self.dense, self.bias)
        error = np.abs(got.astype(np.float64) - exact)
        assert not np.isnan(error).any(), "the result holds NaN"
        ratio = error / tolerance
        assert (ratio <= 1).all(), f"error {error.max():.3g} is {ratio.max():.2f} of what is allowed"
        return float(ratio.max(initial=0.0))


def synchronize(plan: GemmSparse24Plan) -> None:
    if plan.device.kind == "cuda":
        import cupy

        cupy.cuda.Device(plan.device.ordinal).synchronize()


def make_case(
    desc: GemmSparse24Descriptor,
    device: int | str = "host",
    preference: PlanPreference | None = None,
    *,
    seed: int = 0,
    pad: int = 0,
    dense: np.ndarray | None = None,
    x: np.ndarray | None = None,
) -> Case:
    """``pad`` elements lie between the rows of x and of y. ``dense`` and ``x`` replace random data."""
    rng = np.random.default_rng(seed)
    plan = GemmSparse24Plan.select(desc, device=device, preference=preference)
    dtype = desc.element.dtype
    if dense is None:
        weight = random_weight(rng, desc.m, desc.k, desc.element, device)
    else:
        weight = Sparse24Weight.prune_compress(dense).to(device if device == "host" else int(device))
    shape = (desc.n, desc.reduction)
    if x is None:
        x = rng.standard_normal(shape).astype(np.float32).astype(dtype)
    source = Guarded(shape, desc.element, device, shape[1] + pad).fill(x)
    out_shape = (desc.n, desc.outputs)
    result = Guarded(out_shape, desc.out_element, device, out_shape[1] + pad)
    inputs, bias, bias_operand = [source], None, None
    if desc.epilogue.has_bias:
        bias = rng.standard_normal(desc.m).astype(np.float32).astype(desc.bias_element.dtype)
        bias_operand = Guarded((desc.m,), desc.bias_element, device).fill(bias)
        inputs.append(bias_operand)
    packed = plan.pack(weight)
    args: GemmSparse24Args | DgradSparse24Args
    if desc.op == "forward":
        args = GemmSparse24Args(packed, source.view, result.view, bias_operand and bias_operand.view)
    else:
        args = DgradSparse24Args(packed, source.view, result.view)
    with np.errstate(invalid="ignore"):  # signalling NaNs among hostile values
        dense64 = weight.to("host").decompress().astype(np.float64)
    return Case(plan, args, result, scratch(plan.workspace_size(), device), tuple(inputs), x, dense64, bias)


_erfc = np.vectorize(math.erfc, otypes=[float])


def activate(v: np.ndarray, kind: EpilogueKind) -> np.ndarray:
    """The epilogues' activations in float64, by their definition."""
    if kind == "bias_relu":
        return np.maximum(v, 0)
    if kind == "bias_gelu":
        return v * 0.5 * _erfc(-v / math.sqrt(2)) if v.size else v
    if kind == "bias_silu":
        return v / (1 + np.exp(-v))
    return v


def reference(
    plan: GemmSparse24Plan, x: np.ndarray, dense: np.ndarray, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The exact result and the allowed error, float64 [N, outputs]."""
    desc = plan.descriptor
    w = dense.T if desc.op == "forward" else dense
    wide = x.astype(np.float64)
    exact, abs_sum = desc.alpha * (wide @ w), np.abs(wide) @ np.abs(w)
    if bias is None:
        return exact, plan.guarantee.tolerance(desc.reduction, exact, abs_sum, desc.out_element, desc.alpha)
    f32 = ElementKind.F32
    before = plan.guarantee.tolerance(desc.reduction, exact, abs_sum, f32, desc.alpha)
    v = exact + bias.astype(np.float64)
    before += np.abs(v) * f32.unit_roundoff
    value = activate(v, desc.epilogue)
    # Activations have slopes below 1.13; float32 activations add a few units in the last place.
    after = 1.13 * before + (np.abs(value) + before) * (8 * f32.unit_roundoff)
    rounding = (np.abs(value) + after) * 1.01 * desc.out_element.unit_roundoff
    return value, after + rounding + desc.out_element.smallest_subnormal + f32.smallest_subnormal


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
