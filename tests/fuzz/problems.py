"""Random problems. Each follows from a seed, its number and the kind of device alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from sparse24_plans import (
    AttentionMask,
    BlockSparseAttentionDescriptor,
    BlockSparseConv2dDescriptor,
    BlockSparseConvOp,
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseOp,
    BlockSparsePass,
    BlockSparseSoftmaxDescriptor,
    ElementKind,
    EpilogueKind,
    GemmSparse24Descriptor,
    PlanPreference,
    ScaleRule,
    Tier,
    TileRule,
)
from sparse24_plans.arithmetic.epilogue import UNGATED
from sparse24_plans.blocksparse.dropout import MOST_DROPOUT
from sparse24_plans.plan.families import backends
from sparse24_plans.prepare.descriptor import PrepareDescriptor, TilePruneSparse24Descriptor
from sparse24_plans.prepare.kernel_table import PACKED_ELEMENTS
from sparse24_plans.weights.gates import GATE_GROUP

from ..prepare.prepare_cases import ELEMENTS as PREPARED
from ..prepare.prepare_cases import MOODS, ON_HOST_ALONE, PLANS
from ..support import Data, random_data
from .batches import BatchedProduct, batches_of
from .hostile import Attack, draw_attack


class Limits(NamedTuple):
    """The largest problems."""

    side: int
    products: int
    """n * m * k."""
    results: int
    cells: int
    """m * k of a weight that is prepared."""


HOST = Limits(side=768, products=1 << 22, results=1 << 18, cells=1 << 12)
GPU = Limits(side=8192, products=1 << 34, results=1 << 24, cells=1 << 21)
_SLOW_RESULTS = 1 << 19
"""Maximum results with an activation whose reference is computed cell by cell."""
_RESULTS = {
    "f32": ("f32",),
    "f16": ("f16", "f32"),
    "bf16": ("bf16", "f32"),
    "s8": ("i32", "s8", "f16", "bf16", "f32"),
    "fp8_e4m3": ("bf16", "f16", "f32"),
}
"""Results of block-sparse products."""
_FP8 = ("fp8_e4m3", "fp8_e5m2")
_GEMM_RESULTS = _RESULTS | {"fp8_e5m2": _RESULTS["fp8_e4m3"]}
"""Results of products that need no scale."""
_ARITHMETICS = (
    *("fma32_in_order", "exact_sum", "hopper_tc/slices=1", "hopper_tc/slices=3"),
    *("hopper_tc_fp8/slices=2", "hopper_tc_fp8/promoted=128"),
)
_PROMISES = ("deterministic", "bit_stable_on_same_hardware", "batch_invariant", "bit_stable_across_hardware")


@dataclass(frozen=True)
class Product:
    """A product: its descriptor, what is asked of selection, and how its operands lie in memory."""

    desc: GemmSparse24Descriptor
    preference: PlanPreference
    mood: str
    pads: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offsets of x (dy), of y (dx) and of c, in elements, as are the pads of their rows."""
    in_place: bool
    """Whether c is y."""
    rows: tuple[int, ...] = field(repr=False)
    """Rows with which batch invariance is tried."""
    data_seed: tuple[int, ...] = field(repr=False)

    def data(self) -> Data:
        """The operands. Every value is finite in its type."""
        rng = np.random.default_rng(self.data_seed)
        made = random_data(rng, self.desc)
        if self.desc.element is ElementKind.S8:
            return _shaped_integers(made, self.mood, rng)
        dense = _shaped(made.dense, self.mood, rng, self.desc.element)
        return replace(made, dense=dense, x=_shaped(made.x, self.mood, rng, self.desc.x_element))


