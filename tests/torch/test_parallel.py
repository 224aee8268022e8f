"""Layers over several ranks have one device's results and gradients, on processes joined by gloo."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from sparse24_plans.torch import ColwiseSparse24, RowwiseSparse24, Sparse24Linear, parallel

from .cases import close
from .parallel_cases import INVARIANT, PLAN, K, M, layer, mesh_of, model, pack, part, same, tokens
from .rank_processes import four_ranks

world = pytest.fixture(four_ranks, scope="module")


# Columns --------------------------------------------------------------------------------------------


def columns_have_the_bits_of_one(ranks: int, dtype: torch.dtype, options: dict) -> None:
    mesh = mesh_of(ranks)
    whole = layer(dtype, require=INVARIANT, **options)
    cut = parallelize_module(layer(dtype, require=INVARIANT, **options), mesh, ColwiseSparse24())
    assert cut.values.shape == (M // ranks, K // 2)
    assert cut.bias.shape == (M // ranks,)
    assert cut.plan(5).guarantee.batch_invariant
    for shape in ((5, K), (2, 3, K), (K,), (0, K)):
        x = tokens(*shape, dtype=dtype)
        assert same(cut(x), part(whole(x), mesh, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        *((ranks, {}) for ranks in (1, 2, 4)),
        *((ranks, {"activation": "swiglu"}) for ranks in (1, 2, 4)),
        (4, {"activation": "silu"}),
        (4, {"out_dtype": torch.float32}),
    ],
    ids=str,
)
def test_batch_invariant_columns_have_the_bits_of_one_device(world, ranks, dtype, options):
    world.run(columns_have_the_bits_of_one, ranks, dtype, options)


def columns_ask_for_the_whole() -> int | None:
    mesh = mesh_of(2)
    assert parallelize_module(layer(), mesh, ColwiseSparse24()).plan().preference.whole_m is None
    return parallelize_module(layer(require=INVARIANT), mesh, ColwiseSparse24()).plan().preference.whole_m


def test_batch_invariant_column_plans_sum_as_the_whole_weight(world):
    """On a GPU the slices of K depend on M: the rank's plans are told that of the whole."""
    assert world.run(columns_ask_for_the_whole) == [M] * 4


# Rows -----------------------------------------------------------------------------------------------


def rows_are_right(dtype: torch.dtype, options: dict) -> None:
    mesh = mesh_of(2)
    cut = parallelize_module(layer(dtype, **options), mesh, RowwiseSparse24())
    whole = layer(dtype, **options)
    assert cut.dense_weight().shape == (M, K // 2)
    for shape in ((5, K), (2, 3, K), (K,), (0, K)):
        x = tokens(*shape, dtype=dtype)
        y, wanted = cut(part(x, mesh, -1)), whole(x)
        assert y.dtype == wanted.dtype
        assert y.shape == wanted.shape
        close(y, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}, {"out_dtype": torch.float32}], ids=str)
def test_bias_activation_and_rounding_follow_the_sum_over_ranks(world, dtype, options):
    world.run(rows_are_right, dtype, options)


def under_autocast(style: type, dtype: torch.dtype, options: dict) -> None:
    mesh = mesh_of(2)
    cut, whole = parallelize_module(layer(dtype, **options), mesh, style()), layer(dtype, **options)
    x = tokens(5, K)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = whole(x)
        y = cut(x) if style is ColwiseSparse24 else cut(part(x, mesh, -1))
    wanted = part(wanted, mesh, -1) if style is ColwiseSparse24 else wanted
    assert y.dtype == wanted.dtype
    close(y.to(torch.bfloat16), wanted)  # whose operands autocast has rounded


@pytest.mark.parametrize("style", [ColwiseSparse24, RowwiseSparse24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"out_dtype": torch.float32}], ids=str)
def test_results_under_autocast_have_the_dtype_of_one_devices(world, style, dtype, options):
    world.run(under_autocast, style, dtype, options)


def rows_in_parts(ranks: int, parts: int | None, out: Shard | Replicate) -> torch.Tensor:
    """A row-parallel layer's whole result, of bfloat16."""
    mesh = mesh_of(ranks)
    options = {"require": INVARIANT} if parts else {}
    cut = parallelize_module(
        layer(torch.bfloat16, **options), mesh, RowwiseSparse24(parts=parts, output_layouts=out)
    )
    x = tokens(8, K, dtype=torch.bfloat16)
    y = cut(part(x, mesh, -1))
    if isinstance(out, Shard):
        y = DTensor.from_local(y, mesh, [out]).full_tensor()
    return y.float()


