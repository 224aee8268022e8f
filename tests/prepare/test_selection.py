"""Which kernel prepares what where, what the plan says it is, and what no kernel serves."""

from __future__ import annotations

import pytest

from sparse24_plans import (
    DeviceProperties,
    PackSparse24Descriptor,
    PlanPreference,
    PrepareOp,
    PruneSparse24Descriptor,
    TilePruneSparse24Descriptor,
    UnsupportedError,
)
from sparse24_plans.plan.kernel_table import choose, consider
from sparse24_plans.prepare import kernel_table

from ..plan.cases import PREPARE, name_of, select
from ..sample_devices import HOPPER, HOST

M, K = 16, 32
every_descriptor = pytest.mark.parametrize("desc", PREPARE, ids=name_of)
# Op -> category, the backend of the device if there is one, the row of the host.
IDENTITY = {
    "prune": ("prune", "prune", "host"),
    "mask": ("prune", "prune", "host"),
    "tile_prune": ("prune", "tile_prune", "host"),
    "compress": ("compress", "prune", "host"),
    "prune_compress": ("compress", "prune", "host"),
    "decompress": ("decompress", "decompress", "host"),
    "pack": ("pack", "pack", "host_pack"),
    "unpack": ("pack", "pack", "host_pack"),
    "quantize": ("quantize", "quantize", "host_quantize"),
    "prune_quantize": ("quantize", None, "host_quantize"),
    "dequantize": ("decompress", None, "host_quantize"),
}


def kernel_of(desc) -> str | None:
    """The kernel entry that serves on a GPU. Two of one backend quantize to different elements."""
    name = IDENTITY[desc.op][1]
    return f"{name}_{str(desc.out_element).removesuffix('_e4m3')}" if desc.op == "quantize" else name


def test_every_op_is_listed_here():
    assert set(IDENTITY) == set(PrepareOp) == {desc.op for desc in PREPARE}


@every_descriptor
def test_a_plan_says_what_it_is(desc, device):
    plan = select(desc, device)
    category, backend, row = IDENTITY[desc.op]
    on_host = device == "host"
    assert plan is select(desc, device)
    sku = plan.sku
    assert (sku.category, sku.op) == (category, f"{desc.op}_sparse24")
    made = getattr(desc, "out_element", desc.element)
    assert (sku.element, sku.aux_element, sku.epilogue) == (desc.element, made, "identity")
    assert sku.layout == ("tile64x128_16bit_v1" if "pack" in desc.op else "canonical")
    assert (sku.arch, sku.backend) == ("any", "host" if on_host else backend)
    about = plan.explain()
    assert about.chosen == (row if on_host else kernel_of(desc))
    assert [name for name, _, reason in about.rows if reason is None] == [about.chosen]
    assert plan.workspace_size() == 0
    assert plan.tier == ("host" if on_host else "memory")


@every_descriptor
def test_one_row_serves_each_place(desc):
    for place, name in ((HOPPER, kernel_of(desc)), (HOST, IDENTITY[desc.op][2])):
        rows = consider(kernel_table.ENTRIES, desc, PlanPreference(), place)
        assert [one.entry.name for one in rows if one.reason is None] == ([name] if name else [])


@pytest.mark.parametrize("desc", [desc for desc in PREPARE if kernel_of(desc) is None], ids=name_of)
def test_no_gpu_quantizes_weights(desc):
    rows = consider(kernel_table.ENTRIES, desc, PlanPreference(), HOPPER)
    with pytest.raises(UnsupportedError, match=f"does not serve op {desc.op}"):
        choose(rows)


def test_only_elements_with_a_layout_are_packed():
    desc = PackSparse24Descriptor(m=M, k=K, element="u8")
    with pytest.raises(
        UnsupportedError, match="serves elements f32, f16, bf16, s8, fp8_e4m3, fp8_e5m2, not u8"
    ):
        select(desc, "host")


@pytest.mark.parametrize(
    ("kind", "m", "k"),
    [(PruneSparse24Descriptor, 1 << 29, 1 << 29), (TilePruneSparse24Descriptor, 1 << 25, 1 << 25)],
)
def test_what_overflows_the_grid_is_unsupported(kind, m, k):
    rows = consider(kernel_table.ENTRIES, kind(m=m, k=k, element="f32"), PlanPreference(), HOPPER)
    assert any("exceed the grid limit" in (row.reason or "") for row in rows)
    with pytest.raises(UnsupportedError):
        choose(rows)


@pytest.mark.parametrize(
    ("preference", "device", "reason"),
    [
        ({"prefer_backend": "mma_sp"}, HOPPER, "prefer_backend is mma_sp"),
        ({"tier": "sparse_tensor_core"}, HOPPER, "tier is sparse_tensor_core"),
        (
            {},
            DeviceProperties(kind="cuda", compute_capability=(7, 5), multiprocessors=40),
            r"needs compute capability 8\.0, got|does not serve op",
        ),
    ],
)
@every_descriptor
def test_why_nothing_serves(desc, preference, device, reason):
    rows = consider(kernel_table.ENTRIES, desc, PlanPreference(**preference), device)
    with pytest.raises(UnsupportedError, match=reason):
        choose(rows)
