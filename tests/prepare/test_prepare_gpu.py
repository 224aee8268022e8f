"""Preparing weights on a GPU: the host's bits, whatever the values and sizes; what is found on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparse24_plans import (
    CompressSparse24Descriptor,
    DecompressSparse24Descriptor,
    FormatError,
    MaskSparse24Descriptor,
    PackSparse24Descriptor,
    PruneCompressSparse24Descriptor,
    PruneSparse24Descriptor,
    TilePruneSparse24Descriptor,
    TileRule,
)
from sparse24_plans.prepare.kernel_table import PACKED_ELEMENTS

from ..plan.cases import kernel_case
from .prepare_cases import ELEMENTS, MOODS, PrepareCase, equal, matrix, run

pytestmark = pytest.mark.gpu
every_element = pytest.mark.parametrize("element", ELEMENTS)
every_mood = pytest.mark.parametrize("mood", MOODS)
# One unit and less, an odd number of half units, edges of blocks and tiles.
SHAPES = ((1, 8), (3, 24), (7, 40), (65, 264), (130, 1000), (64, 128))
SQUARES = ((8, 8), (24, 40), (136, 144), (256, 128), (8, 1000), (1000, 8))


def both(desc, **inputs):
    """The GPU's results, which are the host's."""
    here, there = run(desc, "host", **inputs), run(desc, 0, **inputs)
    for name in here:
        wrong = np.argwhere(here[name] != there[name])
        assert len(wrong) == 0, f"{name}: {len(wrong)} differ, the first at {wrong[0]}"
    assert equal(here, there)
    return there


@every_mood
@every_element
def test_the_bits_are_the_hosts(element, mood):
    rng = np.random.default_rng(0)
    for m, k in SHAPES:
        fields = {"m": m, "k": k, "element": element}
        dense = matrix(rng, (m, k), element, mood)
        both(PruneSparse24Descriptor(**fields), dense=dense)
        for scores in ("f32", "f16", "bf16"):
            desc = PruneCompressSparse24Descriptor(**fields, scores=scores)
            both(desc, dense=dense, scores=matrix(rng, (m, k), desc.scores, mood))
            desc = PruneSparse24Descriptor(**fields, scores=scores)
            both(desc, dense=dense, scores=matrix(rng, (m, k), desc.scores, mood))
        both(CompressSparse24Descriptor(**fields), dense=dense)
        kept = both(PruneCompressSparse24Descriptor(**fields), dense=dense)
        both(DecompressSparse24Descriptor(**fields), **kept)
        mask = rng.integers(0, 256, (m, k // 8), dtype=np.uint8)
        both(MaskSparse24Descriptor(**fields), dense=dense, mask=mask)
        if element in PACKED_ELEMENTS:
            packed = both(PackSparse24Descriptor(**fields), **kept)
            back = both(PackSparse24Descriptor(**fields, direction="unpack"), **packed)
            assert np.array_equal(back["values"], kept["values"])
            assert np.array_equal(back["metadata"], kept["metadata"])


@every_mood
@every_element
@pytest.mark.parametrize("rule", TileRule)
def test_the_bits_of_tiles_are_the_hosts(element, rule, mood):
    rng = np.random.default_rng(0)
    for m, k in SQUARES:
        dense = matrix(rng, (m, k), element, mood)
        found = both(TilePruneSparse24Descriptor(m=m, k=k, element=element, rule=rule), dense=dense)
        both(
            MaskSparse24Descriptor(m=m, k=k, element=element, layout="tiles"),
            dense=dense,
            mask=found["mask"],
        )


@pytest.mark.parametrize("name", ["prune", "mask", "mask_tiles"])
def test_in_place(name):
    case = kernel_case(name)
    want = case.run()
    out = "pruned" if name == "prune" else "masked"
    case.plan.run(replace(case.args, **{out: case.args.dense}))
    case.fetch()
    assert np.array_equal(case.guarded["dense"].numpy().view("u2").reshape(want[out].shape), want[out])


@every_element
def test_violations_are_found_on_the_device(element):
    """The first in row order, however many there are, and whatever stood in the status before."""
    rng = np.random.default_rng(3)
    m, k = 515, 1000
    dense = np.zeros((m, k), element.bits_dtype)
    places = sorted(rng.choice(m * k // 4, 40, replace=False))
    for place in places:
        dense.reshape(-1, 4)[place] = [1, 0, 1, 1]
    case = PrepareCase(CompressSparse24Descriptor(m=m, k=k, element=element), 0, {"dense": dense})
    for _ in range(2):
        case.run()
        with pytest.raises(FormatError, match="at most 2 non-zeros in every group of 4, got 3") as caught:
            case.plan.check(case.args)
        assert (caught.value.row, caught.value.group) == divmod(int(places[0]), k // 4)
    case.guarded["dense"].fill(np.zeros(m * k, element.dtype))
    case.run()
    case.plan.check(case.args)


def test_the_check_waits_for_its_stream():
    import cupy

    dense = np.zeros((8192, 4096), np.uint16)
    dense[-1, -3:] = 1
    case = PrepareCase(CompressSparse24Descriptor(m=8192, k=4096, element="bf16"), 0, {"dense": dense})
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        case.plan.run(case.args, stream=stream)
    with pytest.raises(FormatError):
        case.plan.check(case.args, stream=stream)


def test_a_matrix_beyond_2_to_the_32_cells():
    """Row-wise kernels and tiles, checked at the far end."""
    import cupy

    from sparse24_plans import (
        PruneCompressSparse24Args,
        PruneCompressSparse24Plan,
        TilePruneSparse24Args,
        TilePruneSparse24Plan,
    )

    m, k = 131_080, 32_776
    dense = cupy.random.default_rng(0).integers(0, 255, (m, k), dtype=np.uint8)
    values, metadata = cupy.zeros((m, k // 2), "u1"), cupy.zeros((m, k // 8), "u2")
    plan = PruneCompressSparse24Plan.select(PruneCompressSparse24Descriptor(m=m, k=k, element="u8"), device=0)
    plan.run(PruneCompressSparse24Args(dense, values, metadata))
    tail = cupy.asnumpy(dense[-8:])
    want = run(PruneCompressSparse24Descriptor(m=8, k=k, element="u8"), "host", dense=tail)
    assert np.array_equal(cupy.asnumpy(values[-8:]), want["values"])
    assert np.array_equal(cupy.asnumpy(metadata[-8:]), want["metadata"])
    values_t, metadata_t = cupy.zeros((k, m // 2), "u1"), cupy.zeros((k, m // 8), "u2")
    mask = cupy.zeros((m // 8, k // 8, 8), "u1")
    tiles = TilePruneSparse24Plan.select(TilePruneSparse24Descriptor(m=m, k=k, element="u8"), device=0)
    tiles.run(TilePruneSparse24Args(dense, values, metadata, values_t, metadata_t, mask))
    want = run(TilePruneSparse24Descriptor(m=8, k=k, element="u8"), "host", dense=tail)
    assert np.array_equal(cupy.asnumpy(values[-8:]), want["values"])
    assert np.array_equal(cupy.asnumpy(values_t[:, -4:]), want["values_t"])
    assert np.array_equal(cupy.asnumpy(metadata_t[:, -1:]), want["metadata_t"])
    assert np.array_equal(cupy.asnumpy(mask[-1:]), want["mask"])


@pytest.mark.parametrize(
    ("rule", "algorithm"),
    [
        ("greedy_value", "largest_values_greedy"),
        ("greedy_magnitude", "largest_abs_values_greedy"),
        ("causal_1122", "causal1122"),
    ],
)
def test_the_mask_is_pytorchs(rule, algorithm):
    """Tiles hold no two equal keys, because PyTorch orders ties by its sorting network."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "_sparse_semi_structured_tile"):
        pytest.skip("this PyTorch has no tile packer")
    m, k = 256, 512
    rng = np.random.default_rng(0)
    dense = rng.permutation(m * k).reshape(m, k).astype(np.int64)
    # In every tile 16 different magnitudes that bfloat16 holds exactly.
    local = np.argsort(dense.reshape(m // 4, 4, k // 4, 4).transpose(0, 2, 1, 3).reshape(-1, 16), axis=1) + 1
    signs = rng.choice([-1, 1], local.shape)
    values = (local * signs).reshape(m // 4, k // 4, 4, 4).transpose(0, 2, 1, 3).reshape(m, k)
    tensor = torch.tensor(values, dtype=torch.bfloat16, device="cuda")
    answer = torch._sparse_semi_structured_tile(tensor, algorithm=algorithm, use_cutlass=True)
    bits = tensor.view(torch.int16).cpu().numpy().view(np.uint16)
    ours = run(TilePruneSparse24Descriptor(m=m, k=k, element="bf16", rule=rule), 0, dense=bits)
    assert np.array_equal(ours["mask"], answer[4].cpu().numpy())
