"""The same arguments again are only launched; whatever has moved in between is checked again."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from sparse24_plans import (
    DgradSparse24Args,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PlanPreference,
    Sparse24Weight,
    TensorView,
    Workspace,
)
from sparse24_plans.device.tensors import HOST
from sparse24_plans.plan.operands import OperandChecks

from ..device.tensor_likes import Torchlike
from ..support import make_case, same_bits

gpu = pytest.mark.gpu
N, M, K = 5, 24, 32


class Setup:
    """A host plan whose operands are tensors with ``data_ptr``."""

    def __init__(self, op: str = "forward") -> None:
        rng = np.random.default_rng(0)
        self.dense = rng.standard_normal((M, K)).astype(np.float32)
        self.weight = Sparse24Weight.prune_compress(self.dense)
        self.plan = GemmSparse24Plan.select(
            GemmSparse24Descriptor(n=N, m=M, k=K, element="f32", op=op), device="host"
        )
        widths = (K, M) if op == "forward" else (M, K)
        self.x = Torchlike(rng.standard_normal((N, widths[0])).astype(np.float32), "torch.float32")
        self.y = Torchlike(np.zeros((N, widths[1]), np.float32), "torch.float32")
        args = GemmSparse24Args if op == "forward" else DgradSparse24Args
        self.args = args(self.plan.pack(self.weight), self.x, self.y)

    def exact(self) -> np.ndarray:
        w = self.weight.decompress()
        return self.x.array @ (w.T if self.plan.descriptor.op == "forward" else w)

    def run(self, **options: object) -> int:
        """How often the operands were checked in one run, whose result is right."""
        self.y.array[...] = np.nan
        with mock.patch.object(OperandChecks, "__call__", autospec=True, side_effect=CHECK) as check:
            self.plan.run(self.args, **options)
        np.testing.assert_allclose(self.y.array, self.exact(), rtol=1e-4, atol=1e-5)
        return check.call_count


CHECK = OperandChecks.__call__


@pytest.mark.parametrize("op", ["forward", "dgrad"])
def test_the_same_arguments_are_checked_twice(op):
    setup = Setup(op)
    assert [setup.run() for _ in range(5)] == [1, 1, 0, 0, 0]
    setup.x.array[...] *= 2  # other numbers in the same place
    assert setup.run() == 0


def test_a_tensor_that_moved_is_checked_again():
    setup = Setup()
    setup.run(), setup.run()
    setup.x.array = setup.x.array + 1
    assert [setup.run(), setup.run()] == [1, 0]
    setup.y.array = np.zeros_like(setup.y.array)
    assert [setup.run(), setup.run()] == [1, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": (N, K + 1)}, "x: expected shape"),
        ({"dtype": "torch.int32"}, "x: expected element f32"),
    ],
)
def test_a_tensor_that_no_longer_fits_is_refused(change, words):
    setup = Setup()
    setup.run(), setup.run()
    for name, value in change.items():
        setattr(setup.x, name, value)
    with pytest.raises(InvalidProblemError, match=words):
        setup.plan.run(setup.args)


def test_another_workspace_is_checked():
    setup = Setup()
    space = Workspace(4096, 0, HOST)
    setup.run(), setup.run()
    assert [setup.run(), setup.run(workspace=space), setup.run(workspace=space), setup.run()] == [0, 1, 0, 1]
    with pytest.raises(InvalidProblemError, match="workspace: expected"):
        setup.plan.run(setup.args, workspace=7)


def test_another_plan_checks_for_itself():
    setup = Setup()
    setup.run(), setup.run()
    first = setup.plan
    setup.plan = GemmSparse24Plan.select(
        first.descriptor, device="host", preference=PlanPreference(require={"deterministic": True})
    )
    assert setup.plan is not first
    assert [setup.run(), setup.run(), setup.run()] == [1, 1, 0]


def test_tensors_without_a_cheap_address_are_checked_every_time():
    setup = Setup()
    setup.args = GemmSparse24Args(setup.args.weight, setup.x.array, setup.y.array)
    assert [setup.run(), setup.run(), setup.run()] == [1, 1, 1]


def test_views_are_recognised():
    setup = Setup()
    setup.args = GemmSparse24Args(
        setup.args.weight, TensorView.of(setup.x.array), TensorView.of(setup.y.array)
    )
    assert [setup.run(), setup.run(), setup.run()] == [1, 1, 0]


def test_what_is_remembered_is_no_part_of_the_arguments():
    setup = Setup()
    before = repr(setup.args)
    setup.run(), setup.run()
    assert repr(setup.args) == before
    other = copy.deepcopy(setup.args)
    setup.args, setup.x, setup.y = other, other.x, other.y
    assert setup.run() == 1
    plain = GemmSparse24Args(None, 1, 2)
    assert pickle.loads(pickle.dumps(plain)) == plain


# On a GPU -----------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("backend", ["inflate_cublas", "inflate_strict", "mma_sp", "wgmma_sp"])
def test_run_again_on_a_gpu(backend):
    desc = GemmSparse24Descriptor(n=16, m=256, k=512, element="bf16", epilogue="bias_relu")
    case = make_case(desc, 0, PlanPreference(prefer_backend=backend))
    want = case.run()
    case.check(want)
    for _ in range(3):
        case.result.fill(np.full(want.shape, np.nan, want.dtype))
        assert same_bits(case.run(), want)


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
