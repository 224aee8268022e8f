"""Random problems. Each follows from a seed, its number and the kind of device alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from sparse24_plans import (
    ElementKind,
    EpilogueKind,
    GemmSparse24Descriptor,
    PlanPreference,
    ScaleRule,
    TileRule,
)
from sparse24_plans.prepare.descriptor import PrepareDescriptor, TilePruneSparse24Descriptor
from sparse24_plans.prepare.kernel_table import PACKED_ELEMENTS
from sparse24_plans.weights.gates import GATE_GROUP

from ..gemm.grouped_cases import Routing
from ..prepare.prepare_cases import ELEMENTS as PREPARED
from ..prepare.prepare_cases import MOODS, ON_HOST_ALONE, PLANS
from ..support import Data, random_data
from .batches import BatchedProduct, batches_of
from .block_problems import BlockProblem, block_problem_of_gpu, block_problem_of_host, block_softmax_of_gpu
from .draws import FP8, RESULTS, alpha_of, default_bias, pick, preference_of, size_of
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
_GEMM_RESULTS = RESULTS | {"fp8_e5m2": RESULTS["fp8_e4m3"]}
"""Results of products that need no scale."""


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
    tokens: tuple[Any, ...]
    """Offsets or counts of the groups, or the experts of each row. They may be hostile."""
    pad: int
    in_place: bool
    """Whether c is y."""
    data_seed: tuple[int, ...] = field(repr=False)

    def routing(self) -> Routing:
        """Indices, some of which name no row, and often weights."""
        rng, desc = np.random.default_rng((*self.data_seed, 1)), self.desc
        found = Routing()
        if desc.group_tokens == "experts":
            if desc.y_rows is not None and rng.random() < 0.7:
                found.y_weights = rng.standard_normal((desc.y_rows, desc.top_k), np.float32)
            return found
        if desc.x_rows is not None:
            found.x_index = rng.integers(-2, desc.x_rows + 2, desc.n, np.int32)
        if desc.y_rows is not None:
            found.y_index = rng.integers(-2, desc.n + 2, (desc.y_rows, desc.top_k), np.int32)
            if rng.random() < 0.7:
                found.y_weights = rng.standard_normal(found.y_index.shape, np.float32)
        return found


@dataclass(frozen=True)
class Preparation:
    """Something done to a weight."""

    desc: PrepareDescriptor
    mood: str
    without: tuple[str, ...]
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
            return block_softmax_of_gpu(rng, (*key, 1))
        return block_problem_of_gpu(rng, (*key, 1)) if on_gpu else block_problem_of_host(rng, (*key, 1))
    limits = GPU if on_gpu else HOST
    if rng.random() < 0.3:
        return _preparation(rng, limits, (*key, 1))
    if rng.random() < 0.15:
        return _grouped(rng, limits, (*key, 1))
    product = _product(rng, limits, (*key, 1))
    return batches_of(rng, product) if rng.random() < 0.2 else product


# Products and preparation -------------------------------------------------------------------------------


def _sizes(rng: np.random.Generator, limits: Limits, most_results: int, unit_of_m: int = 1) -> dict[str, int]:
    """In a random order: what comes last gets what the others leave."""
    found: dict[str, int] = {}
    for name in rng.permutation(["n", "m", "k"]):
        left = limits.products // max(1, math.prod(found.values()))
        if name != "k":
            left = min(left, most_results // max(1, found.get("n", 1) * found.get("m", 1)))
        found[name] = size_of(rng, min(limits.side, left), {"k": 8, "m": unit_of_m}.get(name, 1))
    return found


def _product(rng: np.random.Generator, limits: Limits, data_seed: tuple[int, ...]) -> Product:
    forward = rng.random() < 0.85
    fields = _elements(rng, pick(rng, _GEMM_RESULTS), fp8=forward)
    fields["alpha"] = alpha_of(rng)
    if not forward:
        fields["op"] = "dgrad"
    else:
        if rng.random() < 0.6:
            fields |= _epilogue(rng, fields)
        for name in ("x_order", "y_order"):
            fields[name] = "column" if rng.random() < 0.15 else "row"
        for name in ("scale_x", "scale_w"):
            fields[name] = "none" if rng.random() < 0.7 else pick(rng, ("tensor", "row"))
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
        preference_of(rng, host=limits is HOST),
        str(pick(rng, ("normal", "positive", "wide", "small", "zeros", "integers"))),
        tuple(_distance(rng, size) for size in widths),
        tuple(_distance(rng, size) for size in widths),
        desc.has_c and desc.c_element is desc.out_element and rng.random() < 0.4,
        tuple(map(int, rows)),
        data_seed,
    )


def _elements(rng: np.random.Generator, element: str, *, fp8: bool) -> dict[str, Any]:
    """The element with a type of X and, with ``fp8`` sometimes of 8 bits, of the result."""
    found: dict[str, Any] = {"element": element, "out_element": pick(rng, _GEMM_RESULTS[element])}
    if element in FP8:
        found["x_element"] = pick(rng, FP8)
    if fp8 and element in ("f16", "bf16", *FP8) and rng.random() < 0.3:
        found |= {"out_element": pick(rng, FP8), "amax": bool(rng.random() < 0.5)}
        found["scale_y"] = pick(rng, ("none", "tensor"))
    return found


def _quantization(rng: np.random.Generator, element: str) -> dict[str, Any]:
    """Sometimes a quantized weight."""
    if element not in ("f16", "bf16") or rng.random() > 0.25:
        return {}
    return {
        "weight_element": pick(rng, ("s4", "s8", "fp8_e4m3")),
        "weight_group": pick(rng, (0, 32, 64, 128)),
        "weight_scale_element": pick(rng, (element, "f32")),
    }


def _grouped(rng: np.random.Generator, limits: Limits, data_seed: tuple[int, ...]) -> GroupedProduct:
    """Up to 40 groups, or 1,024 small ones; a fifth of the offsets are hostile."""
    host = limits is HOST
    groups = int(2 ** rng.uniform(0, 5.3 if host or rng.random() < 0.8 else 10))
    element = pick(rng, ("f32", "f16", "bf16", "s8", *FP8))
    is_dgrad = rng.random() < 0.2
    fields = _elements(rng, element, fp8=not is_dgrad)
    if is_dgrad:
        fields["op"] = "dgrad"
    elif rng.random() < 0.5:
        fields |= {**_epilogue(rng, fields), "alpha": alpha_of(rng)}
    for name in ("scale_x", "scale_w"):
        plain = "op" in fields or element in ("f32", "f16", "bf16")
        fields[name] = "none" if plain else pick(rng, ("none", "tensor", "row"))
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
        tokens[rng.integers(len(tokens))] = pick(rng, (-1, -(2**31), 2**31 - 1, most + 1, 0))
    if rng.random() < 0.3:
        fields["x_rows"] = int(rng.integers(1, 2 * n + 2))
    if not is_dgrad and rng.random() < 0.7:
        fields |= _c_and_bounds(rng, fields)
    fields |= _quantization(rng, element)
    if rng.random() < 0.3 and fields["out_element"] in ("f32", "f16", "bf16") and "beta" not in fields:
        top_k = int(rng.integers(1, 10))
        fields |= {"y_rows": int(rng.integers(0, 2 * n // top_k + 2)), "top_k": top_k}
    chosen = tuple(map(int, tokens))
    if not counts and rng.random() < 0.3:
        n, chosen = _by_experts(rng, groups, n, fields)
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, groups=groups, **fields)
    pad = 16 * int(rng.integers(0, 2))
    in_place = desc.has_c and desc.c_element is desc.out_element and rng.random() < 0.4
    return GroupedProduct(desc, preference_of(rng, host=host), chosen, pad, in_place, data_seed)


def _by_experts(
    rng: np.random.Generator, groups: int, n: int, fields: dict[str, Any]
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """About n choices of random experts, with a field for each thing that follows from them."""
    top_k = int(rng.integers(1, 9))
    rows = -(-n // top_k)
    fields |= {"group_tokens": "experts", "top_k": top_k}
    fields |= {name: rows for name in ("x_rows", "y_rows") if fields.get(name) is not None}
    experts = rng.integers(-1, groups + 1, (rows, top_k))
    if rng.random() < 0.2:
        experts[rng.integers(rows)] = pick(rng, (-(2**31), 2**31 - 1, groups))
    return rows * top_k, tuple(tuple(map(int, row)) for row in experts)


def _epilogue(rng: np.random.Generator, fields: dict[str, Any]) -> dict[str, Any]:
    """An epilogue, with a type of the bias and of results that gates have."""
    kind = pick(rng, EpilogueKind)
    found: dict[str, Any] = {"epilogue": kind}
    if kind.is_gated and fields["out_element"] == "i32":
        found["out_element"] = "s8"
    found["bias_element"] = "f32" if rng.random() < 0.5 else default_bias({**fields, **found})
    return found


def _c_and_bounds(rng: np.random.Generator, fields: dict[str, Any]) -> dict[str, Any]:
    """Sometimes beta and C's type, and bounds of relu."""
    found: dict[str, Any] = {}
    epilogue = fields.get("epilogue", EpilogueKind.IDENTITY)
    if not epilogue.is_gated and rng.random() < 0.3:
        found["beta"] = float(pick(rng, (1.0, -1.0, 0.5, 1 / 3, rng.standard_normal())))
        own = "bf16" if fields["out_element"] in FP8 else fields["out_element"]
        found["c_element"] = str(pick(rng, (own, "f32")))
    if epilogue.activation is EpilogueKind.RELU and rng.random() < 0.3:
        threshold = float(pick(rng, (0.0, 0.5, -1.5)))
        found |= {"relu_threshold": threshold, "relu_upper_bound": pick(rng, (6.0, None))}
    return found


