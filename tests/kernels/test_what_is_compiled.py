"""The tested compilations stand for all that plans can ask for: every entry, source and architecture."""

from __future__ import annotations

from itertools import combinations

import pytest

from sparse24_plans import ElementKind, EpilogueKind, GemmSparse24Descriptor, PlanPreference
from sparse24_plans.blocksparse.shape import BLOCK_SIZES
from sparse24_plans.device.jit import enum_codes
from sparse24_plans.vocab import GemmOp

from .block_requests import (
    ATTENTION_ENTRIES,
    BLOCKS_ENTRIES,
    CONVOLUTION_ENTRIES,
    SOFTMAX_ENTRIES,
    attention_requests,
    blocks_requests,
    convolution_requests,
    softmax_requests,
)
from .covering import (
    COUNTS,
    KINDS,
    SOURCES,
    all_asked,
    covering,
    every_kind,
    every_pair,
    every_source,
    every_value,
    everything,
    instructions_of,
    kinds_of,
    pairs_of,
    single_words_of,
)
from .gemm_requests import GEMM_ENTRIES, PREPARE_ENTRIES, gemm_requests, prepare_requests
from .requests import CAPABILITIES, HOPPER, Request, device_of, serves


def test_every_device_row_and_every_source_is_covered():
    assert all(gemm_requests(row, HOPPER) for row in GEMM_ENTRIES)
    assert all(prepare_requests(row, HOPPER) for row in PREPARE_ENTRIES)
    assert all(blocks_requests(row, HOPPER) for row in BLOCKS_ENTRIES)
    assert all(attention_requests(row, HOPPER) for row in ATTENTION_ENTRIES)
    assert all(convolution_requests(row, HOPPER) for row in CONVOLUTION_ENTRIES)
    assert all(softmax_requests(row, HOPPER) for row in SOFTMAX_ENTRIES)
    assert {request.source for request in every_value()} == set(SOURCES)


def words_of(request: Request) -> set[tuple[str, object]]:
    return {*request.defines, ("function", request.function)}


@every_source
def test_every_word_is_compiled(source):
    compiled, asked = (
        set().union(*(words_of(request) for request in requests if request.source == source))
        for requests in (every_value(), all_asked())
    )
    assert compiled == asked


