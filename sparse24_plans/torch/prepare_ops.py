"""The ops that prepare weights: prune, compress, decompress, pack, unpack, tile_prune and apply_mask.

Each but ``pack_quantized`` runs a plan of ``prepare`` on PyTorch's memory and current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidProblemError
from ..plan.operands import Operand, Role
from ..prepare import plan as prepare_plans
from ..vocab import ElementKind, MaskLayout
from ..weights.packed_layouts import Quantization, layout_of, quantized_tiles
from ..weights.packing_quantized import pack_quantized
from .elements import (
    DTYPE_OF,
    STORED_OF,
    allocation,
    canonical_weight,
    element_of,
    meta_view,
    packed_weight,
    plan_device,
    quantized_weight,
    tensor_of,
    weight_sizes,
)
from .library import define
from .packed_weight_cache import cupy_on_torch_stream
from .plan_cache import CheckedCall, descriptor, find, form_of, plans

_ops: Any = torch.ops.sparse24


# Problems -----------------------------------------------------------------------------------------


class _Problem(NamedTuple):
    """What an op prepares."""

    plan: Any
    """The class of the plan."""
    fields: dict[str, Any]
    """All of the descriptor's fields. Sizes may be symbols while a graph is traced."""
    read: dict[str, Tensor]
    """The operands that are read, by the names that a Caller has for them."""

    def results(self) -> dict[str, tuple[tuple[Any, ...], torch.dtype]]:
        """Shape and dtype of each result. Raises InvalidProblemError for wrong fields, if all are known."""
        if all(value is None or isinstance(value, (int, str)) for value in self.fields.values()):
            desc = descriptor(self.plan, **self.fields)
        else:
            kind = self.plan.descriptor_type
            desc = kind.__new__(kind)  # validation refuses symbols, but shapes of operands may have them
            desc.__dict__.update(self.fields)
        made = [one for one in desc.operands() if one.role is Role.OUT]
        return {one.argument: self._result(one) for one in made if not one.optional or one.name != "mask"}

    def _result(self, operand: Operand) -> tuple[tuple[Any, ...], torch.dtype]:
        if operand.argument == "packed":  # tiles have the dtype of the values
            (*tiles, nbytes), dtype = operand.shape, self.read["weight.values"].dtype
            return (*tiles, nbytes // dtype.itemsize), dtype
        return operand.shape, torch.int16 if operand.element is ElementKind.U16 else DTYPE_OF[operand.element]


def _matrix(plan: Any, dense: Tensor, read: dict[str, Tensor] | None = None, **fields: Any) -> _Problem:
    """The problem of a matrix, read with the operands of ``read``. Raises InvalidProblemError."""
    if dense.dim() != 2:
        raise InvalidProblemError(f"dense: expected a matrix [M, K], got {list(dense.shape)}")
    sizes = dict(zip(("m", "k"), dense.shape, strict=True))
    element = element_of(dense.dtype, "dense")
    return _Problem(plan, {**sizes, "element": element, **fields}, {"dense": dense, **(read or {})})


def _ranked(plan: Any, dense: Tensor, scores: Tensor | None = None) -> _Problem:
    """The problem of a matrix, with scores or without. Raises InvalidProblemError for other scores."""
    problem = _matrix(plan, dense, scores=None)
    if scores is None:
        return problem
    if scores.shape != dense.shape or scores.device != dense.device:
        raise InvalidProblemError(
            f"scores: expected {list(dense.shape)} on {dense.device}, got {list(scores.shape)} "
            f"on {scores.device}"
        )
    return _matrix(plan, dense, {"scores": scores}, scores=element_of(scores.dtype, "scores"))


def _canonical(plan: Any, values: Tensor, meta: Tensor, **fields: Any) -> _Problem:
    m, k = weight_sizes(values, meta, None, None)
    element = element_of(values.dtype, "values")
    return _Problem(
        plan,
        {"m": m, "k": k, "element": element, **fields},
        {"weight.values": values, "weight.metadata": meta},
    )


def _pack(values: Tensor, meta: Tensor) -> _Problem:
    problem = _canonical(prepare_plans.PackSparse24Plan, values, meta, direction="pack")
    layout_of(problem.fields["element"])  # raises UnsupportedError for an element that isn't packed
    return problem


def _unpack(packed: Tensor, m: int, k: int) -> _Problem:
    weight_sizes(packed, None, m, k)
    fields = {"m": m, "k": k, "element": element_of(packed.dtype, "packed"), "direction": "unpack"}
    return _Problem(prepare_plans.PackSparse24Plan, fields, {"packed": packed})


def _tile_prune(dense: Tensor, rule: str = "greedy_magnitude") -> _Problem:
    return _matrix(prepare_plans.TilePruneSparse24Plan, dense, rule=rule)


def _apply_mask(dense: Tensor, mask: Tensor) -> _Problem:
    layout = MaskLayout.TILES if mask.dim() == 3 else MaskLayout.ROWS
    return _matrix(prepare_plans.MaskSparse24Plan, dense, {"mask": mask}, layout=layout)


# Running ------------------------------------------------------------------------------------------


class _Prepared(CheckedCall):
    """The plan of one form of a problem's operands."""

    def __init__(self, problem: _Problem, made: list[Tensor]) -> None:
        """``made`` receives results, with which the first call is checked."""
        read = {name: one.contiguous() for name, one in problem.read.items()}
        first = next(iter(read.values()))
        makers = {name: allocation(*one, first.device) for name, one in problem.results().items()}
        desc = descriptor(problem.plan, **problem.fields)
        self._plan = problem.plan.select(desc, device=plan_device(first))
        self._names, self._makers = (*read, *makers), tuple(makers.values())
        self._reports = "status" in makers
        made += [make() for make in self._makers]
        args = self._args(*read.values(), *made)
        super().__init__(self._plan, self._plan.caller(args), first.device)
        self._order = tuple(map(self._names.index, self._caller.operands))

    def _args(self, *operands: Tensor) -> Any:
        """The plan's arguments."""
        desc, given = self._plan.descriptor, dict[str, Any](zip(self._names, operands, strict=True))
        if "weight.values" in given:
            given["weight"] = canonical_weight(given.pop("weight.values"), given.pop("weight.metadata"))
            if "packed" in given:
                given["packed"] = given["packed"].view(torch.uint8)
        elif "packed" in given:
            given["packed"] = packed_weight(given["packed"], desc.m, desc.k)
        for name in ("metadata", "metadata_t"):
            if name in given:
                given[name] = meta_view(given[name])
        return self._plan.args_type(desc)(**given)

    def run(self, read: list[Tensor], made: list[Tensor]) -> Any:
        """The result, or a tuple of several. Waits and raises what was found, if the plan reports it.

        ``made`` are results of this call, or empty.
        """
        made = made or [make() for make in self._makers]
        operands = [one.contiguous() for one in read] + made
        self._launch(tuple([operands[at].data_ptr() for at in self._order]))
        if self._reports:
            stream = self._stream() if self._device.type == "cuda" else None
            self._plan.check(self._args(*operands), stream=stream)
            made.pop()
        return made[0] if len(made) == 1 else tuple(made)


def _define(schema: str, problem: Callable[..., _Problem], **gradients: Any) -> None:
    """Register an op whose arguments ``problem`` turns into a problem."""

    def kernel(*args: Any) -> Any:
        form = form_of(problem, args)
        found, made = find(form), list[Tensor]()
        if found is None:
            found = plans.keep(form, _Prepared(problem(*args), made))
        return found.run([one for one in args if isinstance(one, Tensor)], made)

    def fake(*args: Any, **kwargs: Any) -> Any:
        asked = problem(*args, **kwargs)
        like, wanted = next(iter(asked.read.values())), asked.results()
        made = [
            like.new_empty(shape, dtype=dtype) for name, (shape, dtype) in wanted.items() if name != "status"
        ]
        return tuple(made) if len(made) > 1 else made[0]

    define(schema, kernel, fake, **gradients)


def empty_canonical(like: Tensor, m: Any, k: Any) -> tuple[Tensor, Tensor]:
    """Values and metadata of a weight [m, k], uninitialised."""
    return like.new_empty((m, k // 2)), like.new_empty((m, k // 8), dtype=torch.int16)


# Quantized weights and rows -----------------------------------------------------------------------


def _pack_quantized(values: Tensor, meta: Tensor, scales: Tensor, group: int = 0) -> Tensor:
    _quantized_sizes(values, meta, scales, group)
    values, meta, scales = (one.contiguous() for one in (values, meta, scales))
    dtype = torch.bfloat16 if scales.dtype == torch.float32 else scales.dtype  # the tiles don't tell W's
    with cupy_on_torch_stream(values):
        tiles = pack_quantized(quantized_weight(values, meta, scales, group, dtype)).buffers[0]
        return tensor_of(tiles.bits(), ElementKind.U8).view(values.dtype).clone()


def _quantized_sizes(values: Tensor, meta: Tensor, scales: Tensor, group: int) -> tuple[Any, ...]:
    """The shape of the tiles of a quantized weight. Raises InvalidProblemError for wrong operands."""
    if values.dtype not in STORED_OF:
        raise InvalidProblemError(f"values: expected {', '.join(map(str, STORED_OF))}, got {values.dtype}")
    by = Quantization(STORED_OF[values.dtype], group, element_of(scales.dtype, "scales"))
    return quantized_tiles(by).packed_shape(*weight_sizes(values, meta, None, None, by))


def _fake_pack_quantized(values: Tensor, meta: Tensor, scales: Tensor, group: int = 0) -> Tensor:
    return values.new_empty(_quantized_sizes(values, meta, scales, group))


class _Quantize(CheckedCall):
    """The plan that quantizes rows of one form."""

    def __init__(self, rows: Tensor, dtype: torch.dtype, scale: Tensor | None, columns: int) -> None:
        m, k = rows.shape
        elements = {"element": element_of(rows.dtype, "x"), "out_element": element_of(dtype, "dtype")}
        fields = {"m": m, "k": k, **elements, "static_scale": scale is not None}
        kind: Any = prepare_plans.QuantizeSparse24Plan
        plan = kind.select(descriptor(kind, **fields), device=plan_device(rows))
        self._columns, self._dtype, self._pads = columns, dtype, columns > k
        quantized, scales = self._made(rows, scale)
        args = plan.args_type(plan.descriptor)(rows, quantized[:, :k], scales.reshape(-1))
        super().__init__(plan, plan.caller(args), rows.device)

    def _made(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        outer, make = x.shape[:-1], x.new_zeros if self._pads else x.new_empty
        quantized = make((*outer, self._columns), dtype=self._dtype)
        return quantized, x.new_empty((*outer, 1), dtype=torch.float32) if scale is None else scale

    def run(self, x: Tensor, rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """x in 8 bits, and its scales or the given one. ``rows`` is x as a matrix."""
        quantized, scales = self._made(x, scale)
        self._launch((rows.data_ptr(), quantized.data_ptr(), scales.data_ptr()))
        return quantized, scales


def quantize_rows(x: Tensor, dtype: torch.dtype, scale: Tensor | None, columns: int) -> tuple[Tensor, Tensor]:
    """x [..., K] in ``dtype``, padded with zeros to ``columns``, and its scales [..., 1] or the given one.

    Raises InvalidProblemError, and UnsupportedError for a GPU without a kernel.
    """
    _check_quantize(x, dtype, scale, columns)
    k = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), k)
    if (k > 1 and rows.stride(1) != 1) or rows.stride(0) < k:
        rows = rows.contiguous()
    form = (_Quantize, rows.shape, rows.stride(), rows.dtype, rows.device, dtype, scale is None, columns)
    found = find(form)
    if found is None:
        found = plans.keep(form, _Quantize(rows, dtype, scale, columns))
    made: tuple[Tensor, Tensor] = found.run(x, rows, scale)
    return made


def _quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | None, columns: int) -> tuple[Tensor, Tensor]:
    """The op's second result is empty if a scale is given, because it may not be an argument."""
    quantized, scales = quantize_rows(x, dtype, scale, columns)
    return quantized, scales if scale is None else scales.new_empty(0)


def _check_quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | None, columns: Any) -> None:
    if not x.dim():
        raise InvalidProblemError("x: expected [..., K], got a number")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device):
        raise InvalidProblemError(
            f"scale: expected one float32 on {x.device}, got {scale.dtype} {list(scale.shape)} "
            f"on {scale.device}"
        )
    if columns < x.shape[-1]:
        raise InvalidProblemError(f"columns: expected at least {x.shape[-1]}, got {columns}")


