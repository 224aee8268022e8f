"""Formats of users: orders of metadata that are taken by name everywhere, and refused unless invertible."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sparse24_plans import (
    ElementKind,
    InvalidProblemError,
    Sparse24Weight,
    UnsupportedError,
    convert_checkpoint,
    from_foreign,
    load_weight,
    register_format,
    save_weights,
    to_foreign,
)
from sparse24_plans.cli.app import app
from sparse24_plans.formats import table
from sparse24_plans.formats.table import FORMATS

from ..forks import Fork
from ..support import HAS_GPU, same_bits
from .samples import f16_weight, random_bits, weight_of

PLACES = ["host", 0] if HAS_GPU else ["host"]


@pytest.fixture(autouse=True)
def no_format_is_left() -> Iterator[None]:
    before = dict(FORMATS)
    yield
    FORMATS.clear()
    FORMATS.update(before)


def reversed_words(words: Any) -> Any:
    return words[:, ::-1]


def refused(words: str, **given: Any) -> None:
    arguments = {"name": "mine", **given}
    with pytest.raises(InvalidProblemError, match=re.escape(words)):
        register_format(**arguments)
    assert "mine" not in FORMATS


def nibbles_of(weight: Sparse24Weight) -> np.ndarray:
    return weight.metadata.view(np.uint8)


# Orders -------------------------------------------------------------------------------------------


def test_a_permutation_says_which_word_is_stored_where():
    """Words of every two rows go down the columns, the second column first."""
    register_format("mine", permutation=[1, 3, 0, 2], tile=(2, 2), word_bits=8)
    weight = f16_weight(4, 32)
    codes = nibbles_of(weight)
    plain = codes[:, 0::2] | codes[:, 1::2] << 4  # [4, 4] bytes: two tiles down, two across
    parts = to_foreign("mine", weight)
    want = []
    for top in (0, 2):
        for left in (0, 2):
            rows, columns = plain[top : top + 2], slice(left, left + 2)
            a, b, c, d = rows[:, columns].reshape(-1)
            want += [b, d, a, c]
    assert parts["meta"].dtype == np.uint8
    assert parts["meta"].shape == (4, 4)
    assert parts["meta"].reshape(-1).tolist() == want
    assert same_bits(parts["packed"], weight.values)
    assert same_bits(from_foreign("mine", parts).metadata, weight.metadata)


def test_orders_that_are_known_under_other_names():
    """TileLang's is no order at all; CUTLASS's for sm_80 are two functions."""
    from sparse24_plans._vendor import cutlass_sm80

    weight = f16_weight(64, 128)
    register_format("rows", permutation=[0])
    assert same_bits(to_foreign("rows", weight)["meta"], to_foreign("tilelang", weight)["meta"])
    register_format(
        "sm80",
        encode=cutlass_sm80.reorder,
        decode=lambda words: cutlass_sm80.restore(words.reshape(-1), *words.shape),
        tile=(32, 2),
    )
    theirs = to_foreign("torch_cutlass", weight)
    ours = to_foreign("sm80", weight)
    assert same_bits(ours["meta"].reshape(-1), theirs["meta"].reshape(-1))
    assert same_bits(from_foreign("sm80", theirs).values, weight.values)


@given(
    data=st.data(),
    bits=st.sampled_from([4, 8, 16, 32]),
    element=st.sampled_from(["f32", "f16", "bf16", "s8", "fp8_e4m3", "fp8_e5m2"]),
    place=st.sampled_from(PLACES),
)
def test_whatever_the_order_no_bit_is_lost(data, bits, element, place):
    rows, words = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    order = data.draw(st.permutations(range(rows * words)))
    register_format(
        "any", permutation=order, tile=(rows, words), word_bits=bits, elements=[element], replace=True
    )
    columns = words * bits // 4 * (2 if element == "f32" else 4)
    m, k = rows * data.draw(st.integers(0, 3)), columns * data.draw(st.integers(0, 3))
    if k % 8:
        k *= 8
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    kind = ElementKind(element)
    weight = weight_of(random_bits(rng, m, k, "cutlass_sm90", kind), kind).to(place)
    parts = to_foreign("any", weight)
    back = from_foreign("any", parts, element=element).to("host")
    assert same_bits(back.decompress(), weight.to("host").decompress())
    if element != "f32":
        assert same_bits(back.metadata, weight.to("host").metadata)


def test_metadata_of_any_shape_is_read_as_it_lies():
    """Three axes too, which in other formats are PyTorch's view."""
    register_format("mine", permutation=[1, 0], tile=(2, 1))
    weight = f16_weight(4, 64)
    parts = to_foreign("mine", weight)
    for shape in ((16,), (2, 2, 4), (2, 2, 2, 2)):
        meta = parts["meta"].reshape(shape)
        assert same_bits(from_foreign("mine", {**parts, "meta": meta}).metadata, weight.metadata)


