"""Arguments that can't be meant: typed errors that name the argument, what was expected and what came."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import InvalidProblemError, Sparse24Weight, from_foreign, to_foreign
from sparse24_plans.errors import Sparse24Error
from sparse24_plans.formats.product import from_product
from sparse24_plans.formats.table import FORMATS

from ..support import same_bits
from .samples import f16_weight, random_bits, weight_of

HUGE = 10**5000  # Python refuses to print it
WEIGHT = f16_weight()


def square(name: str) -> Sparse24Weight:
    """A weight [128, 128], which every format holds."""
    element = FORMATS[name].elements[-1]
    return weight_of(random_bits(np.random.default_rng(1), 128, 128, name, element), element)


SQUARES = {name: square(name) for name in FORMATS}
PARTS = {name: to_foreign(name, SQUARES[name]) for name in FORMATS}
SIZED = {name: {"shape": (128, 128)} if "shape" in known.options else {} for name, known in FORMATS.items()}


def kind(value: object) -> str:
    """A parameter's id: pytest can't print HUGE either."""
    return type(value).__name__


def refused(complaint: str) -> Any:
    return pytest.raises(InvalidProblemError, match=complaint)


# By argument --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "got"),
    [
        (["baracuda"], r"\['baracuda'\]"),
        ({}, "{}"),
        (b"baracuda", "b'baracuda'"),
        (None, "None"),
        (3, "3"),
        (HUGE, "int that is too long to print"),
        ("x" * 1000, "'x{76}\\.\\.\\.$"),
        (np.array(["baracuda", "tilelang"]), "array"),
    ],
    ids=kind,
)
def test_unknown_format_names_are_refused(name, got):
    with refused(f"name: expected one of baracuda, .*, got {got}"):
        from_foreign(name, PARTS["baracuda"])
    with refused(f"name: expected one of baracuda, .*, got {got}"):
        to_foreign(name, WEIGHT)


@pytest.mark.parametrize(
    "parts", [None, 3, "packed", [("packed", 1)], {"packed"}, np.zeros(3), HUGE], ids=kind
)
def test_parts_that_arent_a_mapping(parts):
    with refused("parts: expected a mapping of names to tensors, got " + type(parts).__name__):
        from_foreign("torch_cutlass", parts)


@pytest.mark.parametrize("key", [1, None, b"packed", ("packed",), HUGE, 2.5, "extra"], ids=kind)
@pytest.mark.parametrize("other", ["another", 7])
def test_wrong_part_names_are_refused(key, other):
    """Names may have any types, which need no order."""
    parts = PARTS["torch_cutlass"]
    with refused("parts: expected packed, meta, got"):
        from_foreign("torch_cutlass", {**parts, key: parts["meta"], other: parts["meta"]})


def test_parts_of_any_mapping_and_none_for_what_is_absent():
    parts = {**PARTS["torch_tile"], "packed_t": None, "meta_t": None, "bitmask": None}
    back = from_foreign("torch_tile", UserDict(parts))
    assert same_bits(back.values, SQUARES["torch_tile"].values)


@pytest.mark.parametrize("name", FORMATS)
def test_masked_arrays(name):
    """NumPy would hand over what the mask hides."""
    for part, array in PARTS[name].items():
        masked = np.ma.array(array, mask=np.zeros(array.shape, bool))
        with refused(f"{part}: expected .*, got a masked array"):
            from_foreign(name, {**PARTS[name], part: masked}, **SIZED[name])


@pytest.mark.parametrize(
    "element",
    [3, True, ["f16"], {}, b"f16", HUGE, (HUGE,), float, np.float64, np.array(["f16", "f16"])],
    ids=kind,
)
def test_unknown_elements_are_refused(element):
    with refused("element: expected one of f32, .*, got "):
        from_foreign("baracuda", PARTS["baracuda"], element=element)
    with refused("element: expected one of f32, .*, got "):
        from_product(WEIGHT.values.reshape(-1), (32, 64), lambda blob: blob, element=element)


@pytest.mark.parametrize(
    "value", [2.0, True, np.True_, 0, -1, "2", [2], (1, 2), 8.9, HUGE, -HUGE, float("nan")], ids=kind
)
def test_word_bytes(value):
    with refused("word_bytes: expected 1, 2 or 4, got "):
        to_foreign("tilelang", WEIGHT, word_bytes=value)
    with refused("word_bytes: expected 1, 2 or 4, got "):
        from_foreign("tilelang", PARTS["tilelang"], word_bytes=value)


@pytest.mark.parametrize(
    "value", [64.0, True, np.True_, 0, -32, "64", [64], HUGE, -HUGE, 1 << 21, float("inf")], ids=kind
)
def test_tile_k(value):
    with refused("tile_k: expected a positive number of columns, got "):
        to_foreign("cutlass_sm90", WEIGHT, tile_k=value)
    with refused("tile_k: expected a positive number of columns, got "):
        from_foreign("cutlass_sm90", PARTS["cutlass_sm90"], tile_k=value)


def test_numpys_integers_are_integers():
    for name, option, value in (("tilelang", "word_bytes", 4), ("cutlass_sm90", "tile_k", 64)):
        parts = to_foreign(name, WEIGHT, **{option: value})
        for number in (np.int64(value), np.uint8(value), np.array(value)):
            assert to_foreign(name, WEIGHT, **{option: number})["meta"].tobytes() == parts["meta"].tobytes()
            assert same_bits(from_foreign(name, parts, **{option: number}).values, WEIGHT.values)


@pytest.mark.parametrize("value", [1, "text", HUGE, [HUGE]], ids=kind)
@pytest.mark.parametrize("option", ["tile_k", "word_bytes", "nonsense"])
def test_options_that_a_format_doesnt_take(option, value):
    with refused(f"{option}: torch_cutlass takes no such option, got "):
        to_foreign("torch_cutlass", WEIGHT, **{option: value})
    with refused(f"{option}: torch_cutlass takes no such option, got "):
        from_foreign("torch_cutlass", PARTS["torch_cutlass"], **{option: value})


@pytest.mark.parametrize("name", FORMATS)
def test_to_foreign_takes_no_shape(name):
    with refused("shape: to_foreign takes no such option"):
        to_foreign(name, SQUARES[name], shape=(128, 128))


# Two sizes ----------------------------------------------------------------------------------------

NO_SIZES = [
    (128.0, 128.0),
    (8.9, 8.9),
    (True, True),
    ("128", "128"),
    "ab",
    b"ab",
    bytearray(b"ab"),
    memoryview(b"ab"),
    (),
    (128,),
    (128, 128, 1),
    [[128], [128]],
    128,
    HUGE,
    {128},
    {128: 1, 129: 2},
    object(),
    np.zeros(0, int),
    np.array([128.0, 128.0]),
    np.array([True, True]),
    np.array(128),
    np.array(["128", "128"]),
]
OUT_OF_RANGE = [(-128, 128), (2**40, 2**40), (HUGE, 0), (0, HUGE), (HUGE, HUGE), (-HUGE, 128), [2**62, 0]]
TAKES_SIZES = [("shape", name) for name in FORMATS if SIZED[name]] + [("part", "compressed_tensors")]


def with_sizes(where: str, name: str, sizes: Any) -> Sparse24Weight:
    if where == "shape":
        return from_foreign(name, PARTS[name], shape=sizes)
    return from_foreign(name, {**PARTS[name], "shape": sizes})


@pytest.mark.parametrize(("where", "name"), TAKES_SIZES)
@pytest.mark.parametrize("sizes", NO_SIZES, ids=kind)
def test_what_isnt_two_sizes(where, name, sizes):
    with refused("shape: expected two sizes, M and K, got "):
        with_sizes(where, name, sizes)


def test_a_masked_size_is_none():
    with refused("shape: expected two sizes, M and K, got masked_array"):
        with_sizes("shape", "torch_tile", np.ma.array([128, 128], mask=[False, True]))


@pytest.mark.parametrize(("where", "name"), TAKES_SIZES)
@pytest.mark.parametrize("sizes", OUT_OF_RANGE, ids=range(len(OUT_OF_RANGE)))
def test_sizes_out_of_range(where, name, sizes):
    with refused(r"shape: expected M \* K from 0 to below 2\^62, got "):
        with_sizes(where, name, sizes)


@pytest.mark.parametrize(("where", "name"), TAKES_SIZES)
@pytest.mark.parametrize(
    "sizes",
    [(128, 128), [128, 128], np.array([128, 128]), np.array([[128], [128]], np.int64), (np.int32(128), 128)],
)
def test_any_two_integers_are_sizes(where, name, sizes):
    back = with_sizes(where, name, sizes)
    assert same_bits(back.values, SQUARES[name].values)
    assert same_bits(back.metadata, SQUARES[name].metadata)


@pytest.mark.parametrize("sizes", [(8.9, 8.9), (HUGE, 8), "ab", None], ids=kind)
def test_sizes_of_a_product(sizes):
    with refused("shape: expected "):
        from_product(WEIGHT.values.reshape(-1), sizes, lambda blob: blob)


def test_what_cant_be_copied_or_called():
    class Memory:
        __array_interface__ = WEIGHT.values.__array_interface__

    with refused("multiply: expected a callable, got int"):
        from_product(WEIGHT.values.reshape(-1), (32, 64), 3)  # type: ignore[arg-type]
    with refused(r"blob: expected a tensor with clone\(\) or copy\(\), got Memory"):
        from_product(Memory(), (32, 64), lambda blob: blob)


# Anything at all ----------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-200, 200),
    st.integers(),
    st.floats(),
    st.booleans().map(lambda up: HUGE if up else -HUGE),
)
ANYTHING = st.recursive(
    st.one_of(
        NUMBERS,
        st.text(max_size=5),
        st.binary(max_size=5),
        st.complex_numbers(),
        st.builds(np.float16, st.floats(-9, 9)),
        st.builds(np.int64, st.integers(-9, 200)),
        st.builds(lambda size: np.zeros(size, np.int16), st.integers(0, 3)),
        st.builds(object),
        st.just(WEIGHT),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=2), inner)
    ),
    max_leaves=4,
)


def outcome(call: Any) -> Any:
    """Return what a call returns, or the package's error that it raises."""
    try:
        return call()
    except Sparse24Error as error:
        return error


@given(data=st.data())
def test_nothing_but_typed_errors(data):
    """One argument of a sound call is anything at all: a result, or an error of ours that can be printed."""
    name = data.draw(st.sampled_from(list(FORMATS)))
    places = ["name", "parts", "element", "shape", "tile_k", "word_bytes", "else"]
    where = data.draw(st.sampled_from([*places, *(f"parts.{part}" for part in PARTS[name])]))
    value = data.draw(ANYTHING)
    asked, parts, options = name, PARTS[name], dict(SIZED[name])
    if where == "name":
        asked = value
    elif where == "parts":
        parts = value
    elif where.startswith("parts."):
        parts = {**parts, where.removeprefix("parts."): value}
    else:
        options[where] = value
    read = outcome(lambda: from_foreign(asked, parts, **options))
    assert isinstance(read, Sparse24Weight) or 0 < len(str(read)) < 500
    options.pop("shape", None)
    written = outcome(lambda: to_foreign(asked, SQUARES[name], **options))
    assert isinstance(written, dict) or 0 < len(str(written)) < 500
