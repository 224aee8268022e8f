"""The tensor cores' arithmetics once more: one result at a time, in exact integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import ml_dtypes
import numpy as np

from sparse24_plans import ElementKind, Sparse24Weight

MIN_EXPONENT = {"f16": -14, "bf16": -126, "fp8_e4m3": -6, "fp8_e5m2": -14}
PRODUCTS = {"f16": 16, "bf16": 16, "fp8_e4m3": 32, "fp8_e5m2": 32}
ALIGNED_BITS = {"f16": 25, "bf16": 25, "fp8_e4m3": 13, "fp8_e5m2": 13}
RESULT_BITS = {"f16": 23, "bf16": 23, "fp8_e4m3": 13, "fp8_e5m2": 13}
PARTS = {"hopper_tc_f32x3": (2, 256, None), "hopper_tc_f32x6": (3, 64, 4096)}
"""Terms of a float32; columns of one tensor-core sum; columns of a blocked sum, which needs one slice."""
TILE_COLUMNS = {"f16": 128, "bf16": 128, "fp8_e4m3": 256, "fp8_e5m2": 256}


UNIT = -298
"""Exponent of the unit of exact integers: no product of two float32 has a smaller bit."""


def exact(value: float) -> int:
    """Return a float32, or a product of two, in units."""
    found = int(math.ldexp(value, -UNIT))
    assert math.ldexp(found, UNIT) == value
    return found


def toward_zero(value: int, unit_exponent: int) -> int:
    """Cut what is below a larger unit."""
    cut = max(unit_exponent - UNIT, 0)
    return (abs(value) >> cut << cut) * (1 if value > 0 else -1)


def exponent(value: float, least: int) -> int:
    return max(math.frexp(value)[1] - 1, least)


def step(a: Sequence[float], b: Sequence[float], c: float, element: str) -> float:
    """One step: the products of ``a`` and ``b``, all the instruction takes, and the accumulator ``c``."""
    assert len(a) == len(b) == PRODUCTS[element]
    products = [x * y for x, y in zip(a, b, strict=True)]
    plain = [*products, c]
    if not all(map(math.isfinite, plain)):
        return math.fsum(plain) if not any(map(math.isnan, plain)) and one_sign(plain) else math.nan
    addends = []
    for x, y, product in zip(a, b, products, strict=True):
        least = MIN_EXPONENT[element]
        if product:
            addends.append((exact(product), exponent(x, least) + exponent(y, least)))
    if c:
        addends.append((exact(c), exponent(c, -126)))
    largest = max([-133, *(e for _, e in addends)])
    total = sum(toward_zero(value, largest - ALIGNED_BITS[element]) for value, _ in addends)
    if total == 0:
        return 0.0
    total = toward_zero(total, max(abs(total).bit_length() - 1 + UNIT, -126) - RESULT_BITS[element])
    return math.copysign(math.inf, total) if abs(total) >= 1 << 128 - UNIT else math.ldexp(total, UNIT)


def one_sign(values: Sequence[float]) -> bool:
    return len({math.copysign(1, value) for value in values if math.isinf(value)}) == 1


def kept(weight: Sparse24Weight, row: int) -> tuple[list[float], list[int]]:
    """Values and columns of a row's kept positions, in increasing columns."""
    values = weight.values[row].astype(np.float32).tolist()
    codes = weight.metadata[row : row + 1].view(np.uint8)[0].tolist()
    columns = [4 * group + at for group, code in enumerate(codes) for at in (code & 3, code >> 2)]
    return values, columns


def slice_sum(w: list[float], x: list[float], element: str) -> np.float32:
    width, acc = PRODUCTS[element], 0.0
    for first in range(0, len(w), width):
        a, b = w[first : first + width], x[first : first + width]
        filled = [0.0] * (width - len(a))
        acc = step(a + filled, b + filled, acc, element)
    return np.float32(acc)


def tensor_core_sum(x: np.ndarray, weight: Sparse24Weight, n: int, m: int, name: str) -> np.float32:
    """``name``: hopper_tc/slices=S, hopper_tc_fp8/slices=S or hopper_tc_fp8/promoted=C."""
    element = str(ElementKind(weight.element))
    values, columns = kept(weight, m)
    source = [float(x[n, column]) for column in columns]
    word, number = name.split("/")[1].split("=")
    if word == "promoted":
        bounds = list(range(0, weight.k, int(number)))
    else:
        tiles = -(-weight.k // TILE_COLUMNS[element])
        bounds = [tiles * s // int(number) * TILE_COLUMNS[element] for s in range(int(number))]
    total = np.float32(0)
    for first, last in zip(bounds, [*bounds[1:], weight.k], strict=True):
        part = slice(first // 2, last // 2)
        total = np.float32(total + slice_sum(values[part], source[part], element))
    return total


# float32 in bf16 terms ----------------------------------------------------------------------------


def parts_of(values: Sequence[float], count: int) -> list[list[float]]:
    """Return the bf16 terms of finite float32 values, the high term first."""
    found, left = [], np.array(values, np.float32)
    for _ in range(count):
        found.append(left.astype(ml_dtypes.bfloat16).astype(np.float32))
        left = left - found[-1]
    return [part.tolist() for part in found]


def sum_in_parts(w: list[float], x: list[float], count: int) -> np.float32:
    """Return one tensor-core sum of kept products: tile by tile, the small products first."""
    acc, ws, xs = 0.0, parts_of(w, count), parts_of(x, count)
    for tile in range(0, len(w), 32):
        for i in reversed(range(count)):
            for j in reversed(range(count - i)):
                for first in range(tile, min(tile + 32, len(w)), 16):
                    last = min(first + 16, len(w))
                    filled = [0.0] * (16 - (last - first))
                    acc = step(ws[j][first:last] + filled, xs[i][first:last] + filled, acc, "bf16")
    return np.float32(acc)


def float32_sum(x: np.ndarray, weight: Sparse24Weight, n: int, m: int, name: str) -> np.float32:
    """``name``: hopper_tc_f32x3/slices=S or hopper_tc_f32x6/slices=S. Operands whose sums are finite."""
    kind, slices = name.split("/slices=")
    count, columns, group = PARTS[kind]
    values, places = kept(weight, m)
    source = [float(x[n, column]) for column in places]
    tiles = -(-weight.k // 64)
    bounds = [tiles * s // int(slices) * 64 for s in range(int(slices))] + [weight.k]
    total = np.float32(0)
    for begin, end in pairwise(bounds):
        of_slice = np.float32(0)
        width = group if group and slices == "1" else weight.k
        for start in range(begin, end, width):
            of_group = np.float32(0)
            for first in range(start, min(start + width, end), columns):
                part = slice(first // 2, min(first + columns, start + width, end) // 2)
                of_group = of_group + sum_in_parts(values[part], source[part], count)
            of_slice = of_slice + of_group
        total = total + of_slice
    return total
