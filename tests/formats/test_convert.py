"""``from_foreign`` and ``to_foreign``: what comes through, what is normalised, what is refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import ElementKind, FormatError, InvalidProblemError, Sparse24Weight, UnsupportedError
from sparse24_plans.formats.convert import FORMATS, from_foreign, to_foreign
from sparse24_plans.formats.product import from_product

from ..support import same_bits

quick = settings(max_examples=25, deadline=None)
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


# Round trips --------------------------------------------------------------------------------------


@every_case
@quick
@given(data=st.data())
def test_round_trips_lose_no_bit(name, element, data):
    rows, columns = STEPS.get(name, (1, 8))
    m = rows * data.draw(st.integers(1, 3 if rows < 128 else 1))
    k = columns * data.draw(st.integers(1, 6 if columns < 128 else 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weight = weight_of(random_bits(rng, m, k, name, element), element)
    options: dict[str, Any] = {}
    if name == "cutlass_sm90":
        options["tile_k"] = 32 * data.draw(st.integers(1, 5))
    parts = to_foreign(name, weight, **options)
    assert tuple(parts) == FORMATS[name].parts
    if "shape" in FORMATS[name].options:
        options["shape"] = (m, k)
    back = from_foreign(name, parts, **options)
    assert (back.element, back.m, back.k) == (element, m, k)
    assert same_bits(back.values, weight.values)
    assert same_bits(back.metadata, weight.metadata)


@every_case
def test_empty_weights(name, element):
    _, columns = STEPS.get(name, (1, 8))
    for m, k in ((0, columns), (0, 0)):
        weight = weight_of(np.zeros((m, k), element.bits_dtype), element)
        shape = {"shape": (m, k)} if "shape" in FORMATS[name].options else {}
        back = from_foreign(name, to_foreign(name, weight), **shape)
        assert (back.m, back.k) == (m, k)


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
def test_tilelang_words_are_the_same_bytes(word_bytes):
    weight = weight_of(
        random_bits(np.random.default_rng(0), 6, 96, "tilelang", ElementKind.F16), ElementKind.F16
    )
    parts = to_foreign("tilelang", weight, word_bytes=word_bytes)
    assert parts["meta"].dtype.itemsize == word_bytes
    assert parts["meta"].tobytes() == to_foreign("tilelang", weight)["meta"].tobytes()
    back = from_foreign("tilelang", parts, word_bytes=word_bytes)
    assert same_bits(back.values, weight.values)


def test_rows_of_tilelang_can_be_concatenated():
    rng = np.random.default_rng(1)
    weights = [
        weight_of(random_bits(rng, 3, 64, "tilelang", ElementKind.BF16), ElementKind.BF16) for _ in "ab"
    ]
    parts = [to_foreign("tilelang", weight) for weight in weights]
    both = {part: np.concatenate([one[part] for one in parts]) for part in parts[0]}
    joined = from_foreign("tilelang", both).decompress()
    assert same_bits(joined, np.concatenate([weight.decompress() for weight in weights]))


# Normalising --------------------------------------------------------------------------------------


def baracuda(pairs: list[tuple[int, int]], codes: list[int]) -> dict[str, np.ndarray]:
    """A weight of one row whose groups have these values and metadata bytes."""
    return {
        "compressed": np.array(pairs, np.uint16).reshape(1, -1).view(np.float16),
        "metadata": np.array(codes, np.uint8).view("<u2").reshape(1, -1),
    }


@pytest.mark.parametrize("high", [0x00, 0xF0, 0x50])
@pytest.mark.parametrize("code", range(16))
@pytest.mark.parametrize("values", [(1, 2), (1, 0), (0, 2), (0, 0), (0x8000, 2), (0x8000, 0)])
def test_any_positions_are_normalised(values, code, high):
    """Every nibble with every occupancy: the dense matrix decides, and stray bits above don't matter."""
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


def test_of_a_zero_and_a_value_at_one_position_the_value_stays():
    for values in ((0x8000, 5), (5, 0x8000)):
        weight = from_foreign("baracuda", baracuda([values, (0, 0)], [0b1010, 0x4]))
        assert weight.decompress().view(np.uint16)[0].tolist() == [0, 0, 5, 0, 0, 0, 0, 0]