def _fake_quantize(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, columns: Any
) -> tuple[Tensor, Tensor]:
    _check_quantize(x, dtype, scale, columns)
    for kind, name in ((x.dtype, "x"), (dtype, "dtype")):
        element_of(kind, name)
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    quantized = x.new_empty((*x.shape[:-1], columns), dtype=dtype)
    return quantized, scales if scale is None else scales.new_empty(0)


def kept_values(dense: Tensor, meta: Tensor) -> Tensor:
    """The values [M, K/2] of a dense matrix [M, K] at the positions that metadata names."""
    m, k = dense.shape
    codes = meta.contiguous().view(torch.uint8).to(torch.int64)
    positions = torch.stack([codes & 3, codes >> 2 & 3], dim=-1)
    return dense.reshape(m, k // 4, 4).gather(2, positions).reshape(m, k // 2)


def _prune_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _prune_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dense, scores = ctx.saved_tensors
    _, meta = _ops.prune_compress(dense.detach(), scores)
    return _ops.decompress(kept_values(grad, meta), meta), None


def _compress_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.inputs = len(inputs)
    ctx.save_for_backward(output[1])


def _compress_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    (meta,) = ctx.saved_tensors
    return (_ops.decompress(grad.contiguous(), meta), *[None] * (ctx.inputs - 1))


def _save_second(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _decompress_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (meta,) = ctx.saved_tensors
    return kept_values(grad, meta), None


def _tile_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], output[3], output[4])


