"""Selection is one table a family: pure, explained, and the same answer every time."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    ArchSku,
    BackendUnavailableError,
    DeviceProperties,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    GuaranteeRequirement,
    InvalidProblemError,
    PlanPreference,
    UnsupportedError,
    explain,
)
from sparse24_plans.blocksparse.kernel_table import (
    ATTENTION_ENTRIES,
    CONVOLUTION_ENTRIES,
    MATMUL_ENTRIES,
    SOFTMAX_ENTRIES,
)
from sparse24_plans.device.devices import cuda_device_count
from sparse24_plans.gemm.kernel_table import ENTRIES as GEMM_ENTRIES
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.plan.kernel_table import KernelEntry, choose, consider
from sparse24_plans.prepare.kernel_table import ENTRIES as PREPARE_ENTRIES

from ..sample_devices import AMPERE, HOPPER, HOST, PLACES, TURING
from ..strategies import (
    block_attentions,
    block_convolutions,
    block_products,
    block_softmaxes,
    gemm_descriptors,
    preferences,
    prepare_descriptors,
)
from ..support import check_each
from .cases import ON_HOST_ALONE, PLANS, PROBLEMS, name_of, select
from .toy import ToyDescriptor, ToyPlan, ToyRow


@dataclass(frozen=True)
class Family:
    rows: tuple[KernelEntry, ...]
    problems: Any


SIZES, DEPTHS = st.sampled_from([0, 1, 16, 129, 4096, 2**20, 2**31]), st.sampled_from([0, 8, 48, 4096, 2**31])
FAMILIES = {
    "gemm": Family(GEMM_ENTRIES, gemm_descriptors(SIZES, DEPTHS)),
    "prepare": Family(PREPARE_ENTRIES, prepare_descriptors()),
    "block products": Family(MATMUL_ENTRIES, block_products()),
    "block softmax": Family(SOFTMAX_ENTRIES, block_softmaxes()),
    "block attention": Family(ATTENTION_ENTRIES, block_attentions),
    "block convolution": Family(CONVOLUTION_ENTRIES, block_convolutions()),
}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
every_problem = pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)
places = st.sampled_from(PLACES)


def reasons(desc: Any, preference: PlanPreference, device: DeviceProperties) -> dict[str, str | None]:
    return {name: reason for name, _, reason in explain(desc, preference=preference, device=device).rows}


# Properties of every answer -----------------------------------------------------------------------


@every_family
@settings(max_examples=20)
@given(data=st.data(), preference=preferences, device=places)
def test_the_first_kernel_without_a_refusal_is_chosen(family, data, preference, device):
    desc = data.draw(family.problems)
    answer = explain(desc, preference=preference, device=device)
    assert [(name, backend) for name, backend, _ in answer.rows] == [
        (row.name, row.backend) for row in family.rows
    ]
    assert all(reason is None or reason.strip() for _, _, reason in answer.rows)
    able = [name for name, _, reason in answer.rows if reason is None]
    allowed = preference.max_workspace_bytes
    assert answer.chosen == (able[0] if able else None)
    if answer.chosen is None or device.kind == "host":
        assert (answer.details, answer.workspace_size, answer.workspace_is_exact) == ("", None, False)
    elif answer.chosen.startswith("cusparselt") and allowed is None:
        assert (answer.workspace_size, answer.workspace_is_exact) == (None, False)
        assert "on the GPU alone" in answer.details
    else:
        library = answer.chosen.startswith(("cusparselt", "inflate_cublas"))
        assert answer.workspace_is_exact or library
        assert answer.workspace_size <= (2**64 if allowed is None else allowed)
    considered = consider(family.rows, desc, preference, device)
    until_served = consider(family.rows, desc, preference, device, until_served=True)
    assert until_served == considered[: len(until_served)]
    if able:
        assert choose(considered).name == choose(until_served).name == able[0]
        bounded = preference.require.batch_invariant and allowed is not None
        assert until_served[-1].entry.name == able[0] or bounded
        return
    assert until_served == considered
    with pytest.raises((UnsupportedError, BackendUnavailableError)) as caught:
        choose(considered)
    groups: dict[tuple[bool, str | None], list[str]] = {}
    apart = (
        *("prefer_", "tier is", "runs on", "can't be exported", "allow_sm90a"),
        *("needs compute", "needs a compute", "serves elements", "serves groups only"),
    )
    for name, _, reason in answer.rows:
        groups.setdefault((reason.startswith(apart), reason), []).append(name)
    telling_first = sorted(groups, key=lambda group: (group[0], len(groups[group])))
    told = "; ".join(f"{', '.join(groups[group])}: {group[1]}" for group in telling_first)
    assert str(caught.value) == f"no kernel can serve this problem. {told}"


@every_family
@settings(max_examples=20)
@given(data=st.data(), preference=preferences, device=places)
def test_a_kernel_that_can_serve_meets_every_wish(family, data, preference, device):
    """Asked of the row and of the problem themselves, and not of what selection calls."""
    desc = data.draw(family.problems)
    able = {name for name, reason in reasons(desc, preference, device).items() if reason is None}
    for row in family.rows:
        if row.name not in able:
            continue
        require = preference.require
        choice = Choice(desc, device, row, preference, {})
        guarantee = row.promises(choice)
        assert preference.prefer_backend in (None, row.backend)
        assert preference.prefer_kernel in (None, row.name)
        assert preference.tier in (None, row.tier)
        assert (row.tier == "host") == (device.kind == "host")
        assert device.compute_capability >= row.min_compute_capability or row.on_host
        assert desc.element in row.elements
        assert desc.op in getattr(row, "ops", (desc.op,))  # some families have a table an op
        assert preference.allow_sm90a or row.arch is not ArchSku.SM90A
        if isinstance(desc, GemmSparse24Descriptor):
            assert desc.epilogue in row.epilogues
            assert row.column_order or (desc.x_order, desc.y_order) == ("row", "row")
            assert row.scales or (desc.scale_x, desc.scale_w) == ("none", "none")
        if preference.max_workspace_bytes is not None:
            assert row.needed_workspace(choice) <= preference.max_workspace_bytes
        for name in type(require).model_fields:
            wanted = getattr(require, name)
            if name == "max_error_bound":
                assert wanted is None or guarantee.error_bound(desc.reduction) <= wanted
            elif wanted not in (None, False):
                assert getattr(guarantee, name) == wanted


@every_family
@settings(max_examples=20)
@given(data=st.data(), preference=preferences, device=places)
def test_allow_sm90a_touches_only_rows_that_need_it(family, data, preference, device):
    desc = data.draw(family.problems)
    with_it, without = (
        reasons(desc, preference.model_copy(update={"allow_sm90a": flag}), device) for flag in (True, False)
    )
    # The kernel of the whole weight, whose bits a shard's kernel must have, may be one that needs it.
    compared = preference.whole_m is not None and preference.require.batch_invariant
    for row in family.rows:
        if row.arch is not ArchSku.SM90A:
            both = with_it[row.name], without[row.name]
            assert both[0] == both[1] or (compared and "has other bits than" in f"{both}")
        elif with_it[row.name] is None:
            assert without[row.name] == "allow_sm90a is false"


@every_family
@settings(max_examples=20)
@given(data=st.data(), device=places)
def test_a_filter_never_adds_a_row(family, data, device):
    desc = data.draw(family.problems)
    free = {name for name, reason in reasons(desc, PlanPreference(), device).items() if reason is None}
    for preference in (
        PlanPreference(tier="inflate"),
        PlanPreference(max_workspace_bytes=0),
        PlanPreference(require={"deterministic": True}),
        PlanPreference(allow_sm90a=False),
        PlanPreference(whole_m=4096),
    ):
        assert {name for name, reason in reasons(desc, preference, device).items() if reason is None} <= free


@every_family
@settings(max_examples=20)
@given(data=st.data(), preference=preferences)
def test_ordinal_and_name_of_a_gpu_do_not_matter(family, data, preference):
    desc = data.draw(family.problems)
    other = HOPPER.model_copy(update={"name": "another", "ordinal": 5, "driver": "999"})
    here, there = reasons(desc, preference, HOPPER), reasons(desc, preference, other)
    assert {name for name in here if here[name] is None} == {name for name in there if there[name] is None}


# Plans --------------------------------------------------------------------------------------------


@every_problem
def test_equal_arguments_are_one_plan(desc):
    again = type(desc).model_validate_json(desc.model_dump_json())
    plan = select(desc, "host")
    assert select(again, "host") is plan
    assert select(again, "cpu", preference=PlanPreference.model_validate_json("{}")) is plan
    size = "m" if hasattr(desc, "m") else "batch"
    other = select(desc.model_copy(update={size: 24}), "host")
    assert other is not plan
    assert (getattr(plan.descriptor, size), getattr(other.descriptor, size)) == (getattr(desc, size), 24)


@every_problem
def test_a_preference_may_be_a_mapping(desc):
    typed = PlanPreference(require=GuaranteeRequirement(subnormals="preserved"))
    plan = select(desc, "host", preference={"require": {"subnormals": "preserved"}})
    assert plan is select(desc, "host", preference=typed)
    assert plan.preference == typed
    assert plan is not select(desc, "host")


@every_problem
def test_what_is_no_preference(desc):
    wrong = ("fast", 3, GuaranteeRequirement())
    for ask, preference in itertools.product((explain, PLANS[type(desc)].select), wrong):
        with pytest.raises(InvalidProblemError, match="preference: expected PlanPreference"):
            ask(desc, preference=preference, device="host")
    with pytest.raises(InvalidProblemError, match=r"PlanPreference: expected fields of .*typo"):
        PLANS[type(desc)].select(desc, preference={"typo": 1}, device="host")


@pytest.mark.parametrize("descriptor", [None, "f32", 3, {"n": 1, "m": 8, "k": 8, "element": "f32"}, object])
def test_what_is_no_descriptor(descriptor):
    with pytest.raises(InvalidProblemError, match="descriptor: expected"):
        explain(descriptor, device="host")
    for kind, plan in PLANS.items():
        with pytest.raises(InvalidProblemError, match=f"descriptor: expected {kind.__name__}"):
            plan.select(descriptor, device="host")


def test_another_kinds_descriptor():
    for kind, plan in PLANS.items():
        for desc in PROBLEMS:
            if type(desc) is not kind:
                with pytest.raises(InvalidProblemError, match=f"{kind.__name__}, got {type(desc).__name__}"):
                    plan.select(desc, device="host")


@pytest.mark.parametrize("device", ["gpu", -1, 1.5, True, object()])
@pytest.mark.parametrize("desc", [PROBLEMS[0], PROBLEMS[3]], ids=name_of)
def test_what_is_no_device(desc, device):
    for ask in (explain, PLANS[type(desc)].select):
        with pytest.raises(InvalidProblemError, match="device"):
            ask(desc, device=device)


@every_problem
def test_a_device_that_isnt_there(desc):
    for ask in (explain, PLANS[type(desc)].select):
        with pytest.raises(BackendUnavailableError):
            ask(desc, device=cuda_device_count() + 1)


@every_problem
def test_a_preference_that_contradicts_the_device(desc, device):
    tier = "inflate" if device == "host" else "host"
    with pytest.raises(UnsupportedError, match=f"tier is {tier}"):
        select(desc, device, preference=PlanPreference(tier=tier))


@every_problem
def test_what_can_be_selected_again_after_a_failure(desc):
    """A refusal isn't remembered as an answer."""
    for _ in range(2):
        with pytest.raises(UnsupportedError):
            select(desc, "host", preference={"tier": "inflate"})
    assert select(desc, "host").tier == "host"


