"""Compilations that plans of 2:4 products and of the preparation of weights ask for."""

from __future__ import annotations

import functools
import itertools
from contextlib import ExitStack
from unittest import mock

from sparse24_plans import DeviceProperties, EpilogueKind, GemmSparse24Descriptor, PlanPreference
from sparse24_plans.gemm import kernel_table as gemm_table
from sparse24_plans.gemm.backends import f32_split, wgmma_sp, wgmma_sp_grouped
from sparse24_plans.gemm.kernel_table import GemmEntry
from sparse24_plans.gemm.schedules import f32_split_heuristics, grouped
from sparse24_plans.gemm.schedules.wgmma_heuristics import WGMMA_SP
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.prepare import kernel_table as prepare_table
from sparse24_plans.prepare.kernel_table import PrepareEntry

from ..prepare.prepare_cases import kernel_descriptors
from .requests import HOPPER, Request, device_of, index_of, recorded_loads, serves

KINDS = (
    {"element": "bf16", "epilogue": "bias_gelu"},
    {"element": "f16", "epilogue": "bias"},
    {"element": "f32", "epilogue": "bias_relu"},
    {"element": "f32", "epilogue": "bias_gelu"},
    {"element": "f32", "epilogue": "bias_silu"},
    {"element": "bf16", "epilogue": "bias_silu", "out_element": "f32", "bias_element": "f32"},
    {"element": "f16", "epilogue": "bias_silu", "x_order": "column", "y_order": "column"},
    {"element": "bf16", "out_element": "f32", "x_order": "column"},
    {"element": "bf16", "epilogue": "bias", "out_element": "f32", "y_order": "column"},
    {"element": "f16", "op": "dgrad"},
    {"element": "f32", "op": "dgrad"},
    {"element": "s8", "epilogue": "bias_gelu", "out_element": "s8", "scale_x": "row", "scale_w": "row"},
    {"element": "s8"},
    {"element": "s8", "epilogue": "bias_silu", "out_element": "f16", "bias_element": "f32"},
    {"element": "fp8_e4m3", "epilogue": "bias_gelu", "scale_x": "tensor", "scale_w": "row"},
    {"element": "fp8_e4m3", "epilogue": "bias_silu", "out_element": "f32"},
    {"element": "bf16", "epilogue": "bias_swiglu"},
    {"element": "f16", "epilogue": "bias_geglu", "x_order": "column", "y_order": "column"},
    {"element": "bf16", "epilogue": "bias_geglu", "out_element": "f32", "bias_element": "f32"},
    {"element": "bf16", "epilogue": "bias_swiglu", "out_element": "f32", "y_order": "column"},
    {"element": "f32", "epilogue": "bias_swiglu"},
    {"element": "f32", "epilogue": "bias_geglu"},
    {"element": "s8", "epilogue": "bias_swiglu", "out_element": "s8", "scale_x": "row", "scale_w": "row"},
    {"element": "s8", "epilogue": "bias_geglu", "out_element": "bf16", "scale_w": "row"},
    {"element": "fp8_e4m3", "epilogue": "bias_swiglu", "scale_x": "tensor", "scale_w": "row"},
    {"element": "fp8_e4m3", "epilogue": "bias_geglu", "out_element": "f32"},
    {"element": "bf16", "epilogue": "bias_gelu_tanh"},
    {"element": "f32", "epilogue": "bias_gelu_tanh"},
    {"element": "bf16", "epilogue": "bias_geglu_tanh"},
    {"element": "f32", "epilogue": "bias_geglu_tanh"},
    {"element": "fp8_e4m3", "epilogue": "bias_geglu_tanh", "scale_x": "row", "scale_w": "row"},
    {"element": "f16", "epilogue": "bias_relu2"},
    {"element": "bf16", "epilogue": "bias_relu", "relu_threshold": 0.5, "relu_upper_bound": 6.0},
    *(
        {"element": element, "weight_element": stored, "weight_group": group, "weight_scale_element": scale}
        for element, stored, group, scale in (
            ("bf16", "s4", 128, "bf16"),
            ("bf16", "s4", 32, "f32"),
            ("f16", "s8", 64, "f16"),
            ("bf16", "s8", 0, "bf16"),
            ("bf16", "fp8_e4m3", 32, "bf16"),
            ("f16", "fp8_e4m3", 128, "f32"),
        )
    ),
    {"element": "bf16", "weight_element": "s4", "weight_group": 64, "epilogue": "bias_swiglu"},
    {"element": "bf16", "epilogue": "bias_gelu", "beta": 0.5},
    {"element": "bf16", "out_element": "f32", "beta": 1.0},
    {"element": "f16", "epilogue": "bias_silu", "y_order": "column", "c_element": "f32", "beta": 0.5},
    {"element": "f32", "epilogue": "bias_gelu", "beta": 0.5},
    {"element": "s8", "beta": 0.5},
    {"element": "s8", "epilogue": "bias_silu", "out_element": "s8", "scale_x": "row", "beta": 0.5},
    {"element": "fp8_e4m3", "epilogue": "bias_gelu", "c_element": "f32", "beta": 0.5},
    {"element": "fp8_e4m3", "x_element": "fp8_e5m2", "out_element": "fp8_e4m3", "epilogue": "bias_gelu"},
    {"element": "fp8_e5m2", "x_element": "fp8_e4m3", "out_element": "fp8_e5m2", "scale_x": "row"},
    {"element": "fp8_e5m2", "out_element": "fp8_e4m3", "epilogue": "bias_swiglu", "scale_w": "row"},
    {"element": "fp8_e4m3", "out_element": "fp8_e4m3", "epilogue": "bias_silu", "beta": 0.5},
    {"element": "fp8_e5m2", "op": "dgrad"},
    {"element": "bf16", "out_element": "fp8_e4m3", "epilogue": "bias_geglu"},
    {"element": "f16", "out_element": "fp8_e5m2", "epilogue": "bias_gelu", "y_order": "column"},
    {"element": "bf16", "out_element": "fp8_e4m3", "epilogue": "bias_gelu", "beta": 0.5},
)
SIZES = {
    # cuBLAS itself is asked for an algorithm only where there is a result.
    "inflate_cublas": [{"n": 0}],
    "inflate_strict": [{"n": 1}, {"n": 64}, {"n": 300}],
    "mma_sp": [{"n": n, "m": m} for m in (4096, 6144, 28672) for n in (1, 9, 17, 33, 65)],
    "mma_sp_many": [{"n": 300}],
    "mma_sp_fp8": [{"n": n} for n in (8, 16, 32)],
    "inflate_strict_fp8": [{"n": 1}],
    "wgmma_sp": [{"n": 8}],
    "wgmma_sp_invariant": [{"n": 8}],
    **{
        f"wgmma_sp_grouped{suffix}": [{"n": 64, "groups": 8}, {"n": 4096, "groups": 8}]
        for suffix in ("", "_invariant", "_s8", "_fp8", "_fp8_invariant")
    },
}
WGMMA_TOKENS = {
    "wgmma_sp": (8, 16, 48, 64, 128, 300, 1024),
    "wgmma_sp_invariant": (64, 300, 1024),
    "wgmma_sp_s8": (48, 64, 400),
    "wgmma_sp_fp8": (8, 1024),
    "wgmma_sp_fp8_invariant": (64, 300),
    "wgmma_sp_fp8_promoted": (64, 1024),
    "wgmma_sp_grouped": (2, 64, 256),
    "wgmma_sp_grouped_s8": (2, 64),
    "wgmma_sp_grouped_fp8": (2, 64),
    "f32_split3": (8, 128, 4096),
    "f32_split6": (16, 24, 48, 4096),
}
"""Every schedule of these n is compiled."""
COLUMNS = {"element": "bf16", "epilogue": "bias_gelu", "x_order": "column", "y_order": "column"}
WGMMA_TOKENS_OF_COLUMNS = {"wgmma_sp": (24, 296), "wgmma_sp_invariant": (1024,)}
"""Every schedule of these n is also compiled with column-major X and Y."""
GEMM_ENTRIES = [row for row in gemm_table.ENTRIES if not row.on_host and row.backend != "cusparselt"]
"""Entries of the package's own kernels; cuSPARSELt brings compiled ones."""
PREPARE_ENTRIES = [row for row in prepare_table.ENTRIES if not row.on_host]