def test_read_positions_are_normalised():
    register_format("mine", encode=reversed_words, decode=reversed_words)
    packed = np.array([[0, 3, 0, 0, 5, 0, 0, 0]], np.float16)
    meta = np.array([[0xE10F]], np.uint16)  # the zeros' positions are anything; 5 stands at 1, in front of 0
    weight = from_foreign("mine", {"packed": packed, "meta": meta})
    weight.validate()
    assert weight.decompress()[0].tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0]


# By name ------------------------------------------------------------------------------------------


def test_checkpoints_are_converted_to_it_and_back(tmp_path):
    register_format("mine", encode=reversed_words, decode=reversed_words, word_bits=32)
    weight = f16_weight(16, 64)
    save_weights(tmp_path / "ours", {"a.weight": weight})
    convert_checkpoint(tmp_path / "ours", tmp_path / "theirs", from_format="sparse24", to_format="mine")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "back", from_format="mine", to_format="sparse24")
    back = load_weight(tmp_path / "back", "a.weight")
    assert same_bits(back.values, weight.values)
    assert same_bits(back.metadata, weight.metadata)
    with pytest.raises(
        InvalidProblemError, match=r"to_format: expected one of dense, sparse24, .*, mine, got 'm'"
    ):
        convert_checkpoint(tmp_path / "ours", tmp_path / "x", from_format="sparse24", to_format="m")


