"""Operands that lie where earlier ones lay are only launched; whatever has moved is checked again."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from sparse24_plans import (
    DecompressSparse24Descriptor,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PruneSparse24Descriptor,
    Sparse24Weight,
    TensorView,
    Workspace,
)
from sparse24_plans.device.tensors import HOST
from sparse24_plans.plan.operands import OperandChecks, Role

from ..device.tensor_likes import Torchlike
from ..support import same_bits
from .cases import KERNELS, PlanCase, equal, kernel_case, random_inputs, select

gpu = pytest.mark.gpu
PROBLEMS = {
    "forward": GemmSparse24Descriptor(n=5, m=24, k=32, element="f32"),
    "dgrad": GemmSparse24Descriptor(n=5, m=24, k=32, element="f32", op="dgrad"),
    "prune": PruneSparse24Descriptor(m=24, k=32, element="f32"),
    "decompress": DecompressSparse24Descriptor(m=24, k=32, element="f32"),
}
every_problem = pytest.mark.parametrize("name", PROBLEMS)
CHECK = OperandChecks.__call__


class Setup:
    """A host plan whose operands are tensors with ``data_ptr``."""

    def __init__(self, name: str = "forward") -> None:
        desc = PROBLEMS[name]
        self.plan = select(desc, "host")
        case = PlanCase(self.plan, random_inputs(desc))
        self.want = {k: v.copy() for k, v in case.run().items()}
        self.tensors: dict[str, Torchlike] = {}
        self.written = {}
        given = {one.name: getattr(case.args, one.name) for one in fields(case.args)}
        for operand in desc.operands():
            if operand.role is Role.WEIGHT:
                continue
            array = given[operand.argument].array().copy()
            tensor = Torchlike(array, f"torch.{array.dtype.name}")
            self.tensors[operand.argument] = given[operand.argument] = tensor
            TensorView.of(tensor)  # the location of a type is known once one was read
            if operand.role is Role.OUT:
                self.written[operand.name] = tensor
        self.args = type(case.args)(**given)
        self._keep = case

    @property
    def first(self) -> Torchlike:
        return next(iter(self.tensors.values()))

    def run(self, **options: object) -> int:
        """How often the operands were checked in one run, whose result is right."""
        for tensor in self.written.values():
            tensor.array.view(np.uint8)[...] = 0xFF
        with mock.patch.object(OperandChecks, "__call__", autospec=True, side_effect=CHECK) as check:
            self.plan.run(self.args, **options)
        assert equal({k: t.array.view(self.want[k].dtype) for k, t in self.written.items()}, self.want)
        return check.call_count


@every_problem
def test_the_same_arguments_are_checked_once(name):
    setup = Setup(name)
    assert [setup.run() for _ in range(4)] == [1, 0, 0, 0]


@pytest.mark.parametrize("name", ["forward", "dgrad"])
def test_other_numbers_in_the_same_place_are_read(name):
    setup = Setup(name)
    setup.run(), setup.run()
    setup.first.array[...] *= 2  # exact, so the product doubles too
    setup.want = {k: (2 * v.view(np.float32)).view(v.dtype) for k, v in setup.want.items()}
    assert setup.run() == 0


@every_problem
def test_a_tensor_that_moved_is_checked_again(name):
    setup = Setup(name)
    setup.run(), setup.run()
    for tensor in setup.tensors.values():
        tensor.array = tensor.array.copy()
        assert [setup.run(), setup.run()] == [1, 0]


@every_problem
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": (5, 33)}, "expected shape"),
        ({"dtype": "torch.int32"}, "expected element f32"),
        ({"stride": lambda: (2, 2)}, "strid"),
    ],
    ids=["shape", "dtype", "stride"],
)
def test_a_tensor_that_no_longer_fits_is_refused(name, change, words):
    setup = Setup(name)
    setup.run(), setup.run()
    for key, value in change.items():
        setattr(setup.first, key, value)
    with pytest.raises(InvalidProblemError, match=words):
        setup.plan.run(setup.args)


@every_problem
def test_another_workspace_is_checked(name):
    setup = Setup(name)
    space = Workspace(4096, 0, HOST)
    setup.run(), setup.run()
    assert [setup.run(), setup.run(workspace=space), setup.run(workspace=space), setup.run()] == [0, 1, 0, 0]
    with pytest.raises(InvalidProblemError, match="workspace: expected"):
        setup.plan.run(setup.args, workspace=7)


@every_problem
def test_another_plan_checks_for_itself(name):
    setup = Setup(name)
    setup.run(), setup.run()
    first = setup.plan
    setup.plan = select(first.descriptor, "host", preference={"allow_sm90a": False})
    assert setup.plan is not first
    assert [setup.run(), setup.run()] == [1, 0]


def test_tensors_without_a_cheap_address_are_checked_every_time():
    setup = Setup()
    x, y = setup.tensors["x"], setup.tensors["y"]
    setup.args = GemmSparse24Args(setup.args.weight, x.array, y.array)
    assert [setup.run(), setup.run(), setup.run()] == [1, 1, 1]


def test_views_are_recognised():
    setup = Setup()
    x, y = setup.tensors["x"], setup.tensors["y"]
    setup.args = GemmSparse24Args(setup.args.weight, TensorView.of(x.array), TensorView.of(y.array))
    assert [setup.run(), setup.run()] == [1, 0]


@every_problem
def test_new_arguments_of_known_operands_are_only_launched(name):
    setup = Setup(name)
    setup.run()
    given: dict[str, Any] = {one.name: getattr(setup.args, one.name) for one in fields(setup.args)}
    setup.args = type(setup.args)(**given)
    assert setup.run() == 0


def test_another_weight_is_checked():
    setup = Setup()
    setup.run()
    weight = copy.deepcopy(setup.args.weight)
    setup.args = replace(setup.args, weight=weight)
    assert [setup.run(), setup.run()] == [1, 0]


@every_problem
def test_no_operand_is_kept_alive(name):
    setup = Setup(name)
    setup.run(), setup.run()
    tensors = [weakref.ref(tensor.array) for tensor in setup.tensors.values()]
    setup.tensors, setup.written, setup.args, setup._keep = {}, {}, None, None
    gc.collect()
    assert [one() for one in tensors] == [None] * len(tensors)


# On a GPU -----------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("name", KERNELS)
def test_run_again_on_a_gpu(name):
    case = kernel_case(name)
    want = case.run()
    for _ in range(3):
        case.poison()
        assert equal(case.run(), want)


@gpu
def test_a_torch_tensor_whose_storage_is_replaced():
    torch = pytest.importorskip("torch")
    desc = GemmSparse24Descriptor(n=16, m=256, k=512, element="bf16")
    plan = GemmSparse24Plan.select(desc, device=0)
    rng = np.random.default_rng(0)
    dense = rng.integers(-4, 5, (256, 512)).astype(ml_dtypes.bfloat16)
    weight = Sparse24Weight.prune_compress(dense)
    packed = plan.pack(weight.to(0))
    x = torch.ones((16, 512), dtype=torch.bfloat16, device="cuda")
    y = torch.empty((16, 256), dtype=torch.bfloat16, device="cuda")
    args = GemmSparse24Args(packed, x, y)
    sums = torch.tensor(weight.decompress().astype(np.float32).sum(1), device="cuda")
    stream = torch.cuda.current_stream()
    for factor in (1, 2, -1):
        x.data = torch.full((16, 512), float(factor), dtype=torch.bfloat16, device="cuda")
        for _ in range(3):
            y.zero_()
            plan.run(args, stream=stream)
            assert torch.equal(y.float(), (factor * sums).bfloat16().float().expand(16, 256))


def test_a_result_is_written_again_where_it_was_changed():
    setup = Setup("prune")
    setup.run(), setup.run(), setup.run()
    pruned = setup.tensors["pruned"].array
    before = pruned.copy()
    pruned[...] = 7
    setup.plan.run(setup.args)
    assert same_bits(pruned, before)