@every_source
def test_every_two_words_are_compiled_together(source, request):
    """A part of what is asked for of the largest source is enough where pairs are not compiled."""
    asked_for = [one for one in all_asked() if one.source == source]
    if request.config.getoption("--compile") == "pairs":
        of_source = [one for one in every_pair() if one.source == source]
    else:
        asked_for = asked_for[:: 1 + len(asked_for) // 300]
        of_source = covering(asked_for, pairs_of)
    each = set().union(*map(words_of, of_source))
    together = {frozenset(group) for one in of_source for group in combinations(words_of(one), 2)}
    for asked in map(words_of, asked_for):
        assert asked <= each
        interacting = {word for word in asked if word[0] not in COUNTS}
        assert {frozenset(group) for group in combinations(interacting, 2)} <= together


def test_compilations_are_a_part_of_everything(request):
    pairs = [every_pair()] if request.config.getoption("--compile") == "pairs" else []
    for requests in (every_kind(), every_value(), *pairs):
        assert set(requests) < set(all_asked()) < set(everything())
        assert len(requests) == len(set(requests))


@pytest.mark.parametrize("groups_of", [kinds_of, single_words_of, pairs_of])
def test_a_cover_leaves_out_what_adds_nothing(groups_of):
    one, *_ = asked = [request for request in all_asked() if request.source == "gemm/wgmma_sp.cu"][:50]
    cover = covering([*asked, one], groups_of)
    assert len(cover) == len(set(cover))
    assert set(covering(cover, groups_of)) == set(cover)
    groups = [{group for request in requests for group in groups_of(request)} for requests in (asked, cover)]
    assert groups[0] == groups[1]


@every_source
def test_every_architecture_that_a_source_is_for_is_covered(source):
    rows = [row for row in GEMM_ENTRIES if any(one.source == source for one in gemm_requests(row, HOPPER))]
    rows += [
        row for row in BLOCKS_ENTRIES if any(one.source == source for one in blocks_requests(row, HOPPER))
    ]
    of_source = (row for row in ATTENTION_ENTRIES if attention_requests(row, HOPPER)[0].source == source)
    rows += list(of_source)
    rows += [row for row in CONVOLUTION_ENTRIES if convolution_requests(row, HOPPER)[0].source == source]
    oldest = min([row.min_compute_capability for row in rows], default=(8, 0))
    below = max([row.below_compute_capability for row in rows], default=(99, 0))
    wanted = {device_of(one).cuda_arch for one in CAPABILITIES if oldest <= one < below}
    assert {request.arch for request in every_value() if request.source == source} == wanted


def test_every_source_and_architecture_is_among_the_kinds():
    assert {request.source for request in every_kind()} == set(SOURCES)
    assert {request.arch for request in every_kind()} == {device_of(one).cuda_arch for one in CAPABILITIES}

    def kinds(requests, source=None):
        ours = [one for one in requests if source in (None, one.source)]
        words = {word for one in ours for word in one.defines if word[0] in KINDS}
        return words if source is None else {(name, instructions_of(element)) for name, element in words}

    assert kinds(every_kind()) == kinds(all_asked())
    for source in [one for one in SOURCES if "mma" in one]:
        assert kinds(every_kind(), source) == kinds(all_asked(), source)


@pytest.mark.parametrize("row", PREPARE_ENTRIES, ids=lambda row: row.name)
def test_preparing_is_compiled_for_every_width_of_its_elements(row):
    asked = [dict(request.defines) for request in prepare_requests(row, HOPPER)]
    if row.backend == "quantize":
        assert {d["ELEMENT"] for d in asked} == {enum_codes.ELEMENT_CODES[one] for one in row.elements}
        assert {(d["OUT"], d["STATIC"]) for d in asked} == {
            (enum_codes.ELEMENT_CODES[row.out_element], static) for static in (0, 1)
        }
        return
    widths = {d["WIDTH"] for d in asked}
    assert widths == {element.itemsize for element in row.elements}
    numbers = {d["NUMBER"] for d in asked if "NUMBER" in d}  # unsigned, two's complement, sign and magnitude
    assert numbers in (set(), {0, 1, 2} if ElementKind.U8 in row.elements else {1, 2})


@pytest.mark.parametrize("row", BLOCKS_ENTRIES, ids=lambda row: row.name)
def test_every_size_of_blocks_and_element_is_covered_on_hopper(row):
    asked = [dict(request.defines) for request in blocks_requests(row, HOPPER)]
    asked = [defines for defines in asked if "ELEMENT" in defines]  # not what transposes operands
    assert {d["ELEMENT"] for d in asked} == {enum_codes.ELEMENT_CODES[element] for element in row.elements}
    assert {d["BLOCK"] for d in asked} == set(row.blocks)


@pytest.mark.parametrize("row", CONVOLUTION_ENTRIES, ids=lambda row: row.name)
def test_every_convolution_is_covered_on_hopper(row):
    asked = [dict(request.defines) for request in convolution_requests(row, HOPPER)]
    assert {d["ELEMENT"] for d in asked} == {enum_codes.ELEMENT_CODES[element] for element in row.elements}
    assert {(d["BLOCK"], d["OP"]) for d in asked} == {
        (block, op) for block in BLOCK_SIZES for op in range(3) if op < 2 or block >= 64
    }
    assert {(d["OP"], d["PHASES"], d["SPLIT_K"]) for d in asked} >= {
        (1, 0, 0),
        (1, 1, 0),
        (2, 0, 0),
        (2, 0, 1),
    }


@pytest.mark.parametrize("row", GEMM_ENTRIES, ids=lambda row: row.name)
def test_every_element_and_epilogue_is_covered_on_hopper(row):
    asked = [dict(request.defines) for request in gemm_requests(row, HOPPER)]
    asked = [defines for defines in asked if "ELEMENT" in defines]  # not what only prepares X
    assert {d["ELEMENT"] for d in asked} == {enum_codes.ELEMENT_CODES[element] for element in row.elements}
    if "DGRAD" in asked[0]:
        assert {d["DGRAD"] for d in asked} == {int(op is GemmOp.DGRAD) for op in row.ops}
    heavy = {EpilogueKind(f"bias_{word}") for word in ("gelu", "silu", "geglu", "swiglu")}
    assert {enum_codes.EPILOGUE_CODES[kind] for kind in heavy & set(row.epilogues)} <= {
        d["EPILOGUE"] for d in asked
    }


@pytest.mark.parametrize("row", [row for row in GEMM_ENTRIES if row.groups], ids=lambda row: row.name)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_groups_are_compiled_wherever_a_kernel_serves_them(row, capability):
    """Those of the strict kernel with C, gates and backward, too: other GPUs than Hopper have no other."""
    asked = [dict(request.defines) for request in gemm_requests(row, capability)]
    grouped = [defines for defines in asked if defines.get("GROUPED")]
    device = device_of(capability)
    desc = GemmSparse24Descriptor(n=64, m=4096, k=4096, groups=8, element=row.elements[-1])
    if row.missing(device) or not serves(row, desc, PlanPreference(prefer_backend=row.backend), device):
        assert grouped == []
        return
    assert grouped
    if not row.only_groups:
        assert any(defines["C"] for defines in grouped)
        assert {defines["DGRAD"] for defines in grouped} == {0, 1}
        gates = {enum_codes.EPILOGUE_CODES[kind] for kind in row.epilogues if kind.is_gated}
        assert gates & {defines["EPILOGUE"] for defines in grouped}


@pytest.mark.parametrize("row", SOFTMAX_ENTRIES, ids=lambda row: row.name)
def test_softmax_is_compiled_for_every_word_of_its_descriptor(row):
    asked = [dict(request.defines) for request in softmax_requests(row, HOPPER)]
    wanted = {
        "ELEMENT": {enum_codes.ELEMENT_CODES[element] for element in row.elements},
        "BLOCK": set(BLOCK_SIZES),
        **{name: set(enum_codes.MASK_CODES.values()) for name in ("KEY_MASK", "ATTN_MASK")},
        **{name: {0, 1} for name in ("BACKWARD", "RPE", "CAUSAL")},
    }
    assert {name: {one[name] for one in asked} for name in wanted} == wanted
    assert {1, 16} <= {one["WARPS"] for one in asked}