@quick
@given(seed=st.integers(0, 2**32))
def test_uninitialised_positions_of_absent_values(seed):
    """What the tile packers leave: garbage where pruning kept fewer than two."""
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


# Refusals -----------------------------------------------------------------------------------------


def f16_weight(m: int = 32, k: int = 64) -> Sparse24Weight:
    return weight_of(
        random_bits(np.random.default_rng(0), m, k, "tilelang", ElementKind.F16), ElementKind.F16
    )


REFUSED_EXPORTS = [
    ("torch_cutlass", (16, 64), {}, InvalidProblemError, "M a multiple of 32"),
    ("torch_cutlass", (32, 16), {}, InvalidProblemError, "M = 32, K = 16"),
    ("cutlass_sm90", (32, 64), {"tile_k": 48}, InvalidProblemError, "tile_k = 48"),
    ("cutlass_sm90", (32, 64), {"tile_k": 0}, InvalidProblemError, "expected a positive number"),
    ("cutlass_sm90", (32, 64), {"tile_k": "128"}, InvalidProblemError, "got '128'"),
    ("cutlass_sm90", (32, 8), {}, InvalidProblemError, "K a multiple of 16"),
    ("tilelang", (32, 8), {}, InvalidProblemError, "K a multiple of 8 times"),
    ("tilelang", (32, 64), {"word_bytes": 8}, InvalidProblemError, "expected 1, 2 or 4, got 8"),
    ("torch_tile", (4, 64), {}, InvalidProblemError, "multiples of 8"),
    ("cusparselt_sm80", (128, 64), {}, InvalidProblemError, "multiples of 128"),
    ("cusparselt_sm90", (48, 64), {}, InvalidProblemError, "multiples of 32"),
    ("torch_cutlass", (32, 64), {"tile_k": 64}, InvalidProblemError, "takes no such option"),
    ("nonsense", (32, 64), {}, InvalidProblemError, "expected one of baracuda"),
]


@pytest.mark.parametrize(("name", "shape", "options", "kind", "complaint"), REFUSED_EXPORTS)
def test_exports_that_are_refused(name, shape, options, kind, complaint):
    with pytest.raises(kind, match=complaint):
        to_foreign(name, f16_weight(*shape), **options)


def test_an_element_that_the_format_lacks():
    s8 = weight_of(np.zeros((128, 128), np.uint8), ElementKind.S8)
    for name, known in FORMATS.items():
        if ElementKind.S8 not in known.elements:
            with pytest.raises(UnsupportedError, match=f"{name} holds .*, got s8"):
                to_foreign(name, s8)
    with pytest.raises(UnsupportedError, match="torch_tile holds f16, bf16, got f32"):
        from_foreign(
            "torch_tile", {"packed": np.zeros((32, 32), np.float32), "meta": np.zeros(128, np.int16)}
        )


def test_what_isnt_a_weight():
    with pytest.raises(InvalidProblemError, match="expected Sparse24Weight, got ndarray"):
        to_foreign("baracuda", np.zeros((8, 8)))  # type: ignore[arg-type]


def test_two_in_a_pair_of_float32_have_no_place_in_a_one_of_two_format():
    dense = np.zeros((32, 32), np.float32)
    dense[5, 14:16] = 1, 2
    weight = Sparse24Weight.compress(dense)
    for name in ONE_OF_TWO:
        with pytest.raises(FormatError, match="one non-zero in each pair") as caught:
            to_foreign(name, weight)
        assert (caught.value.row, caught.value.group) == (5, 3)


def test_a_matrix_whose_transpose_isnt_sparse():
    dense = np.zeros((32, 64), np.float16)
    dense[8:11, 20] = 1
    with pytest.raises(FormatError, match="transpose") as caught:
        to_foreign("torch_tile", Sparse24Weight.compress(dense))
    assert (caught.value.row, caught.value.group) == (20, 2)