def test_a_workspace_limit_does_not_affect_other_plans():
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
    plans = [
        GemmSparse24Plan.select(desc, device="host", preference={"max_workspace_bytes": size})
        for size in (None, 0, 1)
    ]
    assert [plan.preference.max_workspace_bytes for plan in plans] == [None, 0, 1]


def test_the_next_kernel_does_not_take_batches_that_lack_workspace():
    """Smaller batches keep the kernel above it, whose bits are others."""

    class GrowingRow(ToyRow):
        def least_workspace(self, choice: Choice) -> int:
            return 1

    one = ToyPlan.table[0]
    first = GrowingRow(
        "toy", "other", one.tier, one.guarantee, one.elements, min_workspace=lambda desc: desc.n
    )
    table = first, replace(one, name="second", min_workspace=lambda desc: 0)
    wanted = PlanPreference(max_workspace_bytes=1, require={"batch_invariant": True})
    found = consider(table, ToyDescriptor(n=2), wanted, HOST)
    assert [one.reason for one in found] == [
        "needs a workspace of 2 bytes, max_workspace_bytes is 1",
        "has other bits than toy, to which max_workspace_bytes leaves smaller batches",
    ]


# Explanations -------------------------------------------------------------------------------------


@every_problem
def test_plan_explains_itself_as_explain_did_and_its_kernel_too(desc):
    plan, before = select(desc, "host"), explain(desc, device="host")
    after = plan.explain()
    assert (before.details, before.workspace_size) == ("", None)
    assert after.details
    assert (after.chosen, plan.sku.kernel) == (plan.kernel, plan.kernel)
    assert (after.workspace_size, after.workspace_is_exact) == (plan.workspace_size(), True)
    lines = str(after).splitlines()
    assert lines[0] == "device: host"
    assert lines[1] == f"chosen: {after.chosen}  {after.details}"
    assert f"  {after.chosen} (host): chosen" in lines