@functools.cache
def gemm_requests(row: GemmEntry, capability: tuple[int, int]) -> list[Request]:
    """Every size of one kind; on Hopper also every kind at one size, and every schedule.

    Elsewhere also every size of a kind with another epilogue, which is another on each architecture.
    """
    sizes = SIZES.get(row.name, [{}])
    kinds = [kind for kind in KINDS if kind["element"] in row.elements]
    quantized = [kind for kind in kinds if "weight_element" in kind]
    if not row.quantized:
        kinds = [kind for kind in kinds if kind not in quantized]
    if row.only_groups:
        kinds = [kind for kind in kinds if not {"x_order", "y_order", "op", "beta"} & set(kind)]
    cases = [(size, kinds[0]) for size in sizes]
    if capability == HOPPER:
        cases += [(sizes[0], kind) for kind in kinds[1:]]
    else:
        cases += [(sizes[0], kind) for kind in with_c(row)[:1]]
        others = by_epilogue(kinds)[1:] or kinds
        cases += [(size, others[-1 - index_of(capability) % len(others)]) for size in sizes]
    device, preference = device_of(capability), PlanPreference(prefer_backend=row.backend)
    with recorded_loads(row.kernel) as found:
        for size, kind in cases:
            desc = GemmSparse24Descriptor(**{"n": 16, "m": 4096, "k": 4096, **size, **kind})
            if serves(row, desc, preference, device):
                row.kernel(Choice(desc, device, row, preference, {}))
        wide = kinds[0], *gated_kinds(row)[:1], *with_c(row)[:1], *(quantized[::3] if row.quantized else ())
        wide += tuple(kind for kind in kinds if kind.get("out_element", "").startswith("fp8"))[:3]
        tried = itertools.product(WGMMA_TOKENS.get(row.name, ()), wide)
        for n, kind in tried if capability == HOPPER else ():
            desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, **kind)
            if row.split_terms:
                found += split_requests(row, desc, device)
                found += split_requests(row, desc.model_copy(update={"m": 1024}), device) if n <= 24 else []
                # The last waves of all schedules are partial, so stream-K is tried.
                found += split_requests(row, desc.model_copy(update={"m": 40000}), device) if n <= 64 else []
                continue
            if row.only_groups:
                few = {"groups": 1, "m": 192} if n <= 64 else {"groups": 8}
                found += grouped_requests(row, desc.model_copy(update=few), device)
                continue
            for schedule in WGMMA_SP.allowed(desc, row):
                row.kernel(Choice(desc, device, row, preference, schedule._asdict()))
        columns = COLUMNS, {**COLUMNS, "epilogue": "bias_swiglu"}, {**COLUMNS, "beta": 0.5}
        tried = itertools.product(WGMMA_TOKENS_OF_COLUMNS.get(row.name, ()), columns)
        for n, kind in tried if capability == HOPPER else ():
            desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, **kind)
            row.kernel(Choice(desc, device, row, preference, {}))  # transposes X
            for schedule in WGMMA_SP.allowed(desc, row):
                # Without room to: rows are compiled above.
                asked = preference.model_copy(update={"max_workspace_bytes": schedule.workspace_bytes()})
                row.kernel(Choice(desc, device, row, asked, schedule._asdict()))
        for kind in batched_kinds(row, capability):
            for n, batches in ((16, 4), (304, 2)) if capability == HOPPER else ((16, 4),):
                desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, batches=batches, **kind)
                if row.batches and serves(row, desc, preference, device):
                    found += batched_requests(row, desc, device)
        for kind in grouped_kinds(row):
            desc = GemmSparse24Descriptor(**{"n": 64, "m": 4096, "k": 4096, "groups": 8, **kind})
            if serves(row, desc, preference, device):
                row.kernel(Choice(desc, device, row, preference, {}))
        found += routed_requests(row, device)
    return found


