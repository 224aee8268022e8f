"""Checks a compressed checkpoint against its dense one, layer by layer, by running plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..device.devices import resolve
from ..device.files import StrPath, path_of
from ..device.install import import_cupy
from ..device.tensors import TensorView, wrong
from ..errors import InvalidProblemError
from ..gemm.args import GemmSparse24Args
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from ..plan.guarantee import PrecisionGuarantee
from ..plan.preference import PlanPreference
from ..vocab import ElementKind, ScaleRule
from ..weights.cutting import slice_weight
from ..weights.dense import widened
from ..weights.quantize import LARGEST, SCALE_SUFFIX, quantized_rows
from ..weights.quantized_weight import Sparse24QuantizedWeight, scale_rule_of
from ..weights.weight import Sparse24Weight, prune
from .compress import COMPRESSED_DTYPES
from .compressed_form import multiplied_as, quantized_weight
from .folder import DTYPES, ELEMENTS, ModelReader, is_rounded, same_tensor
from .layers import (
    CALIBRATED,
    SCALE_RULE,
    Layer,
    compressed_layer,
    compressed_names,
    dense_blocks,
    is_compressed,
    read_weight,
)
from .safetensors_file import shown
from .selection import check_callback
from .weights_file import Weight

Array = np.ndarray[Any, Any]
MAX_TOKENS = 1 << 14


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The result for one compressed layer. The numbers are None if ``problem`` prevented its product.

    ``relative_error`` is ||y - exact|| / ||exact||. ``worst_ratio`` is the largest |y - exact| / tolerance,
    which is at most 1.0 if the plan's guarantee holds. ``error_bound`` is the guarantee's constant c for this
    K. ``quantization`` says how a weight with scales of groups is stored, None for other weights. The values
    of a ``calibrated`` weight were not compared with the dense ones, because calibration changes them.
    """

    name: str
    shape: tuple[int, ...]
    element: str
    kernel: str | None = None
    max_abs_error: float | None = None
    relative_error: float | None = None
    error_bound: float | None = None
    worst_ratio: float | None = None
    problem: str | None = None
    quantization: str | None = None
    calibrated: bool = False

    @property
    def passed(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of :func:`verify_checkpoint`. ``problems`` concern the files; layers have their own.

    A checkpoint without layers passes if it has every tensor of the dense one: nothing could be compressed.
    """

    device: str
    tokens: int
    layers: tuple[LayerResult, ...]
    copied: int
    """The number of tensors that equal the dense checkpoint's."""
    problems: tuple[str, ...]
    rounded: int = 0
    """The number of tensors that equal the dense checkpoint's float32 ones rounded to 16 bits."""

    @property
    def passed(self) -> bool:
        return not self.problems and all(layer.passed for layer in self.layers)


def verify_checkpoint(
    compressed: StrPath,
    dense: StrPath,
    *,
    tokens: int = 8,
    device: int | str | None = None,
    seed: int = 0,
    preference: PlanPreference | None = None,
    on_layer: Callable[[LayerResult], None] | None = None,
) -> Verification:
    """Check every tensor of ``compressed`` against ``dense``.

    Each is a safetensors file, a folder with one, a folder of shards with their index, or that index. Their
    shards may hold different tensors. A compressed layer must decompress to exactly ``prune(dense)``, and a
    quantized one must have the values and scales of its rule for that, or of any if its note names none, as
    those of a saved model do. Its product with random activations
    [tokens, K], by the plan that ``preference`` and ``device`` select, must agree with the float64 product of
    the (dequantized) weight within the plan's guarantee. Every other tensor must be equal byte for byte, or
    in 16 bits equal a float32 one rounded to nearest even, as a model that was loaded in 16 bits saves its
    norms. Biases of layers that quantize their input may be in float32, in which a saved model holds them.
    Only the shapes of calibrated weights are compared, because calibration changes the kept values. Memory
    stays bounded by about one tensor.

    Raises
    ------
    InvalidProblemError
        ``tokens`` isn't from 1 to :data:`MAX_TOKENS`, ``seed`` is negative, or ``dense`` is compressed.
    FormatError, StorageError
        A file breaks its format or can't be read.
    UnsupportedError, BackendUnavailableError
        No kernel can serve a layer with this preference and device.
    """
    for argument, value, least, most in (("tokens", tokens, 1, MAX_TOKENS), ("seed", seed, 0, 2**63 - 1)):
        if type(value) is not int or not least <= value <= most:
            raise wrong(argument, f"{least} to {most}", value)
    compressed, dense = path_of("compressed", compressed), path_of("dense", dense)
    check_callback("on_layer", on_layer)
    layers: list[LayerResult] = []
    rng = np.random.default_rng(seed)
    place = str(resolve(device))
    with ModelReader(compressed) as ours, ModelReader(dense) as theirs:
        stored = _stored_layers(ours, theirs)
        for layer in stored:
            weight = read_weight(ours, layer)
            by = None if weight.quantization is None else str(weight.quantization)
            kind, calibrated = weight.element.value, CALIBRATED in layer.options
            result = LayerResult(layer.name, layer.dense_shape, kind, quantization=by, calibrated=calibrated)
            problem = _compare_weight(weight, ours, theirs, layer)
            if problem is not None:
                result = replace(result, problem=problem)
            else:
                plan = _plan(weight, tokens, preference, device)
                result = _multiply(plan, weight, rng, result)
            layers.append(result)
            if on_layer is not None:
                on_layer(result)
        copied, rounded, problems = _compare_rest(ours, theirs, stored)
    if problems and not stored:
        problems.insert(0, f"{compressed} holds no compressed layer")
    return Verification(place, tokens, tuple(layers), copied, tuple(problems), rounded)


def _stored_layers(ours: ModelReader, theirs: ModelReader) -> list[Layer]:
    """The compressed layers of ``ours``. Raises InvalidProblemError if ``theirs`` is compressed, too."""
    found = [compressed_layer(ours, shard, name) for name, shard in compressed_names(ours).items()]
    if is_compressed(theirs):
        raise InvalidProblemError(f"dense: expected a dense checkpoint, {theirs.path} is compressed")
    return found


def _compare_weight(weight: Weight, ours: ModelReader, theirs: ModelReader, layer: Layer) -> str | None:
    """Why the layer isn't the pruned dense one, or None."""
    info = theirs.tensors.get(layer.name)
    if info is None:
        return "the dense checkpoint lacks it"
    element = ELEMENTS.get(info.dtype)
    if element is None or info.shape != layer.dense_shape or not _may_come_from(weight, info.dtype, element):
        return f"the dense tensor is {shown(info.dtype).lower()}{list(info.shape)}"
    dense_layer = replace(layer, element=element)
    if isinstance(weight, Sparse24QuantizedWeight):
        return None if CALIBRATED in layer.options else _compare_quantized(weight, theirs, dense_layer)
    bits, scales = weight.element.bits_dtype, None
    if weight.element in LARGEST:
        found = ours.tensors.get(layer.name + SCALE_SUFFIX)
        if found is None or (found.dtype, found.shape) != (DTYPES[ElementKind.F32], (weight.m, 1)):
            return f"expected its scales, F32[{weight.m}, 1], in {shown(layer.name + SCALE_SUFFIX)}"
        scales = ours.read(found.name).view(np.uint32)
    if CALIBRATED in layer.options:
        return None
    for rows, dense in dense_blocks(theirs, dense_layer):
        if scales is None:
            pruned = prune(dense)
        else:  # kept values alone are quantized: a scale of NaN leaves pruned ones 0
            again = Sparse24Weight.prune_compress(dense)
            values, scale = quantized_rows(again.values, weight.element)
            if (scale.view(np.uint32)[:, 0] != scales[rows]).any():
                return f"a scale differs in rows {rows.start} to {rows.stop - 1}"
            pruned = Sparse24Weight(values, again.metadata, validate=False).decompress()
        own = slice_weight(weight, rows.start, rows.stop).decompress()
        wrong = pruned.view(bits) != own.view(bits)
        if wrong.any():
            row, column = divmod(int(wrong.argmax()), weight.k)
            return f"differs from the pruned dense tensor at row {rows.start + row}, column {column}"
    return None


def _may_come_from(weight: Weight, dtype: str, element: ElementKind) -> bool:
    """Whether a weight of this element may come from a dense tensor of this type."""
    own = element if weight.quantization is None else multiplied_as(element)
    return dtype in COMPRESSED_DTYPES and weight.element in (own, *LARGEST)


def _compare_quantized(weight: Sparse24QuantizedWeight, theirs: ModelReader, layer: Layer) -> str | None:
    """Why the layer isn't what quantization makes of the pruned dense one, or None.

    A saved model doesn't know by which rule its scales were chosen, so its notes name none: any will do.
    """
    if SCALE_RULE not in layer.options:
        found: list[str] = []
        for rule in ScaleRule:
            if (difference := _difference(weight, theirs, layer, rule)) is None:
                return None  # the dense weight isn't quantized again for the other rules
            found.append(difference)
        return f"{found[0]}, whichever rule gave the scales"
    try:
        rule = scale_rule_of(layer.options[SCALE_RULE], SCALE_RULE)
    except InvalidProblemError as error:
        return f"quantization can't be computed again by its note: {error}"
    return _difference(weight, theirs, layer, rule)


def _difference(
    weight: Sparse24QuantizedWeight, theirs: ModelReader, layer: Layer, rule: ScaleRule
) -> str | None:
    """Describe how the layer differs from the pruned dense one quantized by this rule; None if it doesn't."""
    for rows, dense in dense_blocks(theirs, layer):
        again = quantized_weight(Sparse24Weight.prune_compress(dense), weight.quantization, rule)
        for what, view, own in zip(("value", "position", "scale"), again.views, weight.views, strict=True):
            unequal = (view.bits() != own.bits()[rows]).any(axis=1)
            if unequal.any():
                row = rows.start + int(unequal.argmax())
                return f"a {what} differs from those of the pruned dense tensor in row {row}"
    return None


def _compare_rest(ours: ModelReader, theirs: ModelReader, layers: list[Layer]) -> tuple[int, int, list[str]]:
    """The numbers of tensors that were copied faithfully and rounded, and the problems of the others."""
    in_rows = [layer.name for layer in layers if layer.element in LARGEST]
    biases = {name.removesuffix(".weight") + ".bias" for name in in_rows}
    copied, rounded, problems = 0, 0, []
    others = theirs.tensors.keys() - {layer.name for layer in layers}
    for name in others:
        if name not in ours.tensors:
            problems.append(f"{shown(name)}: missing")
        elif same_tensor(theirs, ours, name) or (name in biases and _is_widened(theirs, ours, name)):
            copied += 1
        elif is_rounded(theirs, ours, name):
            rounded += 1
        else:
            problems.append(f"{shown(name)}: differs from the dense checkpoint")
    stored = {source for layer in layers for source in layer.sources}
    extra = ours.tensors.keys() - stored - {name + SCALE_SUFFIX for name in in_rows} - others
    problems += [f"{shown(name)}: not in the dense checkpoint" for name in extra]
    return copied, rounded, sorted(problems)


def _is_widened(theirs: ModelReader, ours: ModelReader, name: str) -> bool:
    """Whether our bias is theirs in float32, in which layers that quantize their input hold and save it."""
    given, own = theirs.tensors[name], ours.tensors[name]
    if given.dtype not in COMPRESSED_DTYPES or (own.dtype, own.shape) != ("F32", given.shape):
        return False
    element = ELEMENTS[given.dtype]
    wide = widened(theirs.read(name).view(element.bits_dtype), element)
    return np.array_equal(wide.view(np.uint32), ours.read(name).view(np.uint32))


# The product --------------------------------------------------------------------------------------


def _plan(
    weight: Weight, tokens: int, preference: PlanPreference | None, device: int | str | None
) -> GemmSparse24Plan:
    element = weight.element
    out = ElementKind.F32 if element in LARGEST else element
    fields = {} if weight.quantization is None else weight.quantization.problem
    desc = GemmSparse24Descriptor(
        n=tokens, m=weight.m, k=weight.k, element=element, out_element=out, **fields
    )
    return GemmSparse24Plan.select(desc, preference=preference, device=device)


def _multiply(
    plan: GemmSparse24Plan, weight: Weight, rng: np.random.Generator, result: LayerResult
) -> LayerResult:
    """The result with the errors of the plan's product with random activations."""
    out, k = plan.descriptor.out_element, weight.k
    plain = weight.dequantize() if isinstance(weight, Sparse24QuantizedWeight) else weight
    x = _activations(plain, plan.descriptor.n, rng)
    y = _run(plan, weight, x).astype(np.float64)
    exact, abs_sum = _reference(plain, x, plan.guarantee)
    with np.errstate(all="ignore"):  # Inf and NaN in a weight are results here
        tolerance = plan.guarantee.tolerance(k, exact, abs_sum, out)
        equal = _equal_or_overflowed(y, exact, tolerance, out)
        error = np.where(equal, 0.0, np.abs(y - exact))
        ratio = np.where(equal, 0.0, error / tolerance)
        relative = np.linalg.norm(error) / max(np.linalg.norm(exact), np.finfo(np.float64).tiny)
    worst = float(ratio.max(initial=0.0))
    return replace(
        result,
        kernel=plan.explain().chosen,
        max_abs_error=float(error.max(initial=0.0)),
        relative_error=float(relative),
        error_bound=plan.guarantee.error_bound(k),
        worst_ratio=worst,
        # This comparison makes a NaN fail.
        problem=None if worst <= 1.0 else f"the error is {worst:.3g} times what the plan guarantees",
    )


def _activations(weight: Sparse24Weight, tokens: int, rng: np.random.Generator) -> Array:
    """Random X [tokens, K] of the weight's element.

    A power of two scales it down if sums of finite products would overflow float32, because no guarantee
    covers an accumulator that overflows.
    """
    x = rng.standard_normal((tokens, weight.k)).astype(np.float32)
    values = np.abs(weight.values.astype(np.float32))
    largest = values.max(initial=0.0, where=np.isfinite(values))
    reach = np.abs(x).sum(axis=1).max(initial=0.0)
    excess = int(np.frexp(largest)[1] + np.frexp(reach)[1]) - 127
    scaled: Array = np.ldexp(x, -max(excess, 0)).astype(weight.element.dtype)
    return scaled


def _equal_or_overflowed(y: Array, exact: Array, tolerance: Array, element: ElementKind) -> Array:
    """Whether both are the same number, Inf or NaN, or y overflowed within the tolerance."""
    farthest = (exact + np.copysign(tolerance, exact)).astype(element.dtype).astype(np.float64)
    equal: Array = (y == exact) | (np.isnan(y) & np.isnan(exact)) | (np.isinf(y) & (y == farthest))
    return equal


def _run(plan: GemmSparse24Plan, weight: Weight, x: Array) -> Array:
    """The product y [N, M], computed on the plan's device."""
    desc = plan.descriptor
    bits, shape = desc.out_element.bits_dtype, (desc.n, desc.outputs)
    poison = np.full(shape, np.iinfo(bits).max, bits)  # NaN, so that missing writes show
    if plan.device.kind == "host":
        y = poison.view(desc.out_element.dtype)
        plan.run(GemmSparse24Args(weight=plan.pack(weight), x=x, y=y))
        return y
    cupy = import_cupy()
    with cupy.cuda.Device(plan.device.ordinal):
        source, result = cupy.asarray(x.view(desc.element.bits_dtype)), cupy.asarray(poison)
        workspace = cupy.empty(plan.workspace_size(), np.uint8)
        args = GemmSparse24Args(
            weight=plan.pack(weight.to(plan.device.ordinal)),
            x=TensorView.of(source, element=desc.element),
            y=TensorView.of(result, element=desc.out_element),
        )
        plan.run(args, workspace=workspace if workspace.size else None)
        fetched: Array = cupy.asnumpy(result).view(desc.out_element.dtype)
    return fetched


def _reference(weight: Sparse24Weight, x: Array, promise: PrecisionGuarantee) -> tuple[Array, Array]:
    """The product and sum|x||w| in float64, [N, M]."""
    wide = x.astype(np.float64)
    sizes = promise.magnitudes(wide, weight.element)
    exact, abs_sum = np.empty((2, x.shape[0], weight.m))
    rows = max(1, (1 << 20) // max(weight.k, 1))
    for start in range(0, weight.m, rows):
        block = slice(start, min(start + rows, weight.m))
        dense = slice_weight(weight, block.start, block.stop).decompress().astype(np.float64)
        with np.errstate(all="ignore"):
            exact[:, block] = wide @ dense.T
            abs_sum[:, block] = sizes @ promise.magnitudes(dense, weight.element).T
    return exact, abs_sum