@dataclass(frozen=True)
class GroupedProduct:
    """A product of groups of tokens with weights of their own."""

    desc: GemmSparse24Descriptor
    preference: PlanPreference
    tokens: tuple[int, ...]
    """Offsets or counts, which may be hostile."""
    pad: int
    data_seed: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class Preparation:
    """Something done to a weight."""

    desc: PrepareDescriptor
    mood: str
    without: tuple[str, ...]
    data_seed: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class BlockProblem:
    """Something computed with a block-sparse matrix."""

    desc: Any
    layout: BlockSparseLayout
    preference: PlanPreference
    data_seed: tuple[int, ...] = field(repr=False)


Problem = Product | GroupedProduct | BatchedProduct | Preparation | BlockProblem


def draw(seed: int, case: int, device: int | str) -> Problem | Attack:
    """The problem of this number. On the host every fourth is a call with hostile arguments.

    Every eighth is block-sparse, on a GPU a product, attention or a softmax.
    """
    on_gpu = device != "host"
    key = (seed, case, int(on_gpu))
    rng = np.random.default_rng(key)
    if not on_gpu and case % 4 == 3:
        return draw_attack(rng)
    if case % 8 == 5:
        if on_gpu and case % 32 == 5:
            return _block_softmax_of_gpu(rng, (*key, 1))
        return _block_problem_of_gpu(rng, (*key, 1)) if on_gpu else _block_problem(rng, (*key, 1))
    limits = GPU if on_gpu else HOST
    if rng.random() < 0.3:
        return _preparation(rng, limits, (*key, 1))
    if rng.random() < 0.15:
        return _grouped(rng, limits, (*key, 1))
    product = _product(rng, limits, (*key, 1))
    return batches_of(rng, product) if rng.random() < 0.2 else product


# Parts --------------------------------------------------------------------------------------------


def _pick(rng: np.random.Generator, options: Any) -> Any:
    found = list(options)
    return found[rng.integers(len(found))]