def by_epilogue(kinds: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the first kind of each epilogue."""
    found: dict[object, dict[str, object]] = {}
    for kind in kinds:
        found.setdefault(kind.get("epilogue"), kind)
    return list(found.values())


def gated_kinds(row: GemmEntry) -> list[dict[str, str]]:
    """Return the gated kinds that the kernel serves."""
    kinds = [(EpilogueKind(kind.get("epilogue", "identity")), kind) for kind in KINDS]
    found = [kind for epilogue, kind in kinds if epilogue.is_gated and epilogue in row.epilogues]
    return [kind for kind in found if kind["element"] in row.elements]


def with_c(row: GemmEntry) -> list[dict[str, object]]:
    """Return the kinds of the kernel's elements that add C."""
    return [kind for kind in KINDS if "beta" in kind and kind["element"] in row.elements and row.adds_c]


def batched_kinds(row: GemmEntry, capability: tuple[int, int]) -> list[dict[str, object]]:
    """Return kinds of batches: with C, with a gate, quantized, and with columns where a kernel has them."""
    kinds = [*with_c(row)[:1], *gated_kinds(row)[:1]]
    if capability == HOPPER:
        kinds += [kind for kind in KINDS if "weight_element" in kind and row.quantized][::3]
        kinds += [{**COLUMNS, "beta": 0.5}] if row.column_order else []
    return kinds


def grouped_kinds(row: GemmEntry) -> list[dict[str, object]]:
    """Return kinds of groups of a kernel that also serves single products: with C, a gate, and backward."""
    if not row.groups or row.only_groups:
        return []
    return [*with_c(row)[:1], *gated_kinds(row)[:1], {"element": row.elements[0], "op": "dgrad"}]


def batched_requests(row: GemmEntry, desc: GemmSparse24Descriptor, device: DeviceProperties) -> list[Request]:
    """Every schedule of batches, which no configuration can ask for."""
    preference = PlanPreference(prefer_backend=row.backend)
    with recorded_loads(row.kernel) as found, ExitStack() as patches:
        tried: list[object] = [None]
        if row.backend == "wgmma_sp":
            single = WGMMA_SP.best(desc.one_batch, row)
            tried = list(WGMMA_SP.allowed_of_batches(desc, row, single))
        for schedule in tried:
            if schedule is not None:
                one = mock.patch.object(wgmma_sp.WGMMA_SP, "best_of_batches", lambda *_, one=schedule: one)
                patches.enter_context(one)
            row.kernel(Choice(desc, device, row, preference, {}))
    return found


def routed_requests(row: GemmEntry, device: DeviceProperties) -> list[Request]:
    """Kernels that gather rows of every width and add up every type of results; none without groups."""
    found: list[Request] = []
    for element in row.elements if row.groups else ():
        for out in dict.fromkeys(("f32", "bf16" if element.itemsize == 1 else element.value)):
            rows = {"x_rows": 8, "y_rows": 8, "top_k": 2, "groups": 2, "group_tokens": "experts"}
            desc = GemmSparse24Descriptor(n=16, m=64, k=128, element=element, out_element=out, **rows)
            with recorded_loads(row.kernel), recorded_loads(row.kernel_for(desc)) as own:
                row.kernel_for(desc)(Choice(desc, device, row, PlanPreference(), {}))
            found += [one for one in own if one.function.endswith("_rows")]
    return found


def split_requests(row: GemmEntry, desc: GemmSparse24Descriptor, device: DeviceProperties) -> list[Request]:
    """Every schedule of float32 in bf16 terms, which no configuration can ask for."""
    with recorded_loads(row.kernel) as found:
        for schedule in f32_split_heuristics.F32Split(row.split_terms).allowed(desc, row):
            chunking = f32_split_heuristics.Chunking.cut(schedule, desc, row.split_terms)
            with mock.patch.object(f32_split.Chunking, "of", return_value=chunking):
                row.kernel(Choice(desc, device, row, PlanPreference(), {}))
    return found


def grouped_requests(row: GemmEntry, desc: GemmSparse24Descriptor, device: DeviceProperties) -> list[Request]:
    """Every schedule of grouped products, which no configuration can ask for."""
    with recorded_loads(row.kernel) as found:
        split = grouped.split_schedules(desc, row)
        for schedule in split or grouped.schedules_for(desc.n):
            with mock.patch.object(wgmma_sp_grouped.GROUPED, "best", lambda *_, one=schedule: one):
                row.kernel(Choice(desc, device, row, PlanPreference(), {}))
    return found


@functools.cache
def prepare_requests(row: PrepareEntry, capability: tuple[int, int]) -> list[Request]:
    """Every variant on Hopper, a few elsewhere."""
    device = device_of(capability)
    with recorded_loads(row.kernel) as found:
        for desc in kernel_descriptors(None if capability == HOPPER else index_of(capability)):
            if capability < row.min_compute_capability:
                break
            if desc.element in row.elements and row.refusal(desc) is None:
                row.kernel(Choice(desc, device, row, PlanPreference(), {}))
    return found
