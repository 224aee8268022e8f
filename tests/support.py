"""Devices to run on, guarded buffers and random operands, for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from sparse24_plans import (
    DgradSparse24Args,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PlanPreference,
    Sparse24QuantizedWeight,
    Sparse24Weight,
)
from sparse24_plans.device.devices import cuda_device_count
from sparse24_plans.device.tensors import HOST, Device, TensorView
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.plan.plan import Plan

from .float64 import reference

GUARD_BYTES, GUARD, POISON = 256, 0xA5, 0xFF  # 0xFF.. is a NaN in every float type

HAS_GPU = cuda_device_count() > 0
ELEMENTS = ("f32", "f16", "bf16")
EPILOGUES = ("identity", "bias", "bias_relu", "bias_gelu", "bias_silu")
"""Epilogues that every kernel of the package serves."""


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


class Guarded:
    """A tensor [rows, width] with poison inside and guard bytes before, after and between its rows.

    With ``column`` its columns are what is contiguous, and ``row_stride`` is that of the columns. It starts
    ``offset`` elements after a multiple of 256 bytes.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        element: ElementKind,
        device: int | str,
        row_stride: int | None = None,
        *,
        column: bool = False,
        offset: int = 0,
    ) -> None:
        rows, width = shape if len(shape) == 2 else (1, shape[0])
        self._column = column
        if column:
            rows, width = width, rows
        stride = width if row_stride is None else row_stride
        size = element.itemsize
        start = GUARD_BYTES + offset * size
        raw = np.full(start + rows * stride * size + GUARD_BYTES, GUARD, np.uint8)
        self._inside = np.zeros_like(raw, dtype=bool)
        body = self._inside[start : start + rows * stride * size].reshape(rows, stride * size)
        body[:, : width * size] = True
        raw[self._inside] = POISON
        self._memory = to_place(raw, place_of(device))
        base = TensorView.of(self._memory)
        strides = (1,) if len(shape) == 1 else (1, stride) if column else (stride, 1)
        self.view = TensorView(
            base.address + start, shape, element, base.device, strides=strides, owner=self._memory
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
        shape = self.view.shape
        return inside.reshape(shape[::-1]).T if self._column else inside.reshape(shape)

    def untouched(self) -> bool:
        raw = self._bytes()
        return bool((raw[self._inside] == POISON).all() and (raw[~self._inside] == GUARD).all())


def scratch(nbytes: int, device: int | str) -> Guarded | None:
    return Guarded((nbytes,), ElementKind.U8, device) if nbytes else None


def random_weight(
    rng: np.random.Generator, m: int, k: int, element: ElementKind, device: int | str
) -> Sparse24Weight:
    dense = random_values(rng, (m, k), element)
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
    scale: np.ndarray | float = 1.0
    """scale_x times scale_w, float64."""
    c: np.ndarray | None = None
    scale_y: np.ndarray | None = None
    amax: Guarded | None = None

    def run(self, stream: Any = None) -> np.ndarray:
        self.plan.run(self.args, workspace=self.workspace and self.workspace.view, stream=stream)
        return self.fetch()

    def largest(self) -> np.float32:
        """The operand ``amax``."""
        assert self.amax is not None
        return self.amax.numpy()[0]

    def fetch(self) -> np.ndarray:
        synchronize(self.plan)
        if self.workspace is not None:
            self.workspace.numpy()
        for operand in self.inputs:
            operand.numpy()
        return self.result.numpy()

    def check(self, got: np.ndarray) -> float:
        """Assert that ``got`` is inside the guarantee's bound; returns the worst error / tolerance."""
        exact, tolerance = reference(
            self.plan, self.x, self.dense, self.bias, self.scale, self.c, self.scale_y
        )
        error = np.abs(got.astype(np.float64) - exact)
        assert not np.isnan(error).any(), "the result holds NaN"
        ratio = error / tolerance
        assert (ratio <= 1).all(), f"error {error.max():.3g} is {ratio.max():.2f} of what is allowed"
        return float(ratio.max(initial=0.0))


@cache
def plan_of_row(name: str) -> type[GemmSparse24Plan]:
    """A plan whose table is this row alone: ``select`` gives it, or says why it can't serve the problem.

    Also where the row leaves what isn't asked of it to others.
    """
    (row,) = (replace(row, for_a_bound=False) for row in ENTRIES if row.name == name)
    return type(f"PlanOf_{name}", (GemmSparse24Plan,), {"table": (row,)})


def device_of_row(name: str) -> int | str:
    (row,) = plan_of_row(name).table
    return "host" if row.on_host else 0


def synchronize(plan: Plan) -> None:
    if plan.device.kind == "cuda":
        import cupy

        cupy.cuda.Device(plan.device.ordinal).synchronize()


@dataclass(frozen=True)
class Data:
    """Operands of a product. ``dense`` is W before it is pruned."""

    dense: np.ndarray
    x: np.ndarray
    bias: np.ndarray | None = None
    scale_x: np.ndarray | None = None
    scale_w: np.ndarray | None = None
    c: np.ndarray | None = None
    scale_y: np.ndarray | None = None
    amax: np.ndarray | None = None

    def scale(self) -> np.ndarray:
        """scale_x times scale_w as float64, which broadcasts to [N, M]."""
        product = np.ones((1, 1))
        for values, axis in ((self.scale_x, 1), (self.scale_w, 0)):
            if values is not None:
                product = product * np.expand_dims(values.astype(np.float64), axis)
        return product


def random_data(rng: np.random.Generator, desc: GemmSparse24Descriptor) -> Data:
    def scales(kind: str, length: int) -> np.ndarray | None:
        if kind == "none":
            return None
        return rng.uniform(0.5, 2.0, 1 if kind == "tensor" else length).astype(np.float32)

    dense = random_values(rng, (desc.m, desc.k), desc.element)
    x = random_values(rng, (desc.n, desc.reduction), desc.x_element)
    bias = random_values(rng, (desc.m,), desc.bias_element) if desc.epilogue.has_bias else None
    scale_x, scale_w = scales(desc.scale_x, desc.n), scales(desc.scale_w, desc.m)
    c = random_values(rng, (desc.n, desc.outputs), desc.c_element) if desc.has_c else None
    amax = np.zeros(1, np.float32) if desc.amax else None
    return Data(dense, x, bias, scale_x, scale_w, c, scales(desc.scale_y, 1), amax)


def make_case(
    desc: GemmSparse24Descriptor,
    device: int | str = "host",
    preference: PlanPreference | None = None,
    *,
    row: str | None = None,
    seed: int = 0,
    pad: int = 0,
    dense: np.ndarray | None = None,
    x: np.ndarray | None = None,
) -> Case:
    """``pad`` elements lie between the rows of x and of y. ``dense`` and ``x`` replace random data.

    With ``row`` it is this row of the table that runs, where it lives, or UnsupportedError.
    """
    kind = GemmSparse24Plan
    if row is not None:
        kind, device = plan_of_row(row), device_of_row(row)
    plan = kind.select(desc, device=device, preference=preference)
    assert row in (None, plan.explain().chosen)
    given = {name: value for name, value in (("dense", dense), ("x", x)) if value is not None}
    return case_of(plan, replace(random_data(np.random.default_rng(seed), desc), **given), (pad, pad))


def case_of(
    plan: GemmSparse24Plan,
    data: Data,
    pads: tuple[int, ...] = (0, 0),
    offsets: tuple[int, ...] = (0, 0),
    *,
    in_place: bool = False,
) -> Case:
    """``pads`` and ``offsets`` are of x, of y and, if there are three, of c, in elements.

    ``in_place``: c is y.
    """
    desc, device = plan.descriptor, place_name(plan)
    weight = weight_of(data.dense, desc).to(device)
    shapes = (desc.n, desc.reduction), (desc.n, desc.outputs)
    columns = desc.x_order == "column", desc.y_order == "column"
    source, result = (
        Guarded(shape, element, device, shape[not column] + pad, column=column, offset=offset)
        for shape, element, column, pad, offset in zip(
            shapes, (desc.x_element, desc.out_element), columns, pads[:2], offsets[:2], strict=True
        )
    )
    inputs = {"x": source.fill(data.x)}
    for name, element in (
        ("bias", desc.bias_element),
        ("scale_x", ElementKind.F32),
        ("scale_w", ElementKind.F32),
        ("scale_y", ElementKind.F32),
        ("amax", ElementKind.F32),
    ):
        values = getattr(data, name)
        if values is not None:
            inputs[name] = Guarded(values.shape, element, device).fill(values)
    if data.c is not None and in_place:
        result.fill(data.c)
    elif data.c is not None:
        pad, offset = (*pads, 0)[2], (*offsets, 0)[2]
        shape, column = (desc.n, desc.outputs), desc.y_order == "column"
        inputs["c"] = Guarded(
            shape, desc.c_element, device, shape[not column] + pad, column=column, offset=offset
        ).fill(data.c)
    views = {name: operand.view for name, operand in inputs.items()}
    if data.c is not None and in_place:
        views["c"] = result.view
    packed = plan.pack(weight)
    args: GemmSparse24Args | DgradSparse24Args
    if desc.op == "forward":
        args = GemmSparse24Args(packed, y=result.view, **views)
    else:
        args = DgradSparse24Args(packed, source.view, result.view)
    with np.errstate(invalid="ignore"):  # signalling NaNs among hostile values
        dense64 = dense_of(weight).astype(np.float64)
    space = scratch(plan.workspace_size(), device)
    return Case(
        plan,
        args,
        result,
        space,
        tuple(inputs.values()),
        data.x,
        dense64,
        data.bias,
        data.scale(),
        data.c,
        data.scale_y,
        inputs.get("amax"),
    )


def weight_of(dense: np.ndarray, desc: GemmSparse24Descriptor) -> Sparse24Weight | Sparse24QuantizedWeight:
    """The pruned weight, quantized if the descriptor's is."""
    weight = Sparse24Weight.prune_compress(dense)
    if desc.quantization is None:
        return weight
    stored, group, scale_element = desc.quantization
    return Sparse24QuantizedWeight.quantize(weight, stored=stored, group=group, scale_element=scale_element)


def dense_of(weight: Sparse24Weight | Sparse24QuantizedWeight) -> np.ndarray:
    """The matrix that products multiply."""
    own = weight.to("host")
    return (own if isinstance(own, Sparse24Weight) else own.dequantize()).decompress()


def place_name(plan: Plan) -> int | str:
    """Return the plan's device as ``select`` takes it."""
    return "host" if plan.device.kind == "host" else plan.device.ordinal


def run_from_threads(runs: Sequence[Callable[..., None]], times: int) -> None:
    """Each of ``runs`` so often, on a thread and a stream of its own. Raises what a thread raised."""
    import cupy

    def work(run: Callable[..., None]) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        for _ in range(times):
            run(stream=stream)
        stream.synchronize()

    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(work, runs))


def check_that_nothing_is_allocated(run: Callable[[], None]) -> None:
    """Device memory is the same after many runs, in CuPy's pool and outside of it."""
    import cupy

    def taken() -> tuple[int, int]:
        return cupy.get_default_memory_pool().total_bytes(), cupy.cuda.runtime.memGetInfo()[0]

    before = taken()
    for _ in range(50):
        run()
    assert taken() == before


def random_values(rng: np.random.Generator, shape: tuple[int, ...], element: ElementKind) -> np.ndarray:
    if element.is_integer:
        most = 1 << 8 * element.itemsize - 1
        return rng.integers(-most, most, shape).astype(element.dtype)
    return rng.standard_normal(shape).astype(np.float32).astype(element.dtype)


def failures(check: Callable[..., object], cases: Iterable[tuple[Any, ...]]) -> dict[tuple[Any, ...], str]:
    """Return what ``check`` says of each case that fails: a test of hundreds of cases costs a hundredth."""
    found = {}
    for case in cases:
        try:
            check(*case)
        except AssertionError as error:
            found[case] = str(error)
    return found


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