def one_after_the_other(parts: int) -> torch.Tensor:
    """The ranks' sums, from plain layers of columns: ((0 + 1) + (2 + 3)) and so on, in float32."""
    whole = layer(torch.bfloat16, require=INVARIANT)
    x, dense = tokens(8, K, dtype=torch.bfloat16), whole.dense_weight()
    sums = []
    for columns, w in zip(x.chunk(parts, 1), dense.chunk(parts, 1), strict=True):
        linear = nn.Linear(K // parts, M, False, dtype=torch.bfloat16)
        linear.weight.data = w.contiguous()
        options = {"out_dtype": torch.float32, "require": INVARIANT}
        sums.append(Sparse24Linear.from_linear(linear, method="compress", **options)(columns))
    while len(sums) > 1:
        sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
    return (sums[0] + whole.bias.float()).bfloat16().float()


@pytest.mark.parametrize("parts", [4, 8])
@pytest.mark.parametrize("out", [Replicate(), Shard(0), Shard(-1)], ids=str)
def test_row_parallel_bits_do_not_depend_on_rank_count(world, parts, out):
    wanted = one_after_the_other(parts)
    for ranks in (1, 2, 4):
        assert all(torch.equal(y, wanted) for y in world.run(rows_in_parts, ranks, parts, out))


def test_without_parts_each_rank_is_one_part(world):
    wanted = one_after_the_other(4)
    assert all(torch.equal(y, wanted) for y in world.run(rows_in_parts, 4, None, Replicate()))


def rows_in_shares(ranks: int, options: dict) -> None:
    """Check results that count as large."""
    mesh = mesh_of(ranks)
    cut = parallelize_module(layer(torch.bfloat16, **options), mesh, RowwiseSparse24())
    for shape in ((8, K), (2, 4, K), (7, K), (0, K)):
        x = part(tokens(*shape, dtype=torch.bfloat16), mesh, -1)
        small = cut(x)
        finish = mock.patch.object(type(cut), "_finished", autospec=True, side_effect=type(cut)._finished)
        with mock.patch.object(parallel, "_LARGE", 1), finish as finished:
            assert same(cut(x), small)
        share = small.numel() // ranks if shape[0] in (2, 8) else small.numel()
        assert finished.call_args.args[1].numel() == share


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"activation": "silu"}, {"out_dtype": torch.float32}], ids=str)
def test_large_results_have_the_bits_of_small_ones(world, ranks, options):
    """Each rank adds up and rounds a share of large results, which changes no bit."""
    world.run(rows_in_shares, ranks, options)


def calls_without_dtensors() -> None:
    mesh, x = mesh_of(2), tokens(2, 3, K, dtype=torch.bfloat16)
    columns, rows = (
        parallelize_module(layer(torch.bfloat16), mesh, style)
        for style in (ColwiseSparse24(), RowwiseSparse24())
    )
    with mock.patch.object(DTensor, "from_local", side_effect=AssertionError):
        columns(x), rows(part(x, mesh, -1))


def test_plain_tensors_take_no_trip_through_dtensors(world):
    """A trip through DTensors would take longer than a decode step's product."""
    world.run(calls_without_dtensors)


def batches_of_rows() -> None:
    mesh = mesh_of(2)
    cut = parallelize_module(layer(torch.bfloat16, require=INVARIANT), mesh, RowwiseSparse24(parts=2))
    x = part(tokens(9, K, dtype=torch.bfloat16), mesh, -1)
    assert torch.equal(cut(x), torch.cat([cut(x[i : i + 1]) for i in range(9)]))


def test_rows_are_batch_invariant_where_it_is_required(world):
    world.run(batches_of_rows)


# Packed, compiled -----------------------------------------------------------------------------------


def packed_layers(style: ColwiseSparse24 | RowwiseSparse24) -> None:
    mesh, x = mesh_of(2), tokens(5, K, dtype=torch.bfloat16)
    want = parallelize_module(layer(torch.bfloat16, require=INVARIANT), mesh, style)
    cut = pack(parallelize_module(pack(layer(torch.bfloat16, require=INVARIANT)), mesh, style))
    own = x if isinstance(style, ColwiseSparse24) else part(x, mesh, -1)
    assert same(cut(own), want(own))
    assert all(
        torch.equal(t.to_local(), want.state_dict()[key].to_local()) for key, t in cut.state_dict().items()
    )


@pytest.mark.parametrize(
    "style", [ColwiseSparse24(), RowwiseSparse24(parts=2), RowwiseSparse24(parts=8)], ids=repr
)
def test_packed_layers_are_cut_and_cut_layers_packed(world, style):
    world.run(packed_layers, style)