def test_halves_of_a_tile_pack_that_contradict_each_other():
    weight = weight_of(
        random_bits(np.random.default_rng(3), 32, 64, "torch_tile", ElementKind.F16), ElementKind.F16
    )
    parts = to_foreign("torch_tile", weight)
    other = parts["packed_t"].copy()
    at = np.argwhere(other.view(np.uint16) & 0x7FFF)[0]
    other[tuple(at)] = 7
    with pytest.raises(FormatError, match="expected the transpose of packed"):
        from_foreign("torch_tile", {**parts, "packed_t": other})
    with pytest.raises(FormatError, match="every non-zero to be marked"):
        from_foreign("torch_tile", {**parts, "bitmask": np.zeros_like(parts["bitmask"])})
    with pytest.raises(InvalidProblemError, match="meta_t is missing"):
        from_foreign("torch_tile", {name: parts[name] for name in ("packed", "meta", "packed_t")})
    alone = from_foreign("torch_tile", {name: parts[name] for name in ("packed", "meta")})
    assert same_bits(alone.values, weight.values)


def broken_imports() -> list[Any]:
    cutlass = to_foreign("torch_cutlass", f16_weight())
    sm90 = to_foreign("cutlass_sm90", f16_weight())
    blob = to_foreign("cusparselt_sm90", f16_weight())
    bits = to_foreign("compressed_tensors", f16_weight())
    crowded = bits["bitmask"].copy()
    crowded[7, 3] = 0x3F
    sized = {"shape": (32, 64)}
    return [
        ("torch_cutlass", {"packed": cutlass["packed"]}, {}, "torch_cutlass needs 'meta'"),
        ("torch_cutlass", {**cutlass, "extra": cutlass["meta"]}, {}, "got 'extra'"),
        ("torch_cutlass", [cutlass], {}, "expected a mapping"),
        ("torch_cutlass", {**cutlass, "meta": cutlass["meta"][:-1]}, {}, "meta: expected 128 words int16"),
        (
            "torch_cutlass",
            {**cutlass, "meta": cutlass["meta"].view(np.int32)},
            {},
            "meta: expected u16, got int32",
        ),
        (
            "torch_cutlass",
            {**cutlass, "packed": cutlass["packed"][:, :-2]},
            {},
            "K a multiple of 8, got a tensor",
        ),
        ("torch_cutlass", {**cutlass, "packed": cutlass["packed"][:-1]}, {}, "M a multiple of 32"),
        ("torch_cutlass", {**cutlass, "packed": "text"}, {}, "packed: expected a tensor"),
        ("torch_cutlass", cutlass, {"shape": (32, 64)}, "shape: torch_cutlass takes no such option"),
        ("cutlass_sm90", sm90, {"tile_k": 2048}, "meta: expected 16384 words uint8"),
        ("cusparselt_sm90", blob, {}, r"expected shape=\(M, K\)"),
        ("cusparselt_sm90", {"packed": blob["packed"][:-1]}, sized, "packed: expected .* words or more"),
        ("cusparselt_sm90", {"packed": blob["packed"][::2]}, sized, "packed: expected .* words or more"),
        ("cusparselt_sm90", blob, {"shape": (2**40, 2**40)}, "M \\* K from 0 to below"),
        ("cusparselt_sm90", blob, {"shape": (-32, 64)}, "M \\* K from 0 to below"),
        ("cusparselt_sm90", blob, {"shape": (32,)}, "expected two sizes"),
        ("cusparselt_sm90", blob, {"shape": "ab"}, "expected two sizes"),
        ("compressed_tensors", {**bits, "bitmask": crowded}, {}, r"got 4 \(row 7, group 6\)"),
        ("compressed_tensors", {**bits, "shape": np.array([64, 32])}, {}, "shape: expected .32, 64."),
        ("compressed_tensors", {**bits, "bitmask": bits["bitmask"][:16]}, {}, "expected 256 words uint8"),
    ]


@pytest.mark.parametrize(("name", "parts", "options", "complaint"), broken_imports())
def test_imports_that_are_refused(name, parts, options, complaint):
    with pytest.raises((InvalidProblemError, FormatError), match=complaint):
        from_foreign(name, parts, **options)


