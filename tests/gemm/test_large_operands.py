"""On a GPU: operands beyond 2^31 elements, the same bits launch after launch, and PyTorch's own operands."""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans import ElementKind, GemmSparse24Args, GemmSparse24Descriptor, Sparse24Weight
from sparse24_plans.tuning.data import random_bits, typed

from ..support import plan_of_row

pytestmark = pytest.mark.gpu
LAUNCHES = 60
ROWS = ("inflate_cublas", "inflate_strict", "mma_sp_many", "wgmma_sp", "wgmma_sp_invariant")


def random_on_device(shape, element: str, seed: int):
    import cupy

    cupy.random.seed(seed)
    bits = cupy.empty(shape, {"f32": "u4"}.get(element, "u2"))
    rows = max(1, (1 << 28) // max(shape[1], 1))
    for start in range(0, shape[0], rows):
        part = cupy.random.standard_normal((min(rows, shape[0] - start), shape[1]), dtype=cupy.float32)
        bits[start : start + rows] = part.astype(cupy.float16).view("u2")
    return bits


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    ("n", "m", "k", "huge"),
    [(3, 70_000, 32_768, "W"), (66_000, 24, 32_768, "X"), (66_000, 32_776, 16, "Y")],
)
def test_operands_beyond_2_to_the_31_elements(row, n, m, k, huge):
    """Checked at rows and columns spread over the whole, the last ones included."""
    import cupy

    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f16", out_element="f16")
    assert {"W": m * k, "X": n * k, "Y": n * m}[huge] > 2**31
    plan = plan_of_row(row).select(desc, device=0)
    weight = Sparse24Weight.prune_compress(random_on_device((m, k), "f16", 1).view(cupy.float16))
    x = random_on_device((n, k), "f16", 2).view(cupy.float16)
    y = cupy.full((n, m), cupy.nan, cupy.float16)
    space = cupy.empty(plan.workspace_size(), "u1")
    plan.run(GemmSparse24Args(plan.pack(weight), x, y), workspace=space)
    assert not bool(cupy.isnan(y).any())
    rng = np.random.default_rng(0)
    rows = np.unique(np.append(rng.integers(0, n, 6), n - 1))
    columns = np.unique(np.append(rng.integers(0, m, 40), m - 1))
    part = Sparse24Weight(weight.values[columns], weight.metadata[columns]).to("host").decompress()
    xs = cupy.asnumpy(x[rows]).astype(np.float64)
    exact, abs_sum = xs @ part.astype(np.float64).T, np.abs(xs) @ np.abs(part.astype(np.float64)).T
    tolerance = plan.guarantee.tolerance(k, exact, abs_sum, desc.out_element)
    got = cupy.asnumpy(y[rows][:, columns]).astype(np.float64)
    assert (np.abs(got - exact) <= tolerance).all()


@pytest.mark.parametrize(
    ("row", "element"),
    [
        ("f32_split6", "f32"),
        ("f32_split6_invariant", "f32"),
        ("f32_split3", "f32"),
        ("wgmma_sp", "bf16"),
        ("wgmma_sp_invariant", "bf16"),
        ("wgmma_sp_fp8", "fp8_e4m3"),
        ("wgmma_sp_s8", "s8"),
    ],
)
@pytest.mark.parametrize("n", [1024, 4096])
def test_every_launch_has_the_same_bits_at_full_size(row, element, n):
    """All results of a product that takes milliseconds, where a race or a stage read too early would show."""
    import cupy

    kind = ElementKind(element)
    desc = GemmSparse24Descriptor(n=n, m=4096, k=14336, element=element, out_element="f32")
    plan = plan_of_row(row).select(desc, device=0)
    weight = Sparse24Weight.prune_compress(typed(random_bits((desc.m, desc.k), kind, 1), kind))
    packed, again, x = plan.pack(weight), plan.pack(weight), random_bits((n, desc.k), kind, 2)
    for one, other in zip(packed.buffers, again.buffers, strict=True):
        assert bool((one.bits() == other.bits()).all())
    y, first = cupy.empty((n, desc.m), cupy.float32), None
    args = GemmSparse24Args(packed, typed(x, kind), y)
    space = cupy.empty(plan.workspace_size(), "u1")
    for _ in range(LAUNCHES):
        y.fill(cupy.nan)
        space.fill(0xFF)
        plan.run(args, workspace=space)
        first = y.view("u4").copy() if first is None else first
        assert int((y.view("u4") != first).sum()) == 0


@pytest.mark.parametrize("row", ROWS)
def test_torch_tensors(row):
    torch = pytest.importorskip("torch")
    n, m, k = 9, 64, 96
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="bf16", epilogue="bias")
    plan = plan_of_row(row).select(desc, device=0)
    dense = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weight = Sparse24Weight.prune_compress(dense)
    x = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    y = torch.full((n, m), float("nan"), device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(m, device="cuda", dtype=torch.bfloat16)
    space = torch.empty(max(plan.workspace_size(), 1), device="cuda", dtype=torch.uint8)
    torch.cuda.synchronize()
    plan.run(
        GemmSparse24Args(plan.pack(weight), x, y, bias),
        workspace=space,
        stream=torch.cuda.current_stream(),
    )
    host = torch.from_numpy(weight.to("host").decompress().astype(np.float32)).double()
    want = x.cpu().double() @ host.T + bias.cpu().double()
    assert torch.allclose(y.cpu().double(), want, rtol=1e-2, atol=1e-1)