@every_family
@settings(max_examples=20)
@given(data=st.data(), invariant=st.booleans(), device=st.sampled_from([AMPERE, HOPPER]))
def test_a_plan_is_chosen_again_with_its_own_workspace(family, data, invariant, device):
    """One byte less chooses another that fits, or the refusal names bytes with which the kernel serves."""
    desc = data.draw(family.problems.filter(lambda one: getattr(one, "n", 1)))
    wanted = PlanPreference(require=GuaranteeRequirement(batch_invariant=invariant))

    def explained(most: int, **more: Any) -> Any:
        fields = {"max_workspace_bytes": most, **more}
        return explain(desc, preference=wanted.model_copy(update=fields), device=device)

    free = explain(desc, preference=wanted, device=device)
    if not free.workspace_is_exact:
        return
    again = explained(free.workspace_size)
    assert (again.chosen, again.details, again.workspace_size) == (
        free.chosen,
        free.details,
        free.workspace_size,
    )
    if not free.workspace_size:
        return
    less = explained(free.workspace_size - 1)
    assert (less.workspace_size or 0) < free.workspace_size
    for name, _, reason in less.rows:
        if named := re.fullmatch(
            r"needs a workspace of (\d+) bytes, max_workspace_bytes is \d+", reason or ""
        ):
            enough = explained(int(named[1]), prefer_kernel=name)
            assert (enough.chosen, enough.workspace_size) == (name, int(named[1]))