def _tile_backward(ctx: Any, grad: Any, _: Any, grad_t: Any, __: Any, ___: Any) -> tuple[Any, ...]:
    meta, meta_t, mask = ctx.saved_tensors
    parts = []
    if grad is not None:
        parts.append(_ops.decompress(grad.contiguous(), meta))
    if grad_t is not None:
        parts.append(_ops.decompress(grad_t.contiguous(), meta_t).t())
    # Metadata names two positions in every group. The mask drops those that hold no kept cell.
    return (_ops.apply_mask(sum(parts), mask) if parts else None), None


def _mask_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    return _ops.apply_mask(grad.contiguous(), mask), None


_compressing = {"backward": _compress_backward, "setup_context": _compress_context}

_define(
    "prune(Tensor dense, Tensor? scores=None) -> Tensor",
    partial(_ranked, prepare_plans.PruneSparse24Plan),
    backward=_prune_backward,
    setup_context=_prune_context,
)
_define(
    "compress(Tensor dense) -> (Tensor, Tensor)",
    partial(_matrix, prepare_plans.CompressSparse24Plan),
    **_compressing,
)
_define(
    "prune_compress(Tensor dense, Tensor? scores=None) -> (Tensor, Tensor)",
    partial(_ranked, prepare_plans.PruneCompressSparse24Plan),
    **_compressing,
)
_define(
    "decompress(Tensor values, Tensor meta) -> Tensor",
    partial(_canonical, prepare_plans.DecompressSparse24Plan),
    backward=_decompress_backward,
    setup_context=_save_second,
)
_define("pack(Tensor values, Tensor meta) -> Tensor", _pack)
define(
    "pack_quantized(Tensor values, Tensor meta, Tensor scales, int group=0) -> Tensor",
    _pack_quantized,
    _fake_pack_quantized,
)
_define("unpack(Tensor packed, SymInt m, SymInt k) -> (Tensor, Tensor)", _unpack)
_define(
    'tile_prune(Tensor dense, str rule="greedy_magnitude") -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    _tile_prune,
    backward=_tile_backward,
    setup_context=_tile_context,
)
_define(
    "apply_mask(Tensor dense, Tensor mask) -> Tensor",
    _apply_mask,
    backward=_mask_backward,
    setup_context=_save_second,
)
define(
    "quantize(Tensor x, ScalarType dtype, Tensor? scale, SymInt columns) -> (Tensor, Tensor)",
    _quantize,
    _fake_quantize,
)
