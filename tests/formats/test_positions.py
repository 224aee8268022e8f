"""``from_foreign`` normalises positions: whatever a writer left there, the dense matrix decides."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import ElementKind, FormatError, from_foreign, to_foreign
from sparse24_plans.formats.table import FORMATS

from ..support import check_each, same_bits
from .samples import f16_weight, lawful, quick, random_bits, weight_of


def baracuda(pairs: list[tuple[int, int]], codes: list[int]) -> dict[str, np.ndarray]:
    """A weight of one row whose groups have these values and metadata bytes."""
    return {
        "compressed": np.array(pairs, np.uint16).reshape(1, -1).view(np.float16),
        "metadata": np.array(codes, np.uint8).view("<u2").reshape(1, -1),
    }


@pytest.mark.parametrize("values", [(1, 2), (1, 0), (0, 2), (0, 0), (0x8000, 2), (0x8000, 0)])
def test_any_positions_are_normalised(values):
    """Every nibble with every occupancy: the dense matrix decides, and stray bits above don't matter."""
    cases = ({"code": code, "high": high} for code in range(16) for high in (0x00, 0xF0, 0x50))
    check_each(partial(check_that_positions_are_normalised, values), cases)


def check_that_positions_are_normalised(values, code, high):
    dense: dict[int, int] = {}
    for value, position in zip(values, (code & 3, code >> 2), strict=True):
        if value:
            dense[position] = value if position not in dense or value != 0x8000 else dense[position]
    parts = baracuda([values, (0, 0)], [code | high, 0x4])
    if code & 3 == code >> 2 and values == (1, 2):
        with pytest.raises(FormatError, match=f"expected two positions, got {code & 3} for two") as caught:
            from_foreign("baracuda", parts)
        assert (caught.value.row, caught.value.group) == (0, 0)
        return
    weight = from_foreign("baracuda", parts)
    assert lawful(weight)
    expected = np.zeros(8, np.uint16)
    for position, value in dense.items():
        expected[position] = value
    assert weight.decompress().view(np.uint16).tolist() == [expected.tolist()]


def test_a_value_that_is_given_twice_is_one():
    """TileLang's compressor writes a group whose one non-zero is at 0 so: positions (0, 0)."""
    weight = from_foreign("baracuda", baracuda([(5, 5), (0, 0)], [0, 0]))
    assert weight.decompress().view(np.uint16)[0].tolist() == [5, 0, 0, 0, 0, 0, 0, 0]
    assert lawful(weight)


def tilelang_compress(dense: np.ndarray, word_bytes: int) -> dict[str, np.ndarray]:
    """``tilelang.utils.sparse.compress``, cell by cell, from its kernel's source (commit 040fd15)."""
    m, k = dense.shape
    values = np.zeros((m, k // 2), dense.dtype)
    meta = np.zeros((m, k // (8 * word_bytes)), f"u{word_bytes}")
    for row, group in np.ndindex(m, k // 4):
        found = [i for i in range(4) if dense[row, 4 * group + i] != 0]
        for slot, position in enumerate([*found, 0, 0][:2]):
            values[row, 2 * group + slot] = dense[row, 4 * group + position]
            word, nibble = divmod(group, 2 * word_bytes)
            meta[row, word] |= position << (4 * nibble + 2 * slot)
    return {"packed": values, "meta": meta.view(f"i{word_bytes}")}


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
@pytest.mark.parametrize("element", [ElementKind.F16, ElementKind.S8, ElementKind.FP8_E4M3])
def test_what_tilelangs_compressor_writes(element, word_bytes):
    rng = np.random.default_rng(word_bytes)
    bits = random_bits(rng, 8, 64, "tilelang", element)
    dense = np.where(bits.view(element.dtype) == 0, np.zeros((), bits.dtype), bits).view(element.dtype)
    weight = from_foreign("tilelang", tilelang_compress(dense, word_bytes), word_bytes=word_bytes)
    assert lawful(weight)
    assert same_bits(weight.decompress(), dense)


def test_of_zero_and_value_at_one_position_value_stays():
    for values in ((0x8000, 5), (5, 0x8000)):
        weight = from_foreign("baracuda", baracuda([values, (0, 0)], [0b1010, 0x4]))
        assert weight.decompress().view(np.uint16)[0].tolist() == [0, 0, 5, 0, 0, 0, 0, 0]


@quick
@given(seed=st.integers(0, 2**32))
def test_uninitialised_positions_of_absent_values(seed):
    """Tile packers leave garbage in groups where pruning kept fewer than two."""
    rng = np.random.default_rng(seed)
    weight = weight_of(random_bits(rng, 32, 64, "tilelang", ElementKind.BF16), ElementKind.BF16)
    values = weight.values.view(np.uint16).reshape(-1, 2)
    codes = weight.metadata.reshape(-1).view(np.uint8).copy()
    for slot in range(2):
        garbage = rng.integers(0, 4, len(codes)).astype(np.uint8)
        keep = np.uint8(3 << 2 * (1 - slot))
        codes = np.where(values[:, slot] == 0, codes & keep | garbage << np.uint8(2 * slot), codes)
    parts = to_foreign("baracuda", weight)
    parts["metadata"] = codes.astype(np.uint8).view("<u2").reshape(32, 8)
    back = from_foreign("baracuda", parts, element="bf16")
    assert same_bits(back.values, weight.values)
    assert same_bits(back.metadata, weight.metadata)


@quick
@given(data=st.data())
def test_random_metadata_gives_a_valid_weight_or_a_typed_error(data):
    name = data.draw(st.sampled_from(["torch_cutlass", "cutlass_sm90", "tilelang", "baracuda"]))
    parts = dict(to_foreign(name, f16_weight()))
    metadata = next(part for part in parts if part.startswith("meta"))
    noise = np.random.default_rng(data.draw(st.integers(0, 99))).integers(
        0, 256, parts[metadata].nbytes, np.uint8
    )
    parts[metadata] = noise.view(parts[metadata].dtype).reshape(parts[metadata].shape)
    if data.draw(st.booleans()):
        parts[FORMATS[name].parts[0]] = np.zeros((32, 32), np.float16)
    try:
        weight = from_foreign(name, parts)
    except FormatError as error:
        weight = None
        located = error.row is not None and error.group is not None
    assert lawful(weight) if weight is not None else located
