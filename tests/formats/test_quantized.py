"""Foreign formats of quantized weights: every bit by slow writers of the formats' words, and what is refused.

compressed-tensors' own output is in test_quantized_interop.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    Device,
    ElementKind,
    FormatError,
    InvalidProblemError,
    Sparse24Error,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    TensorView,
    UnsupportedError,
    from_foreign,
    register_format,
    to_foreign,
)
from sparse24_plans.formats.table import QUANTIZED_FORMATS

from ..support import same_bits
from .samples import f16_weight
from .test_quantized_interop import integers_of

GROUPS = (0, 32, 64, 128)
READ = ("pack_quantized", "gptq", "awq")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


# Writers ------------------------------------------------------------------------------------------


def in_words(rows: np.ndarray, bits: int) -> np.ndarray:
    """int32 [rows, words] of unsigned integers [rows, width], one at a time, the first in the lowest bits."""
    each = 32 // bits
    words = np.zeros((rows.shape[0], -(-rows.shape[1] // each)), np.uint64)
    for row, at in np.ndindex(rows.shape):
        words[row, at // each] |= np.uint64(int(rows[row, at]) << bits * (at % each))
    return words.astype(np.uint32).view(np.int32)


class Matrix:
    """Unsigned integers [m, k] that are 2:4 around their zero points [m, groups], and scales."""

    def __init__(self, m, k, bits=4, group=32, *, shifted=False, seed=0, dtype=np.float16) -> None:
        rng = np.random.default_rng(seed)
        self.bits, self.group, self.middle = bits, group, 1 << bits - 1
        groups = -(-k // group) if group else 1
        self.scales = rng.uniform(0.001, 1, (m, groups)).astype(dtype)
        spread = min(self.middle - 1, 100)
        self.zeros = self.middle + (rng.integers(-spread, spread + 1, (m, groups)) if shifted else 0)
        self.zeros = np.broadcast_to(self.zeros, (m, groups)).astype(np.int64)
        wide = np.repeat(self.zeros, group or max(k, 1), axis=1)[:, :k]
        drawn = rng.integers(0, 1 << bits, (m, k))
        drawn = np.clip(drawn, wide - 128, wide + 127)
        kept = rng.random((m, k // 4, 4)).argsort(axis=2).reshape(m, k) < 2
        self.unsigned = np.where(kept, drawn, wide)
        self.integers = (self.unsigned - wide).astype(np.int8)
        self.options: dict[str, Any] = {"group": group, "bits": bits}

    def parts(self, name: str, version: int = 1) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The parts of a format, and the options to read it."""
        m, k = self.unsigned.shape
        order = np.arange(k, dtype=np.int32) // np.int32(self.group or max(k, 1))
        if name == "pack_quantized":
            return {
                "weight_packed": in_words(self.unsigned, self.bits),
                "weight_scale": self.scales,
                "weight_shape": np.array([m, k]),
                "weight_zero_point": in_words(self.zeros.T, self.bits).T.copy(),
                "weight_g_idx": order,
            }, self.options
        if name == "gptq":
            return {
                "qweight": in_words(self.unsigned, self.bits).T.copy(),
                "scales": self.scales.T.copy(),
                "qzeros": in_words(self.zeros.T - (version == 1), self.bits),
                "g_idx": order,
            }, {**self.options, "version": version}
        both = [
            in_words(part.reshape(len(part), m // 8, 8)[:, :, AWQ_ORDER].reshape(part.shape), 4)
            for part in (self.unsigned.T, self.zeros.T)
        ]
        return {"qweight": both[0], "qzeros": both[1], "scales": self.scales.T.copy()}, {"group": self.group}


# Reading ------------------------------------------------------------------------------------------


@given(data=st.data(), name=st.sampled_from(READ), seed=st.integers(0, 2**32 - 1))
def test_integers_and_scales_are_those_that_were_written(data, name, seed):
    bits = 4 if name == "awq" else data.draw(st.sampled_from([4, 8]))
    group, shifted = data.draw(st.sampled_from(GROUPS)), data.draw(st.booleans())
    m, k = 8 * data.draw(st.integers(0, 3)), 8 * data.draw(st.integers(0, 40))
    dtype = data.draw(st.sampled_from([np.float16, ml_dtypes.bfloat16]))
    matrix = Matrix(m, k, bits, group, shifted=shifted, seed=seed, dtype=dtype)
    parts, options = matrix.parts(name, data.draw(st.sampled_from([1, 2])))
    weight = from_foreign(name, parts, **options)
    element = ElementKind.F16 if dtype is np.float16 else ElementKind.BF16
    symmetric = bool((matrix.zeros == matrix.middle).all())
    assert weight.quantization == ("s4" if bits == 4 and symmetric else "s8", group, element)
    assert np.array_equal(integers_of(weight), matrix.integers)
    assert same_bits(weight.scales, matrix.scales)
    Sparse24Weight(weight.dequantize().values_view, weight.metadata)  # metadata are valid


@pytest.mark.parametrize("name", READ)
def test_without_zero_points_the_middle_is_zero(name):
    matrix = Matrix(16, 64)
    parts, options = matrix.parts(name)
    for part in ("weight_zero_point", "qzeros", "g_idx", "weight_g_idx"):
        parts.pop(part, None)
    options.pop("group")
    weight = from_foreign(name, parts, **options)
    assert weight.quantization.element == "s4"
    assert np.array_equal(integers_of(weight), matrix.integers)


@pytest.mark.parametrize(("scales", "element", "held"), [
    (np.float16, None, ("f16", "f16")),
    (np.float16, "f16", ("f16", "f16")),
    (np.float16, "bf16", ("bf16", "f32")),
    (ml_dtypes.bfloat16, "f16", ("f16", "f32")),
    (np.float32, "bf16", ("bf16", "f32")),
])  # fmt: skip
def test_scales_of_another_type_than_w_are_float32(scales, element, held):
    matrix = Matrix(8, 64, dtype=scales)
    weight = from_foreign("gptq", matrix.parts("gptq")[0], element=element)
    assert (weight.element, weight.quantization.scale_element) == held
    assert np.array_equal(weight.scales.astype(np.float32), matrix.scales.astype(np.float32))


@pytest.mark.parametrize(("k", "count", "group"), [(128, 1, 0), (128, 2, 64), (200, 2, 128), (96, 3, 32)])
def test_the_number_of_scales_tells_the_group(k, count, group):
    matrix = Matrix(8, k, group=group)
    assert matrix.scales.shape == (8, count)
    parts, _ = matrix.parts("gptq")
    assert from_foreign("gptq", parts).quantization.group == group


def test_a_group_as_wide_as_the_row_may_be_named():
    parts, _ = Matrix(8, 64, group=64).parts("gptq")
    assert from_foreign("gptq", parts).quantization.group == 0
    assert from_foreign("gptq", parts, group=64).quantization.group == 64


def test_signed_zero_points_of_older_versions():
    matrix = Matrix(8, 64, shifted=True)
    parts, options = matrix.parts("pack_quantized")
    parts["weight_zero_point"] = (matrix.zeros - matrix.middle).astype(np.int8)
    assert np.array_equal(integers_of(from_foreign("pack_quantized", parts, **options)), matrix.integers)
    parts["weight_g_idx"] = np.full(64, -1, np.int32)
    assert from_foreign("pack_quantized", parts, **options).k == 64


# Both ways ----------------------------------------------------------------------------------------


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_marlin_24_loses_no_bit(data, seed):
    stored, group = data.draw(st.sampled_from(["s4", "s8"])), data.draw(st.sampled_from([0, 128]))
    m = 64 * data.draw(st.integers(0, 3))
    k = 128 * data.draw(st.sampled_from([1, 3, 4])) if group else 32 * data.draw(st.integers(1, 9))
    rng = np.random.default_rng(seed)
    metadata = Sparse24Weight.prune_compress(rng.standard_normal((m, k), np.float32)).metadata
    width = k // 4 if stored == "s4" else k // 2
    values = rng.integers(0, 256, (m, width)).astype(np.uint8)  # any bits: -8, -128, and zeros anywhere
    scales = rng.integers(0, 1 << 16, (m, k // 128 if group else 1)).astype(np.uint16).view(np.float16)
    weight = Sparse24QuantizedWeight(
        values if stored == "s4" else values.view(np.int8),
        metadata,
        scales,
        element="f16",
        stored=stored,
        group=group,
    )
    parts = to_foreign("marlin_24", weight)
    assert tuple(parts) == QUANTIZED_FORMATS["marlin_24"].parts
    back = from_foreign("marlin_24", parts, bits=4 if stored == "s4" else 8, group=group)
    assert (back.m, back.k, back.element, back.quantization) == (m, k, "f16", weight.quantization)
    for one, other in zip(back.views, weight.views, strict=True):
        assert same_bits(one.bits(), other.bits())
    marlins = {**parts, "meta": parts["meta"].reshape(m, k // 16)}  # Sparse-Marlin's shape
    assert same_bits(from_foreign("marlin_24", marlins, bits=4 if stored == "s4" else 8).metadata, metadata)


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READ)
def test_a_crowded_group_is_named_by_row_and_group(name):
    matrix = Matrix(16, 64)
    matrix.unsigned[11, 20:24] = 1
    parts, options = matrix.parts(name)
    with pytest.raises(FormatError, match=r"expected at most 2 values .*, got 4") as caught:
        from_foreign(name, parts, **options)
    assert (caught.value.row, caught.value.group) == (11, 5)


def test_value_beyond_8_bits_is_named_by_row_and_group():
    matrix = Matrix(8, 64, 8, shifted=True)
    matrix.zeros[3, 1], matrix.unsigned[3, 32:] = 10, 10
    matrix.unsigned[3, 45] = 255
    parts, options = matrix.parts("gptq")
    with pytest.raises(FormatError, match=r"qweight: .* from -128 to 127, got 245") as caught:
        from_foreign("gptq", parts, **options)
    assert (caught.value.row, caught.value.group) == (3, 11)


@pytest.mark.parametrize("bits", [4, 8])
def test_spoilt_zero_points_of_version_1_are_refused(bits):
    matrix = Matrix(8, 64, bits)
    matrix.zeros = matrix.zeros.copy()
    matrix.zeros[5, 1] = 1 << bits  # stored as the largest value
    parts, options = matrix.parts("gptq")
    with pytest.raises(FormatError, match=r"qzeros: expected .* in row 5, group 1"):
        from_foreign("gptq", parts, **options)


@pytest.mark.parametrize(("name", "part"), [("gptq", "g_idx"), ("pack_quantized", "weight_g_idx")])
def test_columns_in_another_order_are_refused_by_name(name, part):
    parts, options = Matrix(8, 64).parts(name)
    parts[part][40] = 0
    with pytest.raises(UnsupportedError, match=rf"^{part}: expected .* got group 0 for column 40"):
        from_foreign(name, parts, **options)


def changed(name: str, **parts: Any) -> tuple[str, dict[str, Any]]:
    given, _ = Matrix(16, 64).parts(name)
    return name, {**given, **parts}


MARLIN = to_foreign(
    "marlin_24", Sparse24QuantizedWeight.quantize(f16_weight(64, 384), stored="s4", group=128)
)
GOOD = np.zeros((8, 16), np.int32)


@pytest.mark.parametrize(
    ("case", "options", "words"),
    [
        (changed("gptq"), {"bits": 3}, "bits: expected 4 or 8, got 3"),
        (changed("gptq"), {"group": 16}, "group: expected 0 or 32 or 64 or 128, got 16"),
        (changed("gptq"), {"group": 64}, "scales: expected scales of group 64 for K = 64, got 2 a row"),
        (changed("gptq"), {"version": 3}, "version: expected 1 or 2, got 3"),
        (changed("gptq"), {"shape": (16, 64)}, "shape: gptq takes no such option"),
        (changed("awq"), {"bits": 4}, "bits: awq takes no such option"),
        (changed("awq"), {"version": 1}, "version: awq takes no such option"),
        (changed("gptq"), {"element": "f32"}, "element: expected f16 or bf16"),
        (changed("gptq"), {"element": 3}, "element"),
        (changed("gptq", scales=np.ones((2, 16), np.float32)), {}, "expected f16 or bf16 for scales"),
        (changed("gptq", scales=np.ones((2, 16), np.int8)), {}, "scales: expected scales of f16"),
        (changed("gptq", scales=np.ones((5, 16), np.float16)), {}, "scales: expected scales of groups of 32"),
        (changed("gptq", scales=np.ones((2, 8), np.float16)), {}, r"scales: expected shape \[2, 16\]"),
        (changed("gptq", scales=np.ones(32, np.float16)), {}, "scales: expected a matrix"),
        (changed("gptq", scales="x"), {}, "scales: expected a tensor"),
        (changed("gptq", scales=None), {}, "gptq needs 'scales'"),
        (changed("gptq", qweight=GOOD.astype(np.int64)), {}, "qweight: expected"),
        (changed("gptq", qweight=np.zeros((8, 16), np.float32)), {}, "qweight: expected"),
        (changed("gptq", qweight=np.zeros(128, np.int32)), {}, "qweight: expected a matrix"),
        (changed("gptq", qzeros=np.zeros((2, 3), np.int32)), {}, r"qzeros: expected shape \[2, 2\]"),
        (changed("gptq", g_idx=np.zeros(63, np.int32)), {}, r"g_idx: expected i32\[64\]"),
        (changed("gptq", g_idx=np.zeros(64)), {}, "g_idx: expected i32"),
        (changed("gptq", colour=GOOD), {}, "parts: expected qweight, scales, qzeros, g_idx, got 'colour'"),
        (changed("awq", qweight=np.zeros((60, 2), np.int32)), {}, "awq: expected M and K multiples of 8"),
        (changed("awq", qzeros=np.zeros((2, 4), np.int32)), {}, "qzeros: expected shape"),
        (changed("pack_quantized", weight_shape=[16, 63]), {}, "K a multiple of 8"),
        (changed("pack_quantized", weight_shape=[16, 128]), {}, "weight_packed: expected shape"),
        (changed("pack_quantized", weight_shape=[16]), {}, "weight_shape: expected two sizes"),
        (changed("pack_quantized", weight_shape=[1 << 61, 8]), {}, "weight_shape: expected M"),
        (changed("pack_quantized"), {"bits": 8}, r"weight_packed: expected shape \[16, 16\]"),
        (
            changed("pack_quantized", weight_scale=np.ones((8, 2), np.float16)),
            {},
            r"weight_scale: expected shape \[16, 2\]",
        ),
        (
            changed("pack_quantized", weight_zero_point=np.full((16, 2), 9, np.int8)),
            {},
            "weight_zero_point: expected values of 4 bits, got 9",
        ),
        (
            changed("pack_quantized", weight_zero_point=np.zeros((16, 3), np.int8)),
            {},
            "weight_zero_point: expected shape",
        ),
        (
            changed("pack_quantized", weight_zero_point=np.zeros((16, 2))),
            {},
            "weight_zero_point: expected",
        ),
        (("marlin_24", {**MARLIN, "meta": MARLIN["meta"][1:]}), {}, "meta: expected 1536 words int16"),
        (("marlin_24", {**MARLIN, "meta": MARLIN["meta"].view(np.int32)}), {}, "meta: expected u16"),
        (("marlin_24", MARLIN), {"bits": 8}, r"weight_packed: expected shape \[12, 256\]"),
        (
            ("marlin_24", {**MARLIN, "scale_packed": MARLIN["scale_packed"].astype(ml_dtypes.bfloat16)}),
            {},
            "scale_packed: expected f16, got bf16",
        ),
        (
            ("marlin_24", {**MARLIN, "scale_packed": np.ones((2, 64), np.float16)}),
            {},
            "scale_packed: expected scales of groups",
        ),
        (
            ("marlin_24", {**MARLIN, "scale_packed": np.ones((3, 48), np.float16)}),
            {},
            "weight_packed: expected shape",
        ),
    ],
)  # fmt: skip
def test_hostile_parts_and_options_are_named(case, options, words):
    with pytest.raises(InvalidProblemError, match=words):
        from_foreign(*case, **options)


def test_marlins_metadata_are_checked():
    meta = MARLIN["meta"].copy()
    meta.view(np.uint16)[0, 0] = 0x4445
    with pytest.raises(FormatError, match="metadata: expected strictly increasing positions, got 1 then 1"):
        from_foreign("marlin_24", {**MARLIN, "meta": meta})


def quantized(m: int, k: int, stored="s4", group=128, **more) -> Sparse24QuantizedWeight:
    return Sparse24QuantizedWeight.quantize(f16_weight(m, k), stored=stored, group=group, **more)


@pytest.mark.parametrize(
    ("weight", "kind", "words"),
    [
        (quantized(64, 128, "fp8_e4m3"), UnsupportedError, "weight: marlin_24 holds s4 and s8, got fp8_e4m3"),
        (quantized(64, 128, group=64), UnsupportedError, "group: marlin_24 holds 0 and 128, got 64"),
        (quantized(64, 128, scale_element="f32"), UnsupportedError, "holds scales of f16, got f32"),
        (quantized(32, 128), InvalidProblemError, "M a multiple of 64"),
        (quantized(64, 192), InvalidProblemError, "M a multiple of 64 and K of 32"),
        (quantized(64, 256), UnsupportedError, "expected another K than 256"),
        (f16_weight(64, 128), InvalidProblemError, "expected Sparse24QuantizedWeight, got Sparse24Weight"),
    ],
    ids=str,
)
def test_what_marlin_24_can_not_hold_is_refused(weight, kind, words):
    with pytest.raises(kind, match=words):
        to_foreign("marlin_24", weight)


def test_scales_in_groups_of_k_256_have_no_certain_order():
    parts = to_foreign("marlin_24", quantized(64, 256, group=0))
    parts["scale_packed"] = np.ones((2, 64), np.float16)
    with pytest.raises(UnsupportedError, match="expected another K than 256"):
        from_foreign("marlin_24", parts)


@pytest.mark.parametrize("name", READ)
def test_what_is_only_read_says_so(name):
    with pytest.raises(UnsupportedError, match=f"{name} is read and not written"):
        to_foreign(name, quantized(64, 128))


@pytest.mark.parametrize("option", ["bits", "group", "shape", "colour"])
def test_a_weight_that_is_written_tells_all_by_itself(option):
    with pytest.raises(InvalidProblemError, match=f"{option}: to_foreign takes no such option"):
        to_foreign("marlin_24", quantized(64, 128), **{option: 4})


def test_the_two_kinds_of_weights_are_not_mixed_up():
    with pytest.raises(InvalidProblemError, match="expected Sparse24Weight, got Sparse24QuantizedWeight"):
        to_foreign("baracuda", quantized(64, 128))
    with pytest.raises(InvalidProblemError, match=r"name: expected .*, marlin_24, .*, got 'nothing'"):
        from_foreign("nothing", {})
    with pytest.raises(InvalidProblemError, match="got 'gptq'"):
        register_format("gptq", permutation=[0])


@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_tensors_in_device_memory_are_refused_by_name(name):
    good = dict(MARLIN) if name == "marlin_24" else Matrix(16, 64).parts(name)[0]
    for part in good.keys() - {"weight_shape", "g_idx", "weight_g_idx"}:
        view = TensorView.of(good[part], element="u16" if part == "meta" else None)
        away = TensorView(view.address, view.shape, view.element, Device("cuda", 7))
        with pytest.raises(UnsupportedError, match=f"^{part}: expected a tensor in host memory, got one on"):
            from_foreign(name, {**good, part: away})


# Anything at all ----------------------------------------------------------------------------------

HOSTILE = (
    *(None, 3, "text", object(), [], {}, b"1234", float("nan")),
    *(np.zeros((), np.int32), np.zeros(0, np.int32), np.zeros((0, 0), np.int32), np.zeros((0, 16), np.int32)),
    *(np.zeros((8, 0), np.int32), np.zeros((1, 1, 1), np.int32), np.zeros((8, 16), np.int32)[::-1, ::2]),
    *(np.zeros((2, 16)), np.full((8, 16), -1, np.int32), np.zeros((8, 16), ">i4"), np.ma.zeros((8, 16))),
    *(np.zeros((0, 0), np.float16), np.zeros((0, 64), np.float16), np.zeros((3, 0), np.float16)),
    *(np.full((2, 16), np.nan, np.float16), np.zeros((8, 16), np.int32).view("V4"), f16_weight()),
)


def outcome(call: Callable[[Any], Any], given: Any) -> Any:
    """Return the call's result, or the package's error that it raises."""
    try:
        return call(given)
    except Sparse24Error as error:
        return error


@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_nothing_but_typed_errors(name):
    """One part of a sound weight is anything at all: a result, or an error of ours."""
    good = dict(MARLIN) if name == "marlin_24" else Matrix(16, 64).parts(name)[0]
    for part in good:
        for value in HOSTILE:
            found = outcome(lambda given: from_foreign(name, given), {**good, part: value})
            assert isinstance(found, Sparse24QuantizedWeight) or 0 < len(str(found)) < 500