def test_a_nibble_that_no_pair_of_float32_has():
    weight = Sparse24Weight.compress(np.tile(np.array([1, 0, 0, 2], np.float32), (32, 8)))
    parts = to_foreign("torch_cutlass", weight)
    assert set(np.unique(parts["meta"].view(np.uint8))) == {0xE4}
    parts["meta"].reshape(-1)[0] = 0x1234
    with pytest.raises(FormatError, match="expected 0x4 or 0xe for a pair") as caught:
        from_foreign("torch_cutlass", parts)
    assert (caught.value.row, caught.value.group) == (0, 0)


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


# Through a product --------------------------------------------------------------------------------


def product_of(weight: Sparse24Weight, dtype: Any = np.float32) -> Any:
    """Stands for the library: reads the blob's values and knows the positions by itself."""

    def multiply(blob: np.ndarray) -> np.ndarray:
        values = blob.reshape(-1)[: weight.values.size].reshape(weight.values.shape)
        return Sparse24Weight(values, weight.metadata).decompress().astype(dtype)

    return multiply


@pytest.mark.parametrize("element", ["f32", "f16", "bf16", "s8", "fp8_e4m3"])
def test_a_blob_is_read_through_a_product(element):
    kind = ElementKind(element)
    weight = weight_of(random_bits(np.random.default_rng(5), 16, 32, "tilelang", kind), kind)
    blob = np.concatenate([weight.values.reshape(-1), np.zeros(64, kind.dtype)])
    before = blob.tobytes()
    for dtype in (np.float32, kind.dtype):
        back = from_product(blob, (16, 32), product_of(weight, dtype))
        assert same_bits(back.values, weight.values)
        assert same_bits(back.metadata, weight.metadata)
    assert blob.tobytes() == before


@pytest.mark.parametrize("value", [0.0, 1.0, 4.0, -1.0, 0.5, np.nan, np.inf])
def test_a_product_that_isnt_one_of_markers(value):
    weight = f16_weight(8, 16)

    def multiply(blob: np.ndarray) -> np.ndarray:
        dense = product_of(weight)(blob)
        dense[3, 4:8] = value
        return dense

    with pytest.raises(FormatError, match="one 1 and one 2") as caught:
        from_product(weight.values.reshape(-1), (8, 16), multiply)
    assert (caught.value.row, caught.value.group) == (3, 1)


def test_blobs_and_products_that_dont_fit():
    weight = f16_weight(8, 16)
    blob = weight.values.reshape(-1)
    with pytest.raises(InvalidProblemError, match=r"product: expected shape \[8, 16\]"):
        from_product(blob, (8, 16), lambda blob: np.zeros((16, 8), np.float32))
    with pytest.raises(InvalidProblemError, match="product: expected"):
        from_product(blob, (8, 16), lambda blob: np.zeros((8, 16), np.uint16))
    with pytest.raises(InvalidProblemError, match="blob: expected 128 values or more"):
        from_product(blob, (16, 16), product_of(weight))
    with pytest.raises(InvalidProblemError, match="K a multiple of 8"):
        from_product(blob, (8, 12), product_of(weight))


# The guide ----------------------------------------------------------------------------------------


def test_the_guide_says_what_the_table_says():
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    table = text.partition("## Other libraries' formats")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == list(FORMATS)
    for name, (_, _, elements, parts, shapes) in zip(FORMATS, rows, strict=True):
        known = FORMATS[name]
        assert tuple(element.removesuffix(" (1:2)") for element in elements.split(", ")) == known.elements
        assert ("f32 (1:2)" in elements) == (name in ONE_OF_TWO)
        assert set(re.findall(r"`(\w+)`", parts)) == set(known.parts)
        needed, _, optional = parts.partition("optional")
        assert set(re.findall(r"`(\w+)`", optional)) == set(known.optional)
        assert ("`shape=(M, K)`" in needed) == name.startswith("cusparselt")
        assert shapes == known.constraint