def test_the_command_line_takes_it_by_name(tmp_path):
    register_format("mine", encode=reversed_words, decode=reversed_words)
    weight = f16_weight(16, 64)
    save_weights(tmp_path / "ours", {"a.weight": weight})
    command = ["convert", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--from", "sparse24", "--to"]
    done = CliRunner().invoke(app, [*command, "mine"])
    assert done.exit_code == 0, done.output
    back = CliRunner().invoke(
        app,
        ["convert", str(tmp_path / "theirs"), str(tmp_path / "back"), "--from", "mine", "--to", "sparse24"],
    )
    assert back.exit_code == 0, back.output
    assert same_bits(load_weight(tmp_path / "back", "a.weight").metadata, weight.metadata)
    assert CliRunner().invoke(app, [*command, "nobodys"]).exit_code == 2


PLUGIN = """
import sparse24_plans

def register():
    sparse24_plans.register_format("swapped", permutation=[1, 0])

def register_nothing():
    pass

def fail():
    raise OSError("no such thing")
"""
ENTRY_POINTS = """[sparse24_plans.formats]
swapped = some_plugin:register
nothing = some_plugin:register_nothing
broken = some_plugin:fail
absent = some_other:register
"""
USE = """
import sys, numpy as np, sparse24_plans as s
weight = s.Sparse24Weight.prune_compress(np.arange(64, dtype=np.float16).reshape(2, 32))
try:
    parts = s.to_foreign(sys.argv[1], weight)
    plain = s.to_foreign("tilelang", weight)
    print(parts["meta"][:, ::-1].tolist() == plain["meta"].tolist())
except s.InvalidProblemError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("swapped", "True"),
        ("nothing", "name: some_plugin:register_nothing registers no format 'nothing'"),
        ("broken", "name: 'broken' can't be loaded from some_plugin:fail (OSError: no such thing)"),
        ("absent", "name: 'absent' can't be loaded from some_other:register (ModuleNotFoundError: No module"),
        ("missing", "swapped, nothing, broken, absent, marlin_24, pack_quantized, gptq, awq, got 'missing'"),
    ],
)
def test_formats_of_installed_packages_are_found_by_name(tmp_path, name, answer):
    """The command ``sparse24`` thus knows them in a process of its own."""
    (tmp_path / "some_plugin.py").write_text(PLUGIN)
    about = tmp_path / "some_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{USE}"
    done = Fork("-c", code, name).wait()
    assert done.returncode == 0, done.stderr
    assert answer in done.stdout.decode()


def test_nothing_is_loaded_for_a_name_that_is_known(monkeypatch):
    def never(**_: Any) -> list[EntryPoint]:
        raise AssertionError

    monkeypatch.setattr(table, "entry_points", never)
    to_foreign("tilelang", f16_weight())


# Orders that aren't invertible --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("permutation", "tile", "words"),
    [
        ([0, 1, 1, 3], None, "permutation: expected each number once, got 1 at positions 1 and 2"),
        ([0, 4, 1, 2], None, "permutation: expected numbers from 0 to 3, got 4 at position 1"),
        ([0, -1], None, "permutation: expected numbers from 0 to 1, got -1 at position 1"),
        ([0, 1, 2], (2, 2), "permutation: expected 4 numbers for a tile of 2 x 2 words, got 3"),
        ([], None, "permutation: expected integers, got []"),
        ([0, 1.0], None, "permutation: expected integers, got [0, 1.0]"),
        ([False, True], None, "permutation: expected integers, got [False, True]"),
        (3, None, "permutation: expected integers, got 3"),
        ("01", None, "permutation: expected integers, got '01'"),
        (range(10**9), None, "permutation: expected at most 1048576 numbers, got 1000000000"),
    ],
)
def test_permutations_that_are_none(permutation, tile, words):
    refused(words, permutation=permutation, tile=tile)


def swapped_once(words: np.ndarray) -> np.ndarray:
    """Loses the last word where there are three: what stood there is written over."""
    made = words.copy()
    if words.shape[1] >= 3:
        made[:, 2] = made[:, 0]
    return made


def last_of_the_third_row(words: np.ndarray) -> np.ndarray:
    made = words.copy()
    made[2:3, -1:] ^= 1
    return made


def same(words: Any) -> Any:
    return words


AS_MANY = "expected as many words for metadata uint16"
A_RESULT = "expected a result for metadata uint16"


@pytest.mark.parametrize(
    ("encode", "decode", "words"),
    [
        (swapped_once, same, "decode: expected the words that encode was given, metadata [2, 5]; got 0x"),
        (reversed_words, same, "decode: expected the words that encode was given, metadata [1, 2]; got 0x"),
        (same, last_of_the_third_row, " at row 2, word 1"),
        (lambda words: words[:, :1], same, f"encode: {AS_MANY}[1, 2], got uint16[1, 1]"),
        (same, lambda words: words.astype(np.int32), f"decode: {AS_MANY}[1, 1], got int32[1, 1]"),
        (lambda words: words.tolist(), same, f"encode: {AS_MANY}[1, 1], got [["),
        (lambda words: None, same, f"encode: {AS_MANY}[1, 1], got None"),
        (lambda words: 1 / 0, same, f"encode: {A_RESULT}[1, 1], got ZeroDivisionError"),
        (same, lambda words: words[9], f"decode: {A_RESULT}[1, 1], got IndexError"),
    ],
)
def test_functions_that_dont_undo_each_other(encode, decode, words):
    refused(words, encode=encode, decode=decode)


def test_a_difference_in_one_word_is_located():
    def encode(words: np.ndarray) -> np.ndarray:
        made = words.copy()
        made[1:2, 3:4] = 0x4444
        return made

    with pytest.raises(InvalidProblemError, match="at row 1, word 3") as caught:
        register_format("mine", encode=encode, decode=same)
    assert "got 0x4444 for 0x" in str(caught.value)


def test_nibbles_stay_nibbles():
    def widen(words: np.ndarray) -> np.ndarray:
        return words | 0x10

    refused("encode: expected nibbles, 0 to 15, got ", encode=widen, decode=same, word_bits=4)


def test_functions_that_fail_later_are_named_as_well():
    calls = []

    def failing(words: np.ndarray) -> np.ndarray:
        calls.append(words.shape)
        if words.shape == (8, 4):
            raise MemoryError("too many")
        return words

    register_format("mine", encode=failing, decode=same)
    with pytest.raises(
        InvalidProblemError, match=r"encode: expected a result for metadata uint16\[8, 4\], got Mem"
    ):
        to_foreign("mine", f16_weight(8, 64))
    assert (8, 4) in calls


# Arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", " a", "a b", "../x", "ü", "-a", "a" * 65, None, 3, b"mine", "a\n"])
def test_names_that_are_none(name):
    refused("name: expected letters, digits", name=name, permutation=[0])


@pytest.mark.parametrize("name", ["tilelang", "torch_cutlass", "dense", "sparse24"])
def test_names_of_the_packages_own_formats(name):
    before = FORMATS.get(name)
    refused(
        "name: expected a name that no format of the package has, got ",
        name=name,
        permutation=[0],
        replace=True,
    )
    assert FORMATS.get(name) is before


def test_a_name_is_given_twice_only_on_purpose():
    register_format("mine", permutation=[0, 1])
    with pytest.raises(InvalidProblemError, match="name: 'mine' is registered already; pass replace=True"):
        register_format("mine", permutation=[1, 0])
    first = to_foreign("mine", f16_weight(2, 32))["meta"]
    register_format("mine", permutation=[1, 0], replace=True)
    assert same_bits(to_foreign("mine", f16_weight(2, 32))["meta"], np.ascontiguousarray(first[:, ::-1]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "permutation, encode, decode: expected a permutation, or two functions; got nothing"),
        ({"encode": same}, "or two functions; got encode"),
        ({"permutation": [0], "decode": same}, "or two functions; got permutation [0], decode"),
        ({"encode": same, "decode": 3}, "or two functions; got encode"),
        ({"permutation": [0], "word_bits": 12}, "word_bits: expected 4, 8, 16 or 32, got 12"),
        ({"permutation": [0], "word_bits": 16.0}, "word_bits: expected 4, 8, 16 or 32, got 16.0"),
        ({"permutation": [0], "word_bits": []}, "word_bits: expected 4, 8, 16 or 32, got []"),
        ({"permutation": [0], "tile": 3}, "tile: expected two positive sizes, rows and words, got 3"),
        ({"permutation": [0], "tile": (1, 0)}, "positive sizes, rows and words, got (1, 0)"),
        ({"permutation": [0], "tile": (1, 1, 1)}, "positive sizes, rows and words, got (1, 1, 1)"),
        ({"permutation": [0], "elements": "f16"}, "elements: expected a sequence of elements, got 'f16'"),
        ({"permutation": [0], "elements": []}, "elements: expected a sequence of elements, got []"),
        ({"permutation": [0], "elements": ["f17"]}, "elements: expected one of"),
        ({"permutation": [0], "elements": ["i32"]}, "elements: expected some of f32, f16,"),
        ({"permutation": [0], "origin": 3}, "origin: expected text, got 3"),
        ({"permutation": [0], "replace": 1}, "replace: expected True or False, got 1"),
    ],
)
def test_arguments_that_cant_be_meant(given, words):
    refused(words, **given)


def test_shapes_and_elements_that_it_doesnt_hold():
    register_format("mine", permutation=[1, 0], tile=(2, 1), elements=["f16", "f32"])
    with pytest.raises(
        InvalidProblemError, match=r"mine: expected M a multiple of 2 and K of 16 or 8 \(f32\); got M = 3"
    ):
        to_foreign("mine", f16_weight(3, 64))
    with pytest.raises(InvalidProblemError, match="got M = 4, K = 24"):
        to_foreign("mine", f16_weight(4, 24))
    with pytest.raises(UnsupportedError, match="mine holds f16, f32, got s8"):
        to_foreign("mine", Sparse24Weight.compress(np.zeros((4, 32), np.int8)))
    with pytest.raises(InvalidProblemError, match="meta: expected 8 words int16"):
        from_foreign("mine", {"packed": np.zeros((4, 16), np.float16), "meta": np.zeros((4, 3), np.int16)})


def test_a_registered_format_behaves_as_the_others():
    """A registered format passes the test of the built-in ones."""
    from .test_table import test_a_format_says_what_it_is

    register_format("mine", permutation=[1, 0, 2, 3], tile=(2, 2), elements=["f16", "s8", "f32"], origin="me")
    test_a_format_says_what_it_is("mine")
    assert FORMATS["mine"].origin == "me"