def compiled() -> None:
    torch._dynamo.reset()
    cut = parallelize_module(model(), mesh_of(2), PLAN)
    whole = torch.compile(cut, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for n in (5, 3, 8):
            x = tokens(n, K, dtype=torch.bfloat16)
            assert same(whole(x), cut(x))


def test_a_block_compiles_in_one_graph(world):
    world.run(compiled)


# Layouts --------------------------------------------------------------------------------------------


def a_feed_forward(require: dict | None, local: bool) -> None:
    """Gate-less: up by columns, down by rows; nothing is exchanged between them."""
    mesh = mesh_of(2)
    options = {"require": require} if require else {}

    def model() -> nn.Sequential:
        return nn.Sequential(layer(activation="silu", **options), layer(m=64, k=M, **options))

    plan = {
        "0": ColwiseSparse24(use_local_output=local),
        "1": RowwiseSparse24(use_local_output=local, parts=2 if require else None),
    }
    cut, x = parallelize_module(model(), mesh, plan), tokens(2, 6, K)
    y = cut(x)
    if not local:
        assert isinstance(y, DTensor)
        assert y.placements == (Replicate(),)
        y = y.to_local()
    close(y, model()(x))


@pytest.mark.parametrize("require", [None, INVARIANT], ids=str)
@pytest.mark.parametrize("local", [True, False])
def test_a_block_of_columns_and_rows(world, require, local):
    world.run(a_feed_forward, require, local)


def layouts(given: Shard | Replicate, wanted: Shard | Replicate, as_dtensor: bool) -> None:
    mesh = mesh_of(2)
    x, whole = tokens(4, 6, K), layer(require=INVARIANT)
    for style, exact in ((ColwiseSparse24, True), (RowwiseSparse24, False)):
        options = {"parts": 2} if style is RowwiseSparse24 else {}
        how = style(input_layouts=given, output_layouts=wanted, use_local_output=not as_dtensor, **options)
        cut = parallelize_module(layer(require=INVARIANT), mesh, how)
        placed = distribute_tensor(x, mesh, [given])
        y = cut(placed if as_dtensor else placed.to_local())
        if as_dtensor:
            assert y.placements == (wanted if isinstance(wanted, Replicate) else Shard(wanted.dim % 3),)
            found = y.full_tensor()
        else:
            found = DTensor.from_local(y, mesh, [wanted]).full_tensor()
        assert same(found, whole(x)) if exact else close(found, whole(x)) is None


@pytest.mark.parametrize("given", [Replicate(), Shard(0), Shard(1), Shard(-1)], ids=str)
@pytest.mark.parametrize("wanted", [Replicate(), Shard(0), Shard(1), Shard(-1)], ids=str)
@pytest.mark.parametrize("as_dtensor", [False, True])
def test_x_and_the_result_lie_as_the_layouts_say(world, given, wanted, as_dtensor):
    world.run(layouts, given, wanted, as_dtensor)


# Gradients ------------------------------------------------------------------------------------------


def gradients(wanted: Shard | Replicate) -> None:
    mesh = mesh_of(2)
    x, dy = tokens(4, K), tokens(4, M, seed=5)
    whole = layer(trainable=True)
    x0 = x.clone().requires_grad_()
    whole(x0).backward(dy)

    cut = parallelize_module(layer(trainable=True), mesh, ColwiseSparse24())
    x1 = x.clone().requires_grad_()
    cut(x1).backward(part(dy, mesh, -1))
    close(x1.grad, x0.grad)
    close(cut.values.grad, part(whole.values.grad, mesh, 0))
    close(cut.bias.grad, part(whole.bias.grad, mesh, 0))

    cut = parallelize_module(layer(trainable=True), mesh, RowwiseSparse24(output_layouts=wanted))
    x1 = part(x, mesh, -1).clone().requires_grad_()
    cut(x1).backward(dy if isinstance(wanted, Replicate) else part(dy, mesh, wanted.dim))
    close(x1.grad, part(x0.grad, mesh, -1))
    close(cut.values.grad, part(whole.values.grad, mesh, 1))
    close(cut.bias.grad, whole.bias.grad)


@pytest.mark.parametrize("wanted", [Replicate(), Shard(0), Shard(-1)], ids=str)
def test_gradients_are_those_of_one_device(world, wanted):
    world.run(gradients, wanted)


# Beside PyTorch's other ways ------------------------------------------------------------------------


def trained(wrap) -> torch.Tensor:
    """The weight after three steps on this rank's share of the tokens, by averages of gradients."""
    torch.manual_seed(1)
    linear = nn.Linear(K, M)
    block = nn.Sequential(Sparse24Linear.from_linear(linear, trainable=True))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    share = tokens(8, K).chunk(ranks)[rank]
    module = wrap(block)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(3):  # fully_shard writes the weight anew for each
        optimizer.zero_grad()
        module(share).square().mean().backward()
        optimizer.step()
    values = block.state_dict()["0.weight.values24"]
    return values.full_tensor() if isinstance(values, DTensor) else values


def fully_sharded(module: nn.Module) -> nn.Module:
    fully_shard(module[0], mesh=mesh_of(4))
    module.load_state_dict(module.state_dict())
    return fully_shard(module, mesh=mesh_of(4))


def data_parallel() -> None:
    wanted = trained(nn.parallel.DistributedDataParallel)
    torch.manual_seed(1)
    whole = Sparse24Linear.from_linear(nn.Linear(K, M), trainable=True)
    optimizer = torch.optim.SGD(whole.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        whole(tokens(8, K)).square().mean().backward()
        optimizer.step()
    close(wanted, whole.values.detach())
    close(trained(fully_sharded), wanted)


def test_layers_train_under_ddp_and_fsdp(world):
    """The ranks exchange the layer's own tensors, whose dtypes every backend knows."""
    world.run(data_parallel)
