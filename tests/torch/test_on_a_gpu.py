"""Streams, captures, memory and devices of a GPU, with CPU tensors beside them."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.torch import Sparse24Linear, calibrate, gemm_dispatch, to_sparse24

from .cases import S, assert_on_the_current_stream, assert_replays, close, randn, weight

pytestmark = pytest.mark.gpu
F = torch.nn.functional


def layer(k: int = 256, m: int = 512) -> Sparse24Linear:
    torch.manual_seed(0)
    return Sparse24Linear.from_linear(torch.nn.Linear(k, m, device="cuda", dtype=torch.bfloat16))


def test_layers_run_on_sparse_tensor_cores():
    one = layer()
    assert one.packed is not None
    assert one.plan(16).tier == "sparse_tensor_core"
    x = randn(16, 256, dtype=torch.bfloat16)
    close(one(x), F.linear(x.double(), one.dense_weight().double(), one.bias.double()))


@pytest.mark.parametrize(
    ("n", "order"), [(1, "row"), (8, "column"), (13, "row"), (72, "column"), (1001, "row")]
)
def test_sparse_operand_on_left_is_multiplied_on_sparse_tensor_cores(n, order):
    """b as it lies where its rows are whole 16 bytes, else a copy; the result in columns always."""
    values, meta, dense = weight(dtype=torch.bfloat16)
    b = randn(64, n, dtype=torch.bfloat16)
    y = S.mm(values, meta, b)
    close(y, dense.double() @ b.double())
    form = gemm_dispatch.checked(gemm_dispatch.mm_call(values, meta, b, None, None, ""))
    desc = form.plan.descriptor
    assert (desc.x_order, desc.y_order) == (order, "column")
    assert form.plan.tier == "sparse_tensor_core"


@pytest.mark.parametrize("n", [16, 17])
def test_an_operand_on_the_right_that_begins_anywhere_is_copied(n):
    values, meta, dense = weight(dtype=torch.float16)
    whole = randn(64 * n + 3, dtype=torch.float16)
    for start in (0, 3, 1):
        b = whole[start : start + 64 * n].view(64, n)
        close(S.mm(values, meta, b), dense.double() @ b.double())


def test_work_is_enqueued_on_the_current_stream():
    assert_on_the_current_stream(layer(), randn(16, 256, dtype=torch.bfloat16))


def test_a_captured_step_is_replayed_with_new_inputs():
    one, x = layer(), randn(16, 256, dtype=torch.bfloat16)
    one(x)
    assert_replays(one, x)


def test_no_new_layout_is_made_during_a_capture():
    values, meta, _ = weight(64, 64, torch.bfloat16)
    x = randn(16, 64, dtype=torch.bfloat16)
    S.linear(x, values.clone(), meta)  # the plan is there, another weight's tiles aren't
    graph = torch.cuda.CUDAGraph()
    with pytest.raises((UnsupportedError, RuntimeError), match="capture"), torch.cuda.graph(graph):
        S.linear(x, values, meta)
    torch.cuda.synchronize()


def test_compiled_code_gives_the_bits_of_eager_code():
    """For any number of tokens, rows that lie apart and addresses that aren't aligned, on any stream."""
    torch._dynamo.reset()
    one, whole = layer(), randn(16 * 512, dtype=torch.bfloat16)
    compiled = torch.compile(one, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n in (5, 2, 64, 1001):
            x = randn(n, 256, dtype=torch.bfloat16)
            assert torch.equal(compiled(x), one(x))
        views = [whole[start : start + 16 * 256].view(16, 256) for start in (1, 4)]
        for x in (*views, whole.view(16, 512)[:, 128:384]):
            assert torch.equal(compiled(x), one(x))
        assert_on_the_current_stream(compiled, x.contiguous())


def test_compiled_with_cuda_graphs():
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    model = model.to("cuda", torch.bfloat16).eval()
    to_sparse24(model)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(8):
            x = randn((16, 48)[seed % 2], 256, dtype=torch.bfloat16, seed=seed)
            assert torch.equal(compiled(x), model(x))


@pytest.mark.alone
def test_ten_thousand_calls_hold_no_memory():
    one, x = layer(), randn(16, 256, dtype=torch.bfloat16)
    for _ in range(10):
        one(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10_000):
        one(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_threads_with_their_own_streams_share_a_layer():
    one, start = layer(), threading.Barrier(4, timeout=60)
    xs = [randn(n, 256, dtype=torch.bfloat16) for n in (1, 8, 16, 33)]
    wanted = [one(x) for x in xs]
    torch.cuda.synchronize()

    def work(index: int) -> bool:
        start.wait()
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            results = [one(xs[index]) for _ in range(100)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(y, wanted[index]) for y in results)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_operands_on_two_devices_are_refused():
    values, meta, _ = weight()
    with pytest.raises(InvalidProblemError, match="weight: expected a tensor on cpu"):
        S.linear(torch.zeros(5, 64), values, meta)


def test_every_device_has_its_plan():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    one = layer()
    x = randn(16, 256, dtype=torch.bfloat16)
    wanted = one(x).cpu()
    assert torch.equal(one.to("cuda:1")(x.to("cuda:1")).cpu(), wanted)


def test_a_layer_goes_to_the_cpu_and_back():
    one, x = layer(), randn(16, 256, dtype=torch.bfloat16)
    wanted = one(x)
    on_cpu = one.cpu()
    close(on_cpu(x.cpu()), wanted.cpu().double(), torch.bfloat16)
    assert on_cpu.packed is None
    assert torch.equal(one.cuda()(x), wanted)


# Several ranks --------------------------------------------------------------------------------------


@pytest.fixture
def alone():
    """A mesh of this process: what more of them exchange, test_parallel.py has on gloo."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("parts", [1, 4])
def test_row_parallel_layers_are_packed_by_part_and_captured(alone, parts):
    from torch.distributed.tensor.parallel import parallelize_module

    from sparse24_plans.torch import RowwiseSparse24

    whole = layer(512, 256)
    one = parallelize_module(layer(512, 256), alone, RowwiseSparse24(parts=parts))
    assert one.packed is not None
    assert one.plan(16).tier == "sparse_tensor_core"
    x = randn(16, 512, dtype=torch.bfloat16)
    close(one(x), whole(x).double())
    assert all(
        torch.equal(tensor.to_local().view(torch.uint8), whole.state_dict()[key].view(torch.uint8))
        for key, tensor in one.state_dict().items()
    )
    assert_replays(one, x)


def test_column_parallel_layers_have_the_bits_of_the_whole():
    """Plans require these bits on any number of ranks."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(4096, 28672, bias=False, device="cuda", dtype=torch.bfloat16)
    require = {"batch_invariant": True}
    whole = Sparse24Linear.from_linear(linear, require=require)
    part = torch.nn.Linear(4096, 28672 // 8, bias=False, device="cuda", dtype=torch.bfloat16)
    part.weight.data = linear.weight.data[: 28672 // 8]
    eighth = Sparse24Linear.from_linear(part, require=require, preference={"whole_m": 28672})
    free = Sparse24Linear.from_linear(part, require=require)
    assert eighth.plan(16).guarantee.arithmetic == whole.plan(16).guarantee.arithmetic
    assert free.plan(16).guarantee.arithmetic != whole.plan(16).guarantee.arithmetic
    for n in (1, 16, 300):
        x = randn(n, 4096, dtype=torch.bfloat16)
        assert torch.equal(eighth(x), whole(x)[:, : 28672 // 8])


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("moved", [False, True])
def test_calibration_gives_what_the_cpu_gives_up_to_rounding(method, moved):
    """With the model on the GPU, or with one block of it at a time. Ranks of near values may differ."""
    torch.manual_seed(0)
    on_cpu = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3)))
    on_gpu = copy.deepcopy(on_cpu)
    batches = [torch.randn(64, 128) @ torch.randn(128, 128) for _ in range(4)]
    expected = calibrate(on_cpu, batches, method=method)
    if moved:
        report = calibrate(on_gpu, batches, method=method, device="cuda")
    else:
        report = calibrate(on_gpu.cuda(), [x.cuda() for x in batches], method=method)
    for ours, theirs, layer, reference in zip(report.layers, expected.layers, on_gpu, on_cpu, strict=True):
        assert layer.weight.is_cuda is not moved
        assert ours.output_error == pytest.approx(theirs.output_error, rel=1e-2)
        weight, wanted = layer.weight.detach().cpu(), reference.weight.detach()
        assert ((weight != 0) == (wanted != 0)).float().mean() > 0.98
        assert torch.dist(weight, wanted) < 0.1 * wanted.norm()
    if not moved:
        to_sparse24(on_gpu, recipe="compress")
        assert all(isinstance(layer, Sparse24Linear) for layer in on_gpu)