@every_problem
def test_an_explanation_is_plain_json_and_one_line_a_row(desc):
    check_each(partial(check_explanation, desc), ({"place": place} for place in (HOPPER, AMPERE, HOST)))


def check_explanation(desc: Any, place: DeviceProperties) -> None:
    answer = explain(desc, device=place)
    document = json.loads(answer.model_dump_json())
    assert document["chosen"] == answer.chosen
    assert document["device"] == ("host" if place is HOST else f"cuda:0 ({place.name})")
    lines = str(answer).splitlines()
    assert len(lines) == 2 + len(document["rows"])
    for line, (name, backend, reason) in zip(lines[2:], document["rows"], strict=True):
        state = "chosen" if name == answer.chosen else reason or "can serve; a kernel above it was preferred"
        assert line == f"  {name} ({backend}): {state}"


@every_problem
def test_an_absent_gpu_that_is_too_old(desc):
    """Without a GPU, CuPy or a compiler: every row says why."""
    answer = explain(desc, device=TURING)
    assert (answer.chosen, answer.workspace_size, answer.details) == (None, None, "")
    lines = str(answer).splitlines()
    assert lines[:2] == ["device: cuda:0 (invented sm_75)", "chosen: none"]
    for line in lines[2:]:
        assert (
            "needs compute capability" in line
            or f"runs on the host, the plan is for {TURING}" in line
            or "does not serve" in line
        )
    words = "runs on the host|does not serve" if desc in ON_HOST_ALONE else "needs compute capability"
    with pytest.raises(UnsupportedError, match=words):
        choose(consider(PLANS[type(desc)].table, desc, PlanPreference(), TURING))


@pytest.mark.parametrize("desc", ON_HOST_ALONE, ids=name_of)
def test_what_no_gpu_serves_yet(desc):
    answer = explain(desc, device=HOPPER)
    assert answer.chosen is None
    known = ("runs on the host", "serves", "does not serve")
    assert all(any(word in reason for word in known) for _, _, reason in answer.rows)


@pytest.mark.parametrize("desc", [desc for desc in PROBLEMS if desc not in ON_HOST_ALONE], ids=name_of)
def test_an_absent_gpu_that_serves(desc):
    answer = explain(desc, device=HOPPER)
    rows = {name: (backend, reason) for name, backend, reason in answer.rows}
    backend, reason = rows[answer.chosen]
    assert reason is None
    assert backend != "host"
    host = {name: reason for name, (kind, reason) in rows.items() if kind == "host"}
    assert host
    assert all("runs on the host" in reason for reason in host.values())


@every_problem
def test_reasons_that_are_the_callers_own(desc):
    wanted = PlanPreference(prefer_backend="mma_sp", tier="host")
    for name, reason in reasons(desc, wanted, HOPPER).items():
        own = "tier is host" if name.startswith("mma_sp") else "prefer_backend is mma_sp"
        assert reason == own
