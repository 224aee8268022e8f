"""Every format with its elements, and weights that it can hold."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings

from sparse24_plans import ElementKind, Sparse24Weight
from sparse24_plans.formats.table import FORMATS

quick = settings(max_examples=10)
CASES = [(name, element) for name, known in FORMATS.items() for element in known.elements]
every_case = pytest.mark.parametrize(("name", "element"), CASES, ids=lambda value: str(value))
ONE_OF_TWO = ("torch_cutlass", "cutlass_sm90")  # float32 is 1:2 there
STEPS = {
    "torch_cutlass": (32, 64),
    "tilelang": (1, 32),
    "torch_tile": (8, 8),
    "cutlass_sm90": (1, 32),
    "cusparselt_sm90": (32, 64),
}
STEPS["cusparselt_sm80"] = (128, 128)


def allowed_positions(name: str, element: ElementKind) -> list[tuple[int, ...]]:
    """Subsets of the positions of a group that the format can hold."""
    subsets = [s for count in range(3) for s in itertools.combinations(range(4), count)]
    if name in ONE_OF_TWO and element is ElementKind.F32:
        return [s for s in subsets if len({position // 2 for position in s}) == len(s)]
    return subsets


def lawful(weight: Sparse24Weight) -> bool:
    """Spare slots (those whose bits are zero) are at the lowest free positions: docs/formats.md's table."""
    weight.validate()
    bits = weight.decompress().view(weight.element.bits_dtype).reshape(-1, 4)
    codes = weight.metadata.reshape(-1).view(np.uint8)
    for group, code in zip(bits, codes, strict=True):
        used = [i for i in range(4) if group[i]]
        spare = [i for i in range(4) if not group[i]]
        first, second = sorted((used + spare)[:2])
        if code != first | second << 2:
            return False
    return True


def random_bits(rng: np.random.Generator, m: int, k: int, name: str, element: ElementKind) -> np.ndarray:
    """Dense bits of any kind (NaN payloads, infinities, -0.0) that the format can hold."""
    subsets = allowed_positions(name, element)
    keep = np.zeros((m * k // 4, 4), bool)
    for row, choice in zip(keep, rng.integers(len(subsets), size=len(keep)), strict=True):
        row[list(subsets[choice])] = True
    size = element.itemsize
    bits = rng.integers(0, 256, (m * k // 4, 4, size), np.uint8).view(element.bits_dtype)[..., 0]
    specials = {4: [0x80000000, 0x7F800000, 0xFFC12345], 2: [0x8000, 0x7C00, 0x7F80, 0xFE01], 1: [0x80, 0x7F]}
    odd = rng.random(bits.shape) < 0.2
    bits[odd] = rng.choice(np.array(specials[size], bits.dtype), odd.sum())
    if name == "torch_tile":
        tile = np.kron(np.eye(2, dtype=bool), np.ones((2, 2), bool))
        keep &= np.tile(tile, (m // 4, k // 4)).reshape(-1, 4)
    return np.where(keep, bits, 0).reshape(m, k).astype(element.bits_dtype)


def weight_of(bits: np.ndarray, element: ElementKind) -> Sparse24Weight:
    """The lawful weight of dense bits, where any bits count as occupied: made by the definition."""
    groups = bits.reshape(-1, 4)
    values = np.zeros((len(groups), 2), bits.dtype)
    codes = np.zeros(len(groups), np.uint8)
    for at, group in enumerate(groups):
        used = [i for i in range(4) if group[i]]
        first, second = sorted((used + [i for i in range(4) if not group[i]])[:2])
        values[at], codes[at] = group[[first, second]], first | second << 2
    m, k = bits.shape
    metadata = codes.view("<u2").reshape(m, k // 8)
    return Sparse24Weight(values.reshape(m, k // 2), metadata, element=element)


def f16_weight(m: int = 32, k: int = 64) -> Sparse24Weight:
    return weight_of(
        random_bits(np.random.default_rng(0), m, k, "tilelang", ElementKind.F16), ElementKind.F16
    )
