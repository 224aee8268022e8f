"""The words that other tools read: names, values, and what they stand for."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sparse24_plans import (
    ArchSku,
    AttentionMask,
    BlockSparseConvOp,
    BlockSparseOp,
    BlockSparsePass,
    DeviceProperties,
    ElementKind,
    EpilogueKind,
    GemmOp,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InnerPattern,
    InvalidProblemError,
    MaskLayout,
    MathPrecision,
    MatrixOrder,
    OpCategory,
    PrepareOp,
    ScaleKind,
    Sparse24Weight,
    Tier,
    TileRule,
)

WORDS = {
    ElementKind: "f32 f16 bf16 s8 s4 fp8_e4m3 fp8_e5m2 i32 u16 u8",
    MathPrecision: "f32 tf32 f16 bf16 int8 fp8_e4m3 fp8_e5m2",
    EpilogueKind: (
        "identity relu gelu silu gelu_tanh relu2 swiglu geglu geglu_tanh "
        "bias bias_relu bias_gelu bias_silu bias_gelu_tanh bias_relu2 bias_swiglu bias_geglu bias_geglu_tanh"
    ),
    GemmOp: "forward dgrad",
    MatrixOrder: "row column",
    ScaleKind: "none tensor row",
    BlockSparseOp: "sdd dsd dds",
    BlockSparsePass: "forward backward",
    InnerPattern: "dense sparse24",
    BlockSparseConvOp: "forward dgrad wgrad",
    AttentionMask: "none add mul",
    PrepareOp: (
        "prune compress prune_compress decompress pack unpack tile_prune mask quantize "
        "prune_quantize dequantize"
    ),
    TileRule: "greedy_magnitude greedy_value causal_1122 optimal",
    MaskLayout: "rows tiles",
    OpCategory: "gemm prune compress decompress pack quantize softmax attention convolution",
    ArchSku: "any sm80 sm89 sm90a sm100 sm120",
    Tier: "host inflate memory tensor_core sparse_tensor_core",
}
every_enum = pytest.mark.parametrize("enum", WORDS, ids=lambda enum: enum.__name__)
every_word = pytest.mark.parametrize("word", [word for enum in WORDS for word in enum], ids=repr)


@every_enum
def test_names_and_values_are_exactly_these(enum):
    values = WORDS[enum].split()
    assert [member.value for member in enum] == values
    assert list(enum.__members__) == [value.upper() for value in values]


@every_word
def test_a_word_is_its_string(word):
    assert str(word) == f"{word}" == json.loads(json.dumps(word)) == word.value
    assert word == word.value
    assert {word.value: 1}[word] == 1
    assert type(word)(word.value) is word


BITS = {
    "f32": ("float32", 4),
    "f16": ("float16", 2),
    "bf16": ("bfloat16", 2),
    "s8": ("int8", 1),
    "s4": ("int4", 1),
    "fp8_e4m3": ("float8_e4m3fn", 1),
    "fp8_e5m2": ("float8_e5m2", 1),
    "i32": ("int32", 4),
    "u16": ("uint16", 2),
    "u8": ("uint8", 1),
}
SIGNIFICAND_BITS = {"f32": 24, "f16": 11, "bf16": 8, "fp8_e4m3": 4, "fp8_e5m2": 3}
SMALLEST = {"f32": -149, "f16": -24, "bf16": -133, "fp8_e4m3": -9, "fp8_e5m2": -16}


@pytest.mark.parametrize("kind", ElementKind)
def test_elements_describe_their_bits(kind):
    name, itemsize = BITS[kind]
    assert kind.dtype.name == name
    assert kind.itemsize == kind.dtype.itemsize == itemsize
    assert kind.bits_dtype == f"u{itemsize}"
    if kind in SIGNIFICAND_BITS:
        assert kind.unit_roundoff == 2.0 ** -SIGNIFICAND_BITS[kind]
        assert kind.smallest_subnormal == 2.0 ** SMALLEST[kind]
    else:
        assert kind.unit_roundoff == kind.smallest_subnormal == 0


@pytest.mark.parametrize("kind", SIGNIFICAND_BITS)
def test_rounding_is_as_coarse_as_they_say(kind):
    """The type itself: 1 + u lies half way to the next value, and the smallest value isn't rounded away."""
    kind = ElementKind(kind)
    near = np.array([1 + 0.99 * kind.unit_roundoff, 1 + 1.01 * kind.unit_roundoff]).astype(kind.dtype)
    assert near.astype(float).tolist() == [1, 1 + 2 * kind.unit_roundoff]
    tiny = np.array([kind.smallest_subnormal, kind.smallest_subnormal * 0.49]).astype(kind.dtype)
    assert tiny.astype(float).tolist() == [kind.smallest_subnormal, 0]


@pytest.mark.parametrize("kind", EpilogueKind)
def test_the_epilogues_that_take_a_bias_say_so(kind):
    """With these epilogues the bias matters: the same operands with another bias give another result."""
    desc = GemmSparse24Descriptor(n=1, m=16, k=8, element="f32", epilogue=kind)
    plan = GemmSparse24Plan.select(desc, device="host")
    weight, x = Sparse24Weight.prune_compress(np.ones((16, 8), np.float32)), np.ones((1, 8), np.float32)
    results = []
    for bias in (np.full(16, 1, np.float32), np.full(16, 2, np.float32), None):
        y = np.full((1, 8 if kind.is_gated else 16), np.nan, np.float32)
        args = GemmSparse24Args(weight, x, y, bias)
        if (bias is None) == kind.has_bias:
            with pytest.raises(InvalidProblemError, match="bias: expected"):
                plan.run(args)
            continue
        plan.run(args)
        results.append(y[0, 0])
    assert kind.has_bias == ("bias" in kind)
    assert kind.is_gated == ("glu" in kind)
    assert len(set(results)) == (2 if kind.has_bias else 1)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_the_compilers_target_of_a_device(capability, arch):
    assert DeviceProperties(kind="cuda", compute_capability=capability, multiprocessors=1).cuda_arch == arch


@pytest.mark.parametrize("kind", ElementKind)
def test_numpys_name_means_the_element(kind):
    assert ElementKind(kind.dtype.name) is kind
