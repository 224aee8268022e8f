"""Plans that quantize weights, and back: the bits of Sparse24QuantizedWeight, in one pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    DequantizeSparse24Args,
    DequantizeSparse24Descriptor,
    DequantizeSparse24Plan,
    ElementKind,
    FormatError,
    InvalidProblemError,
    PruneQuantizeSparse24Args,
    PruneQuantizeSparse24Descriptor,
    PruneQuantizeSparse24Plan,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    UnsupportedError,
)

from ..support import same_bits
from .models import dequantized
from .prepare_cases import MOODS, PrepareCase, matrix, run

elements = st.sampled_from(["f16", "bf16"])
FORMS = {"stored": ["s4", "s8", "fp8_e4m3"], "group": [0, 32, 64, 128]}


@st.composite
def forms(draw: st.DrawFn) -> dict[str, object]:
    """An element and how it is quantized."""
    element = draw(elements)
    more = {name: draw(st.sampled_from(values)) for name, values in FORMS.items()}
    return {"element": element, "scale_element": draw(st.sampled_from([element, "f32"])), **more}


def parts_of(weight: Sparse24QuantizedWeight) -> dict[str, np.ndarray]:
    names = ("values", "metadata", "scales")
    return {name: view.bits() for name, view in zip(names, weight.views, strict=True)}


@given(data=st.data(), fields=forms(), seed=st.integers(0, 2**32 - 1))
def test_one_pass_has_the_bits_of_two(data, fields, seed):
    rng, mood = np.random.default_rng(seed), data.draw(st.sampled_from(MOODS))
    source = ElementKind(data.draw(st.sampled_from(["f32", "f16", "bf16"])))
    rule = data.draw(st.sampled_from(["largest", "least_squares"]))
    scores = data.draw(st.sampled_from([None, "f32", "bf16"]))
    m, k = data.draw(st.integers(0, 5)), 8 * data.draw(st.integers(0, 40))
    dense = matrix(rng, (m, k), source, mood)
    inputs = {"dense": dense}
    if scores:
        inputs["scores"] = matrix(rng, (m, k), ElementKind(scores), mood)
    desc = PruneQuantizeSparse24Descriptor(m=m, k=k, dense_element=source, rule=rule, scores=scores, **fields)
    ranks = inputs["scores"].view(ElementKind(scores).dtype) if scores else None
    pruned = Sparse24Weight.prune_compress(dense, element=source, scores=ranks)
    want = Sparse24QuantizedWeight.quantize(pruned, rule=rule, **fields)
    found = run(desc, "host", **inputs)
    assert found.keys() == parts_of(want).keys()
    for name, bits in parts_of(want).items():
        assert same_bits(found[name].view(bits.dtype), bits), name


@given(data=st.data(), fields=forms(), seed=st.integers(0, 2**32 - 1))
def test_a_matrix_that_is_2_4_already_is_checked(data, fields, seed):
    rng, m, k = np.random.default_rng(seed), 6, 72
    source = ElementKind(data.draw(st.sampled_from(["f32", "f16", "bf16"])))
    weight = Sparse24Weight.prune_compress(matrix(rng, (m, k), source, "sparse"), element=source)
    dense = weight.decompress().view(source.bits_dtype)
    desc = PruneQuantizeSparse24Descriptor(m=m, k=k, dense_element=source, sparse=True, **fields)
    case = PrepareCase(desc, "host", {"dense": dense})
    found = case.run()
    case.plan.check(case.args)
    want = parts_of(
        Sparse24QuantizedWeight.quantize(Sparse24Weight.compress(dense, element=source), **fields)
    )
    for name, bits in want.items():
        assert same_bits(found[name].view(bits.dtype), bits), name
    row, group = data.draw(st.integers(0, m - 1)), data.draw(st.integers(0, k // 4 - 1))
    crowded = dense.copy()
    crowded[row, 4 * group : 4 * group + 3] = source.dtype.type(1).view(source.bits_dtype)
    case = PrepareCase(desc, "host", {"dense": crowded})
    case.run()
    with pytest.raises(FormatError, match="expected at most 2 non-zeros in every group of 4") as caught:
        case.plan.check(case.args)
    assert (caught.value.row, caught.value.group) == (row, group)


@given(data=st.data(), fields=forms(), seed=st.integers(0, 2**32 - 1))
def test_dequantized_values_are_the_products_of_values_and_scales(data, fields, seed):
    """Any stored values and scales, NaN and Inf among them."""
    rng = np.random.default_rng(seed)
    m, k = data.draw(st.integers(0, 4)), 8 * data.draw(st.integers(0, 30))
    desc = DequantizeSparse24Descriptor(m=m, k=k, **fields)
    by, held = desc.quantization, ElementKind(fields["stored"])
    width = k // 4 if held == "s4" else k // 2
    inputs = {
        "values": rng.integers(0, 256, (m, width)).astype(np.uint8),
        "metadata": np.full((m, k // 8), 0x0404, np.uint16),
        "scales": matrix(rng, (m, by.scales_of_a_row(k)), by.scale_element, "any_bits"),
    }
    found = run(desc, "host", **inputs)["dequantized"]
    assert same_bits(found, dequantized(desc, inputs))


def test_the_results_are_weights_around_the_same_memory():
    m, k = 8, 128
    dense = np.random.default_rng(0).standard_normal((m, k), np.float32)
    desc = PruneQuantizeSparse24Descriptor(m=m, k=k, element="bf16", dense_element="f32", group=64)
    plan = PruneQuantizeSparse24Plan.select(desc, device="host")
    values, metadata = np.empty((m, k // 4), np.uint8), np.empty((m, k // 8), np.uint16)
    scales = np.empty((m, 2), ElementKind.BF16.dtype)
    args = PruneQuantizeSparse24Args(dense, values, metadata, scales)
    plan.run(args)
    plan.check(args)  # nothing was to be checked
    weight = plan.weight(args)
    assert weight.quantization == ("s4", 64, "bf16")
    assert [view.address for view in weight.views] == [one.ctypes.data for one in (values, metadata, scales)]
    back = DequantizeSparse24Plan.select(
        DequantizeSparse24Descriptor(m=m, k=k, element="bf16", group=64), device="host"
    )
    out = np.empty((m, k // 2), ElementKind.BF16.dtype)
    back.run(DequantizeSparse24Args(weight, out))
    whole = back.weight(DequantizeSparse24Args(weight, out))
    assert whole.values_view.address == out.ctypes.data
    assert same_bits(whole.decompress(), weight.dequantize().decompress())
    assert back.explain().chosen == plan.explain().chosen == "host_quantize"


def test_a_weight_of_another_quantization_is_refused():
    weight = Sparse24QuantizedWeight.quantize(
        Sparse24Weight.compress(np.zeros((2, 64), np.float16)), stored="s8", group=32
    )
    plan = DequantizeSparse24Plan.select(
        DequantizeSparse24Descriptor(m=2, k=64, element="f16", group=32), device="host"
    )
    out = np.empty((2, 32), np.float16)
    with pytest.raises(InvalidProblemError, match=r"weight: expected s4 with f16 scales .*, got s8"):
        plan.run(DequantizeSparse24Args(weight, out))
    with pytest.raises(InvalidProblemError, match=r"weight: expected s4 .* that are not quantized"):
        plan.run(DequantizeSparse24Args(weight.dequantize(), out))


def test_status_is_given_exactly_where_w_is_2_4_already():
    dense = np.zeros((1, 8), np.float16)
    parts = np.empty((1, 2), np.uint8), np.empty((1, 1), np.uint16), np.empty((1, 1), np.float16)
    for sparse, status, words in (
        (True, None, "status: expected a tensor"),
        (False, 1, "status: expected None"),
    ):
        desc = PruneQuantizeSparse24Descriptor(m=1, k=8, element="f16", sparse=sparse)
        plan = PruneQuantizeSparse24Plan.select(desc, device="host")
        with pytest.raises(InvalidProblemError, match=words):
            plan.run(PruneQuantizeSparse24Args(dense, *parts, status=status and np.empty(8, np.uint8)))


@pytest.mark.parametrize("kind", [PruneQuantizeSparse24Descriptor, DequantizeSparse24Descriptor])
def test_gpus_refuse_by_name(kind):
    plans = {
        PruneQuantizeSparse24Descriptor: PruneQuantizeSparse24Plan,
        DequantizeSparse24Descriptor: DequantizeSparse24Plan,
    }
    desc = kind(m=64, k=128, element="bf16")
    with pytest.raises(UnsupportedError, match=f"does not serve op {desc.op}"):
        plans[kind].select(desc, device="h200")