def _size(rng: np.random.Generator, most: int, unit: int = 1) -> int:
    """Log-uniform, often ragged, sometimes one of the edges of tiles; rarely 0."""
    most = max(most, unit)
    kind = rng.random()
    if kind < 0.02:
        return 0
    size = int(math.exp(rng.uniform(0, math.log(most + 0.5))))
    if kind < 0.25:
        size = 2 ** round(math.log2(max(size, 1))) + int(rng.integers(-1, 2)) * unit
    return int(np.clip(-(-size // unit) * unit, unit, most // unit * unit))


def _sizes(rng: np.random.Generator, limits: Limits, most_results: int, unit_of_m: int = 1) -> dict[str, int]:
    """In a random order: what comes last gets what the others leave."""
    found: dict[str, int] = {}
    for name in rng.permutation(["n", "m", "k"]):
        left = limits.products // max(1, math.prod(found.values()))
        if name != "k":
            left = min(left, most_results // max(1, found.get("n", 1) * found.get("m", 1)))
        found[name] = _size(rng, min(limits.side, left), {"k": 8, "m": unit_of_m}.get(name, 1))
    return found


def _alpha(rng: np.random.Generator) -> float:
    kind = rng.random()
    if kind < 0.5:
        return 1.0
    if kind < 0.7:
        return float(_pick(rng, (0.0, -1.0, 0.5, 2.0, 1 / 3)))
    if kind < 0.9:
        return float(rng.standard_normal())
    return float(rng.choice([-1, 1]) * 10 ** rng.uniform(-45, 38))


def _product(rng: np.random.Generator, limits: Limits, data_seed: tuple[int, ...]) -> Product:
    forward = rng.random() < 0.85
    fields = _elements(rng, _pick(rng, _GEMM_RESULTS), fp8=forward)
    fields["alpha"] = _alpha(rng)
    if not forward:
        fields["op"] = "dgrad"
    else:
        if rng.random() < 0.6:
            fields["epilogue"] = _pick(rng, EpilogueKind)
            if fields["epilogue"].is_gated and fields["out_element"] == "i32":
                fields["out_element"] = "s8"
            fields["bias_element"] = "f32" if rng.random() < 0.5 else _default_bias(fields)
        for name in ("x_order", "y_order"):
            fields[name] = "column" if rng.random() < 0.15 else "row"
        for name in ("scale_x", "scale_w"):
            fields[name] = "none" if rng.random() < 0.7 else _pick(rng, ("tensor", "row"))
        fields |= _c_and_bounds(rng, fields)
    fields |= _quantization(rng, fields["element"])
    epilogue = fields.get("epilogue", EpilogueKind.IDENTITY)
    slow = epilogue in (EpilogueKind.BIAS_GELU, EpilogueKind.BIAS_GEGLU)
    most = min(limits.results, _SLOW_RESULTS) if slow else limits.results
    sizes = _sizes(rng, limits, most, GATE_GROUP if epilogue.is_gated else 1)
    desc = GemmSparse24Descriptor(**fields, **sizes)
    rows = rng.permutation(desc.n)[: int(rng.integers(1, min(desc.n, 300) + 1))] if desc.n else ()
    widths = desc.element.itemsize, desc.out_element.itemsize, desc.c_element.itemsize
    return Product(
        desc,
        _preference(rng, host=limits is HOST),
        str(_pick(rng, ("normal", "positive", "wide", "small", "zeros", "integers"))),
        tuple(_distance(rng, size) for size in widths),
        tuple(_distance(rng, size) for size in widths),
        desc.has_c and desc.c_element is desc.out_element and rng.random() < 0.4,
        tuple(map(int, rows)),
        data_seed,
    )


def _elements(rng: np.random.Generator, element: str, *, fp8: bool) -> dict[str, Any]:
    """The element with a type of X and, with ``fp8`` sometimes of 8 bits, of the result."""
    found: dict[str, Any] = {"element": element, "out_element": _pick(rng, _GEMM_RESULTS[element])}
    if element in _FP8:
        found["x_element"] = _pick(rng, _FP8)
    if fp8 and element in ("f16", "bf16", *_FP8) and rng.random() < 0.3:
        found |= {"out_element": _pick(rng, _FP8), "amax": bool(rng.random() < 0.5)}
        found["scale_y"] = _pick(rng, ("none", "tensor"))
    return found


def _quantization(rng: np.random.Generator, element: str) -> dict[str, Any]:
    """Sometimes a quantized weight."""
    if element not in ("f16", "bf16") or rng.random() > 0.25:
        return {}
    return {
        "weight_element": _pick(rng, ("s4", "s8", "fp8_e4m3")),
        "weight_group": _pick(rng, (0, 32, 64, 128)),
        "weight_scale_element": _pick(rng, (element, "f32")),
    }


def _grouped(rng: np.random.Generator, limits: Limits, data_seed: tuple[int, ...]) -> GroupedProduct:
    """Up to 40 groups, or 1,024 small ones; a fifth of the offsets are hostile."""
    host = limits is HOST
    groups = int(2 ** rng.uniform(0, 5.3 if host or rng.random() < 0.8 else 10))
    element = _pick(rng, ("f32", "f16", "bf16", "s8", *_FP8))
    is_dgrad = rng.random() < 0.2
    fields = _elements(rng, element, fp8=not is_dgrad)
    if is_dgrad:
        fields["op"] = "dgrad"
    elif rng.random() < 0.5:
        fields["epilogue"] = _pick(rng, ("bias", "silu", "swiglu", "bias_geglu"))
        if fields["out_element"] == "i32" and fields["epilogue"].endswith("glu"):
            fields["out_element"] = "s8"
        fields["bias_element"] = _default_bias(fields)
    for name in ("scale_x", "scale_w"):
        plain = "op" in fields or element in ("f32", "f16", "bf16")
        fields[name] = "none" if plain else _pick(rng, ("none", "tensor", "row"))
    m, k = 64 * int(rng.integers(1, 3 if host else 9)), 32 * int(rng.integers(1, 5 if host else 40))
    n = int(2 ** rng.uniform(0, 6 if host else 11))
    counts = rng.random() < 0.3
    if counts:
        fields["group_tokens"], n = "counts", -(-n // groups) * groups
    most = n // groups if counts else n
    tokens = rng.integers(0, most + 1, groups if counts else groups + 1)
    if not counts:
        tokens.sort()
    if rng.random() < 0.2:
        tokens[rng.integers(len(tokens))] = _pick(rng, (-1, -(2**31), 2**31 - 1, most + 1, 0))
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, groups=groups, **fields)
    pad = 16 * int(rng.integers(0, 2))
    return GroupedProduct(desc, _preference(rng, host=host), tuple(map(int, tokens)), pad, data_seed)


def _c_and_bounds(rng: np.random.Generator, fields: dict[str, Any]) -> dict[str, Any]:
    """Sometimes beta and C's type, and bounds of relu."""
    found: dict[str, Any] = {}
    epilogue = fields.get("epilogue", EpilogueKind.IDENTITY)
    if not epilogue.is_gated and rng.random() < 0.3:
        found["beta"] = float(_pick(rng, (1.0, -1.0, 0.5, 1 / 3, rng.standard_normal())))
        own = "bf16" if fields["out_element"] in _FP8 else fields["out_element"]
        found["c_element"] = str(_pick(rng, (own, "f32")))
    if epilogue.activation is EpilogueKind.RELU and rng.random() < 0.3:
        threshold = float(_pick(rng, (0.0, 0.5, -1.5)))
        found |= {"relu_threshold": threshold, "relu_upper_bound": _pick(rng, (6.0, None))}
    return found


def _default_bias(fields: dict[str, Any]) -> str:
    if fields["out_element"] in _FP8:
        return "bf16"
    if fields["element"] in ("s8", *_FP8):
        return "f32" if fields["out_element"] in ("s8", "i32") else str(fields["out_element"])
    return str(fields["element"])


def _distance(rng: np.random.Generator, size: int) -> int:
    """Elements more than none: mostly such that 16 bytes stay whole."""
    kind = rng.random()
    if kind < 0.5:
        return 0
    return int(rng.integers(1, 20)) * (16 // size if kind < 0.85 else 1)


def _preference(rng: np.random.Generator, *, host: bool) -> PlanPreference:
    wanted: dict[str, Any] = {"require": {name: True for name in _PROMISES if rng.random() < 0.12}}
    if host and rng.random() < 0.15:
        wanted["require"]["arithmetic"] = str(_pick(rng, _ARITHMETICS))
    names = [name for name in backends() if host or not name.startswith("host")]
    if rng.random() < 0.3:
        wanted["prefer_backend"] = _pick(rng, names)
    if rng.random() < 0.1:
        wanted["tier"] = _pick(rng, Tier)
    if rng.random() < 0.1:
        wanted["max_workspace_bytes"] = int(2 ** rng.uniform(0, 30)) - 1
    if rng.random() < 0.1:
        wanted["allow_sm90a"] = False
    return PlanPreference.of(wanted)


def _preparation(rng: np.random.Generator, limits: Limits, data_seed: tuple[int, ...]) -> Preparation:
    kind = _pick(rng, PLANS)
    name = kind.__name__.removesuffix("Sparse24Descriptor")
    fields: dict[str, Any] = {"element": _pick(rng, PACKED_ELEMENTS if name == "Pack" else PREPARED)}
    without: tuple[str, ...] = ()
    if name in ("Prune", "PruneCompress") and rng.random() < 0.4:
        fields["scores"] = _pick(rng, ("f32", "f16", "bf16"))
    if name == "Prune":
        without = _pick(rng, ((), ("mask",), ("pruned",)))
    if name == "TilePrune":
        fields["rule"] = _pick(rng, TileRule)
    if name == "Pack":
        fields["direction"] = _pick(rng, ("pack", "unpack"))
    if name == "Quantize":
        fields = {
            "element": _pick(rng, ("f32", "f16", "bf16")),
            "out_element": _pick(rng, ("fp8_e4m3", "s8")),
        }
        fields["static_scale"] = rng.random() < 0.3
    if kind in ON_HOST_ALONE:
        if limits is not HOST:
            return _preparation(rng, limits, data_seed)
        fields = {"element": _pick(rng, ("f16", "bf16")), "stored": _pick(rng, ("s4", "s8", "fp8_e4m3"))}
        fields |= {"group": _pick(rng, (0, 32, 64, 128))}
        fields["scale_element"] = _pick(rng, (fields["element"], "f32"))
    if name == "PruneQuantize":
        fields |= {"dense_element": _pick(rng, ("f32", "f16", "bf16")), "rule": _pick(rng, ScaleRule)}
        fields |= _pick(rng, ({}, {"sparse": True}, {"scores": "f32"}, {"scores": "bf16"}))
    if name == "Mask":
        fields["layout"] = _pick(rng, ("rows", "tiles"))
    squares = kind is TilePruneSparse24Descriptor or fields.get("layout") == "tiles"
    m = _size(rng, min(limits.side, limits.cells // 8), 8 if squares else 1)
    k = _size(rng, min(limits.side, limits.cells // max(m, 1)), 1 if name == "Quantize" else 8)
    return Preparation(kind(m=m, k=k, **fields), str(_pick(rng, MOODS)), without, data_seed)


def _layout(rng: np.random.Generator, cells: int) -> BlockSparseLayout:
    """Return a layout of at most so many cells, but at least one block."""
    block = int(_pick(rng, (16, 16, 32, 64, 128)))
    heads = int(rng.integers(1, 4)) if rng.random() < 0.95 else 0
    most = max(1, cells // (max(heads, 1) * block * block))
    rows = _size(rng, min(most, 8))
    cols = _size(rng, max(1, min(most // max(rows, 1), 8)))
    kept = rng.random((heads, rows, cols)) < _pick(rng, (0.0, 0.1, 0.3, 0.6, 1.0))
    return BlockSparseLayout(kept, block)


def _block_problem(rng: np.random.Generator, data_seed: tuple[int, ...]) -> BlockProblem:
    layout, preference = _layout(rng, 1 << 15), _preference(rng, host=True)
    batch = int(_pick(rng, (1, 1, 2, 3, 0)))
    kind = rng.random()
    if kind > 0.8:
        desc, layout = _convolution(rng, batch, ("f32", "f16", "bf16"), (16, 16, 32))
        return BlockProblem(desc, layout, preference, data_seed)
    if kind < 0.5:
        make = _softmax if kind < 0.25 else _attention
        return BlockProblem(make(rng, layout, batch), layout, preference, data_seed)
    element = _pick(rng, _RESULTS)
    fields: dict[str, Any] = {"element": element, "out_element": _pick(rng, _RESULTS[element])}
    fields |= {"op": _pick(rng, BlockSparseOp), "alpha": _alpha(rng), "n": _size(rng, 40)}
    fields |= {name: rng.random() < 0.5 for name in ("trans_a", "trans_b")}
    if fields["op"] is not BlockSparseOp.SDD and rng.random() < 0.5:
        fields |= {"epilogue": _pick(rng, UNGATED), "bias_element": _default_bias(fields)}
    if _may_be_2_4(layout, fields) and rng.random() < 0.5:
        fields["inner"] = "sparse24"
    elif fields["op"] is not BlockSparseOp.SDD and rng.random() < 0.3:
        fields["packed"] = True
    desc = BlockSparseMatmulDescriptor(layout=layout, batch=batch, **fields)
    return BlockProblem(desc, layout, preference, data_seed)


def _block_problem_of_gpu(rng: np.random.Generator, data_seed: tuple[int, ...]) -> BlockProblem:
    """Draw a problem that some kernel of the GPU serves without a preference."""
    layout, preference = _layout(rng, 1 << 19), _preference(rng, host=False)
    if rng.random() < 0.25:
        desc, layout = _convolution(rng, int(_pick(rng, (1, 2, 9, 0))), ("f16", "bf16"), (16, 32, 64, 128))
        return BlockProblem(desc, layout, preference, data_seed)
    if layout.shape.block >= 64 and rng.random() < 0.7:
        return BlockProblem(_attention_of_gpu(rng, layout), layout, preference, data_seed)
    element = _pick(rng, ("f32", "f16", "bf16", "bf16", "s8", "fp8_e4m3"))
    of_8_bits = element in ("s8", "fp8_e4m3")
    fields: dict[str, Any] = {"element": element, "out_element": _pick(rng, _RESULTS[element])}
    fields |= {"op": _pick(rng, BlockSparseOp), "alpha": _alpha(rng)}
    fields["n"] = _size(rng, 600, 1 if rng.random() < 0.5 else 16 if of_8_bits else 8)
    fields |= {name: rng.random() < 0.5 for name in ("trans_a", "trans_b")}
    if of_8_bits and rng.random() < 0.7:
        fields |= {"trans_a": False, "trans_b": True}  # what the tensor cores take
    if fields["op"] is not BlockSparseOp.SDD and rng.random() < 0.5:
        fields |= {"epilogue": _pick(rng, UNGATED), "bias_element": _default_bias(fields)}
    batch = int(_pick(rng, (1, 1, 2, 3, 0)))
    if _may_be_2_4(layout, fields) and rng.random() < 0.6:
        fields["inner"] = "sparse24"
    elif fields["op"] is not BlockSparseOp.SDD and rng.random() < 0.4:
        fields["packed"] = True
    if element in ("f16", "bf16") and rng.random() < 0.3:
        # The kernels for few tokens serve also where another one would be chosen.
        fields["n"] = _size(rng, 64 if fields["op"] is BlockSparseOp.SDD else 80)
        preference = preference.model_copy(update={"prefer_backend": "blocks_mma"})
    desc = BlockSparseMatmulDescriptor(layout=layout, batch=batch, **fields)
    return BlockProblem(desc, layout, preference, data_seed)


def _may_be_2_4(layout: BlockSparseLayout, fields: dict[str, Any]) -> bool:
    half = layout.shape.block >= 64 and fields["element"] in ("f16", "bf16")
    return half and fields["op"] is not BlockSparseOp.SDD


def _block_softmax_of_gpu(rng: np.random.Generator, data_seed: tuple[int, ...]) -> BlockProblem:
    layout, preference = _layout(rng, 1 << 19), _preference(rng, host=False)
    desc = _softmax(rng, layout, int(_pick(rng, (1, 1, 2, 3, 0))))
    return BlockProblem(desc, layout, preference, data_seed)


def _softmax(rng: np.random.Generator, layout: BlockSparseLayout, batch: int) -> BlockSparseSoftmaxDescriptor:
    fields: dict[str, Any] = {
        "element": _pick(rng, ("f32", "f16", "bf16")),
        "op": _pick(rng, BlockSparsePass),
    }
    fields["scale"] = float(_pick(rng, (1.0, 0.125, 0.0, -3.0, rng.standard_normal())))
    if fields["op"] is BlockSparsePass.FORWARD:
        fields |= {name: rng.random() < 0.5 for name in ("rpe", "causal")}
        fields |= {name: _pick(rng, AttentionMask) for name in ("key_padding_mask", "attn_mask")}
    return BlockSparseSoftmaxDescriptor(layout=layout, batch=batch, **fields)


def _attention(
    rng: np.random.Generator, layout: BlockSparseLayout, batch: int
) -> BlockSparseAttentionDescriptor:
    heads = layout.shape.heads
    fields: dict[str, Any] = {
        "element": _pick(rng, ("f32", "f16", "bf16")),
        "op": _pick(rng, BlockSparsePass),
    }
    fields["kv_heads"] = int(
        _pick(rng, [count for count in range(1, heads + 1) if heads % count == 0] or [0])
    )
    if rng.random() < 0.5:
        fields["scale"] = float(_pick(rng, (1.0, 0.0, -0.5)))
    fields |= {name: rng.random() < 0.5 for name in ("causal", "lengths")}
    fields["dropout"] = float(_pick(rng, (0.0, 0.0, 0.1, 0.5, rng.random() * MOST_DROPOUT, MOST_DROPOUT)))
    size = max(1, _size(rng, 40))
    return BlockSparseAttentionDescriptor(layout=layout, batch=batch, head_size=size, **fields)


def _convolution(
    rng: np.random.Generator, batch: int, elements: tuple[str, ...], blocks: tuple[int, ...]
) -> tuple[BlockSparseConv2dDescriptor, BlockSparseLayout]:
    """With a layout of its own, as a kernel's taps have it. What the GPU's kernel serves."""
    kernel, stride, dilation, padding = (
        (int(rng.integers(least, most)), int(rng.integers(least, most)))
        for least, most in ((1, 5), (1, 4), (1, 4), (0, 4))
    )
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    op, block, element = _pick(rng, BlockSparseConvOp), int(_pick(rng, blocks)), _pick(rng, elements)
    if op is BlockSparseConvOp.WGRAD and "f32" not in elements:
        block = max(block, 64)
    rows, channels = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    kept = rng.random((1, rows, channels * kernel[0] * kernel[1])) < _pick(rng, (0.0, 0.2, 0.5, 1.0))
    layout = BlockSparseLayout(kept, block)
    fields: dict[str, Any] = {"op": op, "element": element, "out_element": _pick(rng, _RESULTS[element])}
    fields["alpha"] = _alpha(rng)
    if op is BlockSparseConvOp.FORWARD and rng.random() < 0.5:
        fields |= {"epilogue": _pick(rng, UNGATED), "bias_element": _default_bias(fields)}
    height, width = (one + int(rng.integers(0, 9)) for one in least)
    walk = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    size = {"height": height, "width": width, "batch": batch}
    return BlockSparseConv2dDescriptor(layout=layout, **size, **walk, **fields), layout


def _attention_of_gpu(rng: np.random.Generator, layout: BlockSparseLayout) -> BlockSparseAttentionDescriptor:
    desc = _attention(rng, layout, int(_pick(rng, (1, 1, 2, 3, 0))))
    scale = desc.scale or 0.125
    size = int(_pick(rng, (64, 128, 8 * rng.integers(1, 33))))
    fields = {"head_size": size, "element": _pick(rng, ("f16", "bf16")), "scale": scale}
    return BlockSparseAttentionDescriptor(**{**desc.model_dump(exclude_unset=True), **fields})


# Data ---------------------------------------------------------------------------------------------


def _shaped(values: np.ndarray, mood: str, rng: np.random.Generator, element: ElementKind) -> np.ndarray:
    wide = values.astype(np.float64)
    if mood == "positive":  # nothing cancels: every rounding of a sum goes the same way
        wide = np.abs(wide) + 1
    elif mood == "wide":
        wide = wide * 2.0 ** rng.integers(-8, 9, wide.shape)
    elif mood == "small":
        wide = wide * 2.0**-10
    elif mood == "zeros":
        wide = np.where(rng.random(wide.shape) < 0.2, wide, 0)
    elif mood == "integers":
        wide = np.rint(wide * 4)
    most = 448.0 if element is ElementKind.FP8_E4M3 else 2.0**15
    return np.clip(wide, -most, most).astype(np.float32).astype(element.dtype)


def _shaped_integers(data: Data, mood: str, rng: np.random.Generator) -> Data:
    if mood == "wide":
        return replace(data, dense=np.sign(data.dense) * 127 - (data.dense < 0), x=np.full_like(data.x, -128))
    if mood == "zeros":
        return replace(data, x=np.where(rng.random(data.x.shape) < 0.2, data.x, 0).astype(np.int8))
    return data