def _distance(rng: np.random.Generator, size: int) -> int:
    """Elements more than none: mostly such that 16 bytes stay whole."""
    kind = rng.random()
    if kind < 0.5:
        return 0
    return int(rng.integers(1, 20)) * (16 // size if kind < 0.85 else 1)


def _preparation(rng: np.random.Generator, limits: Limits, data_seed: tuple[int, ...]) -> Preparation:
    kind = pick(rng, PLANS)
    name = kind.__name__.removesuffix("Sparse24Descriptor")
    fields: dict[str, Any] = {"element": pick(rng, PACKED_ELEMENTS if name == "Pack" else PREPARED)}
    without: tuple[str, ...] = ()
    if name in ("Prune", "PruneCompress") and rng.random() < 0.4:
        fields["scores"] = pick(rng, ("f32", "f16", "bf16"))
    if name == "Prune":
        without = pick(rng, ((), ("mask",), ("pruned",)))
    if name == "TilePrune":
        fields["rule"] = pick(rng, TileRule)
    if name == "Pack":
        fields["direction"] = pick(rng, ("pack", "unpack"))
    if name == "Quantize":
        fields = {
            "element": pick(rng, ("f32", "f16", "bf16")),
            "out_element": pick(rng, ("fp8_e4m3", "s8")),
        }
        fields["static_scale"] = rng.random() < 0.3
    if kind in ON_HOST_ALONE:
        if limits is not HOST:
            return _preparation(rng, limits, data_seed)
        fields = {"element": pick(rng, ("f16", "bf16")), "stored": pick(rng, ("s4", "s8", "fp8_e4m3"))}
        fields |= {"group": pick(rng, (0, 32, 64, 128))}
        fields["scale_element"] = pick(rng, (fields["element"], "f32"))
    if name == "PruneQuantize":
        fields |= {"dense_element": pick(rng, ("f32", "f16", "bf16")), "rule": pick(rng, ScaleRule)}
        fields |= pick(rng, ({}, {"sparse": True}, {"scores": "f32"}, {"scores": "bf16"}))
    if name == "Mask":
        fields["layout"] = pick(rng, ("rows", "tiles"))
    squares = kind is TilePruneSparse24Descriptor or fields.get("layout") == "tiles"
    m = size_of(rng, min(limits.side, limits.cells // 8), 8 if squares else 1)
    k = size_of(rng, min(limits.side, limits.cells // max(m, 1)), 1 if name == "Quantize" else 8)
    return Preparation(kind(m=m, k=k, **fields), str(pick(rng, MOODS)), without, data_seed)


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
