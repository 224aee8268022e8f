"""Runs whose launches a library has kept make these launches alone, and they are those of a new library."""

from __future__ import annotations

import ctypes
import random
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseConv2dDescriptor,
    BlockSparseShape,
    DecompressSparse24Descriptor,
    GemmSparse24Descriptor,
    PackSparse24Descriptor,
)
from sparse24_plans.export import export_plans
from sparse24_plans.export.folder import tokens_of
from sparse24_plans.export.recording import Kind
from sparse24_plans.export.tables import Tables
from tests.export import blocks, own_times, products
from tests.export.c_library import C, RefusedError, compiled, source_in_one_set
from tests.export.choices import named_cubins_everywhere
from tests.export.test_launches import PREPARED

ENTRIES = 1024
"""The calls whose launches a library keeps, as sparse24_export.h says."""
FILTER = BlockSparseShape(heads=1, rows=64, cols=9 * 64, block=64, blocks=7)
SHAPE = BlockSparseShape(heads=2, rows=128, cols=128, block=64, blocks=5)
PROBLEMS = {
    "tensor maps": GemmSparse24Descriptor(n=40, m=128, k=256, element="bf16", epilogue="bias_silu"),
    "another type": GemmSparse24Descriptor(n=40, m=128, k=256, element="f16", epilogue="bias_silu"),
    "launch numbers": GemmSparse24Descriptor(n=12, m=8896, k=8576, element="bf16"),
    "a pass before": GemmSparse24Descriptor(n=20, m=128, k=256, element="f32"),
    "images": BlockSparseConv2dDescriptor(layout=FILTER, height=8, width=8, kernel=3, element="bf16"),
    "a fill": BlockSparseAttentionDescriptor(layout=SHAPE, head_size=64, element="f16", op="backward"),
    "groups": GemmSparse24Descriptor(n=30, m=128, k=256, element="bf16", groups=3),
    "pack": PackSparse24Descriptor(m=64, k=64, element="bf16"),
    "decompress": DecompressSparse24Descriptor(m=64, k=64, element="bf16"),
}
ALIKE = {"tensor maps": "another type", "pack": "decompress"}
ALIKE |= {other: one for one, other in ALIKE.items()}
"""Problems whose plans take the same operands and launch other kernels."""
TOKENS = {
    "tensor maps": (1, 2, 40),
    "another type": (1, 2, 40),
    "launch numbers": (1, 10, 12),
    "a pass before": (1, 20),
    "groups": (1, 9, 30),
}


class Case(NamedTuple):
    """All that a run is given."""

    problem: str
    n: int
    operands: tuple[tuple[int, int], ...]
    workspace: int
    nbytes: int
    stream: int


