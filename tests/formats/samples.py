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
    bits = weight.decompress().view(weight.element.bits_dtype)
    return bool((weight_of(bits, weight.element).metadata == weight.metadata).all())


def random_bits(rng: np.random.Generator, m: int, k: int, name: str, element: ElementKind) -> np.ndarray:
    """Dense bits of any kind (NaN payloads, infinities, -0.0) that the format can hold."""
    subsets = allowed_positions(name, element)
    masks = np.array([[i in subset for i in range(4)] for subset in subsets])
    keep = masks[rng.integers(len(subsets), size=m * k // 4)]
    size = element.itemsize
    bits = rng.integers(0, 256, (m * k // 4, 4, size), np.uint8).view(element.bits_dtype)[..., 0]
    specials = {4: [0x80000000, 0x7F800000, 0xFFC12345], 2: [0x8000, 0x7C00, 0x7F80, 0xFE01], 1: [0x80, 0x7F]}
    odd = rng.random(bits.shape) < 0.2
    bits[odd] = rng.choice(np.array(specials[size], bits.dtype), odd.sum())
    if name == "torch_tile":
        tile = np.kron(np.eye(2, dtype=bool), np.ones((2, 2), bool))
        keep &= np.tile(tile, (m // 4, k // 4)).reshape(-1, 4)
    return np.where(keep, bits, 0).reshape(m, k).astype(element.bits_dtype)


def _slots(used: list[int]) -> list[int]:
    """The positions of a group's two slots: spare ones are at the lowest free positions."""
    return sorted((used + [i for i in range(4) if i not in used])[:2])


def weight_of(bits: np.ndarray, element: ElementKind) -> Sparse24Weight:
    """The lawful weight of dense bits, where any bits count as occupied: made by the definition."""
    groups = bits.reshape(-1, 4)
    which = (groups != 0) @ (1 << np.arange(4))  # bit i of this number: position i is occupied
    slots = np.array([_slots([i for i in range(4) if number >> i & 1]) for number in range(16)])[which]
    values = np.take_along_axis(groups, slots, 1)
    codes = (slots[:, 0] | slots[:, 1] << 2).astype(np.uint8)
    m, k = bits.shape
    metadata = codes.view("<u2").reshape(m, k // 8)
    return Sparse24Weight(values.reshape(m, k // 2), metadata, element=element)


def f16_weight(m: int = 32, k: int = 64) -> Sparse24Weight:
    return weight_of(
        random_bits(np.random.default_rng(0), m, k, "tilelang", ElementKind.F16), ElementKind.F16
    )