class Folder:
    """An exported folder, and what a run gives: the launches' bytes without their numbers, or the refusal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tables = Tables.of((path / "plans.bin").read_bytes()).records

    def _part(self, table: str, record: Any) -> list[Any]:
        first = record[f"first_{table.removesuffix('es' if table == 'launches' else 's')}"]
        return self._tables[table][first : first + record[table]]

    def _launches(self, case: Case) -> list[Any]:
        (problem,) = (one for one in self._tables["problems"] if one["name"] == case.problem)
        plan = [one["plan"] for one in self._part("ranges", problem) if one["first_n"] <= case.n][-1]
        return self._part("launches", self._tables["plans"][plan])

    def _numbers_at(self, launch: Any) -> list[int]:
        return [one["at"] for one in self._part("places", launch) if one["kind"] == Kind.LAUNCH_ID]

    def contents(self, case: Case, calls: list[Any]) -> list[tuple[Any, ...]]:
        return list(starmap(self._content, zip(self._launches(case), calls, strict=True)))

    def _content(self, launch: Any, call: Any) -> tuple[Any, ...]:
        parameters = bytearray(call.parameters)[: launch["parameter_bytes"]]
        for at in self._numbers_at(launch):
            parameters[at : at + 8] = bytes(8)
        return *(getattr(call, name) for name, _ in call._fields_[:-1]), bytes(parameters)

    def numbers(self, case: Case, calls: list[Any]) -> list[bytes]:
        """The numbers that no other launch may have."""
        return [
            bytes(call.parameters[at : at + 8])
            for launch, call in zip(self._launches(case), calls, strict=True)
            for at in self._numbers_at(launch)
        ]

    def outcome(self, c: C, opened: Any, case: Case) -> Any:
        plan = c.find(opened, case.problem, case.n)
        try:
            calls = c.run(plan, list(case.operands), case.workspace, case.nbytes, case.stream)
        except RefusedError as refused:
            return refused.code, str(refused)
        return self.contents(case, calls)

    def outcome_anew(self, c: C, case: Case) -> Any:
        """The outcome of a library that has run nothing before."""
        opened = c.open(self.path)
        try:
            return self.outcome(c, opened, case)
        finally:
            c.library.s24_close(opened)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans")
    with named_cubins_everywhere():
        export_plans(PROBLEMS, path, device="h200")
    return Folder(path)


@pytest.fixture(scope="module")
def c_in_one_set(c, tmp_path_factory):
    """The library, with one hash for all calls, on the same stub."""
    built = tmp_path_factory.mktemp("one_set")
    return C(compiled(built, stub=False, source=source_in_one_set(built)).library, c.stub)


def first_case(c: C, opened: Any, problem: str, n: int) -> Case:
    plan = c.find(opened, problem, n)
    operands = tuple(((at + 1) << 40, 9216) for at in range(len(c.names(plan))))
    return Case(problem, n, operands, 1 << 50, c.library.s24_workspace(ctypes.byref(plan), None), 1)


def changed(seed: random.Random, case: Case) -> Case:
    """The case with one thing changed: not all changes are allowed by the checks."""
    field = seed.choice(("problem", "n", "address", "stride", "workspace", "nbytes", "stream"))
    if field in ("address", "stride"):
        at, operands = seed.randrange(len(case.operands)), list(case.operands)
        address, stride = operands[at]
        if field == "address":
            address = seed.choice(((at + 1) << 40, (at + 1) << 40 | 256, address ^ 2, address ^ 16, 0))
        else:
            stride = seed.choice((9216, 9280, stride ^ 1, -stride))
        operands[at] = address, stride
        return case._replace(operands=tuple(operands))
    if field == "problem":
        return case._replace(problem=ALIKE.get(case.problem, case.problem))
    if field == "n":
        return case._replace(n=seed.choice(TOKENS.get(case.problem, (0,))))
    steps = {"workspace": (0, 1, 256), "nbytes": (-1, 0, 1), "stream": (0, 1, 2)}[field]
    base = {"workspace": 1 << 50, "nbytes": case.nbytes, "stream": 1}[field]
    return case._replace(**{field: max(0, base + seed.choice(steps))})


@pytest.mark.parametrize("hashed", [True, False], ids=["hashed", "in one set"])
def test_random_runs_launch_what_a_new_library_launches(c, c_in_one_set, folder, hashed):
    number = random.randrange(1 << 32)
    seed, tested = random.Random(number), c if hashed else c_in_one_set
    opened = tested.open(folder.path)
    base = [first_case(tested, opened, name, n) for name in PROBLEMS for n in TOKENS.get(name, (0,))]
    cases, expected, known, refused = list(base), {}, 0, 0
    driver_calls = ctypes.c_uint.in_dll(c.stub, "stub_driver_calls")
    for _ in range(1500):
        case = seed.choice(cases[-12:])
        if seed.random() < 0.5:
            case = changed(seed, seed.choice((cases[-1], seed.choice(base))))
        cases.append(case)
        if case not in expected:
            expected[case] = folder.outcome_anew(c, case)
        driver_calls.value = 0
        found = folder.outcome(tested, opened, case)
        assert found == expected[case], f"seed {number}: {case}"
        refused += isinstance(found, tuple)
        known += isinstance(found, list) and driver_calls.value == len(found)
    tested.library.s24_close(opened)
    assert known > 300
    assert refused > 100
    assert len(expected) > 200


def test_more_operands_than_are_kept_launch_their_own(c, folder):
    opened, first = c.open(folder.path), 0x1234567_89ABCD00
    base = first_case(c, opened, "tensor maps", 2)

    def moved(by: int) -> Case:
        """X lies at another address, whose bytes no other number has."""
        return base._replace(operands=(base.operands[0], (first + by, 9216), *base.operands[2:]))

    ((*expected, parameters),) = folder.outcome_anew(c, moved(0))
    assert parameters.count(first.to_bytes(8, "little")) > 1
    for by in [*range(0, 3 * ENTRIES * 256, 256)] * 2:
        new = parameters.replace(first.to_bytes(8, "little"), (first + by).to_bytes(8, "little"))
        assert folder.outcome(c, opened, moved(by)) == [(*expected, new)]
    c.library.s24_close(opened)


def run_twice(c: C, path: Path, name: str, n: int) -> None:
    """Run the same twice. The second run makes the same launches and no other call of the driver."""
    opened, folder = c.open(path), Folder(path)
    case = first_case(c, opened, name, n)
    plan = c.find(opened, name, n)
    driver_calls = ctypes.c_uint.in_dll(c.stub, "stub_driver_calls")
    first = c.run(plan, list(case.operands), case.workspace, case.nbytes)
    driver_calls.value = 0
    second = c.run(plan, list(case.operands), case.workspace, case.nbytes)
    assert driver_calls.value == len(second) > 0
    assert folder.contents(case, second) == folder.contents(case, first)
    numbers = folder.numbers(case, first) + folder.numbers(case, second)
    assert len(set(numbers)) == len(numbers)
    c.library.s24_close(opened)


@pytest.mark.parametrize("kind", [*products.TYPES, *PREPARED, *blocks.KINDS])
def test_known_runs_make_their_launches_and_no_other_driver_call(c, tmp_path, named_cubins, kind):
    descriptor: Any = PREPARED.get(kind)
    if kind in products.TYPES:
        descriptor = products.random_problem(kind, random.Random(), 9)
    elif kind in blocks.KINDS:
        descriptor = blocks.random_problem(kind, random.Random(), 96)
    export_plans({kind: descriptor}, tmp_path, device="h200")
    ns = tokens_of(descriptor)
    for n in {ns[-1], *[n for n in ns if n % 8 == 0][:1]}:
        run_twice(c, tmp_path, kind, n)


@pytest.mark.parametrize("name", PROBLEMS)
def test_known_runs_of_several_launches_make_no_other_driver_call(c, folder, name):
    for n in TOKENS.get(name, (0,)):
        run_twice(c, folder.path, name, n)


def test_own_times_are_told_of_each_kind_of_run(c, folder, tmp_path):
    program = own_times.built(folder.path, tmp_path)
    for name, n in (("tensor maps", 40), ("a fill", 0)):
        found = own_times.own_times(program, folder.path, name, n)
        assert set(found) == {"known", "new", "other_n"}
        assert (found["other_n"] is None) == (n == 0)
        assert all(time > 0 for time in found.values() if time is not None)


def test_launch_numbers_are_of_one_launch_each(c, folder):
    opened = c.open(folder.path)
    case = first_case(c, opened, "launch numbers", 10)
    plan, found = c.find(opened, "launch numbers", 10), []
    for _ in range(100):
        found += folder.numbers(case, c.run(plan, list(case.operands), case.workspace, case.nbytes))
    assert len(set(found)) == 100
    c.library.s24_close(opened)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
def test_a_run_that_the_driver_refused_is_made_again(c, folder, name, known):
    opened = c.open(folder.path)
    case = first_case(c, opened, name, TOKENS.get(name, (0,))[-1])
    expected = folder.outcome_anew(c, case)
    if known:
        assert folder.outcome(c, opened, case) == expected
    status = ctypes.c_int.in_dll(c.stub, "stub_fails")
    for _ in range(2):
        status.value = 719
        try:
            code, text = folder.outcome(c, opened, case)
            assert (code, text[-10:]) == (7, " error 719")
        finally:
            status.value = 0
        for _ in range(2):
            assert folder.outcome(c, opened, case) == expected
    c.library.s24_close(opened)


def test_strides_that_are_not_read_do_not_matter(c, folder):
    opened = c.open(folder.path)
    case = first_case(c, opened, "tensor maps", 40)
    plan, driver_calls = c.find(opened, case.problem, 40), ctypes.c_uint.in_dll(c.stub, "stub_driver_calls")
    c.run(plan, list(case.operands), case.workspace, case.nbytes)
    names = c.names(plan)
    for stride in (-1, 0, 12345):
        operands = [
            (address, stride if name in ("weight", "bias") else old)
            for name, (address, old) in zip(names, case.operands, strict=True)
        ]
        driver_calls.value = 0
        c.run(plan, operands, case.workspace, case.nbytes)
        assert driver_calls.value == 1
    c.library.s24_close(opened)
