"""How the ops stand in PyTorch's dispatcher: fakes, autograd, autocast, modes, compilation, export."""

from __future__ import annotations

import gc
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from sparse24_plans import InvalidProblemError, UnsupportedError

from .cases import DEVICE, S, close, defined_ops, integers, randn, wanting, weight
from .dispatching import assert_fakes, assert_no_vmap, assert_opcheck, names_of
from .test_ops import ACTIVATIONS

F = torch.nn.functional
needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler for CPUs"
)

CHOSEN = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0], [0, 1]], dtype=torch.int32, device=DEVICE)
"""The two choices of two experts by each of five rows."""


def samples() -> dict[str, tuple]:
    """An op and arguments for each way in which it is called."""
    values, meta, dense = weight()
    halves, words, _ = weight(dtype=torch.bfloat16)
    packed = S.pack(halves, words)
    bytes_, of_bytes = S.prune_compress(integers(96, 64))
    x, bias = randn(2, 5, 64), randn(96)
    mask = S.tile_prune(dense)[4]
    scales = randn(5).abs(), randn(96).abs()
    out = torch.empty(2, 5, 96, device=DEVICE)
    wide = [wanting(t) for t in (x, values, bias)]
    experts = S.prune_compress(randn(128, 64).bfloat16())
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32, device=DEVICE)
    # No kernel of a GPU computes the gradients of stored values.
    nibbles = torch.arange(96 * 16).remainder(251).to(torch.uint8).reshape(96, 16)
    stored = nibbles, words.cpu(), randn(96, 2).abs().bfloat16().cpu()
    some, rows, addend = (wanting(one.bfloat16().cpu()) for one in (x, randn(2, 5, 96), bias))
    return {
        "linear": (S.linear, wide[0], wide[1], meta, wide[2]),
        "linear with an activation": (S.linear, wide[0], wide[1], meta, wide[2], None, "silu"),
        "linear, packed": (S.linear, x.bfloat16(), packed, None, None, 96),
        "linear_out": (S.linear_out, x, values, meta, bias, out),
        "scaled_linear": (
            S.scaled_linear,
            integers(5, 64),
            bytes_,
            of_bytes,
            *scales,
            None,
            None,
            "none",
            bias.dtype,
        ),
        "fp8_linear": (
            S.fp8_linear,
            randn(5, 64).bfloat16(),
            halves,
            words,
            None,
            None,
            None,
            torch.zeros(1, device=DEVICE),
        ),
        "grouped_mm": (S.grouped_mm, randn(5, 64).bfloat16(), *experts, offsets),
        "experts_mm": (S.experts_mm, randn(5, 64).bfloat16(), *experts, CHOSEN, 2, None, True),
        "experts_mm, added up": (
            *(S.experts_mm, randn(10, 64).bfloat16(), *experts, CHOSEN, 2),
            *(torch.rand(5, 2, device=DEVICE), False, True),
        ),
        "bmm": (S.bmm, randn(2, 5, 64).bfloat16(), *experts, randn(64).bfloat16()),
        "weight_only_linear": (S.weight_only_linear, some, *stored, addend, 32),
        "weight_only_linear with an activation": (S.weight_only_linear, some, *stored, None, 32, "silu"),
        "weight_only_linear, packed": (
            S.weight_only_linear,
            some.detach(),
            S.pack_quantized(*stored, 32),
            None,
            None,
            addend.detach(),
            32,
            "none",
            None,
            "",
            96,
            torch.bfloat16,
        ),
        "pack_quantized": (S.pack_quantized, *stored, 32),
        "weight_only_dgrad": (S.weight_only_dgrad, rows.detach(), *stored, 32),
        "dgrad": (S.dgrad, wanting(randn(2, 5, 96)), wide[1], meta),
        "dgrad, packed": (S.dgrad, randn(5, 96).bfloat16(), packed, None, 96, 64),
        "mm": (S.mm, wide[1], meta, wanting(randn(64, 5)), None, None, "", True),
        "mm on columns": (S.mm, values, meta, randn(5, 64).t(), None, None, "", True),
        "prune": (S.prune, wanting(dense)),
        "prune by scores": (S.prune, dense, randn(96, 64)),
        "compress": (S.compress, wanting(dense)),
        "prune_compress": (S.prune_compress, wanting(dense)),
        "decompress": (S.decompress, wide[1], meta),
        "pack": (S.pack, halves, words),
        "unpack": (S.unpack, packed, 96, 64),
        "quantize": (S.quantize, randn(5, 64), torch.int8, None, 80),
        "quantize by a scale": (S.quantize, randn(2, 5, 64), torch.float8_e4m3fn, scales[0][:1], 64),
        "tile_prune": (S.tile_prune, wanting(dense)),
        "apply_mask": (S.apply_mask, wanting(dense), mask),
        "to_cutlass": (S.to_cutlass, halves, words),
        "to_cutlass of 8 bits": (S.to_cutlass, bytes_, of_bytes),
        "from_cutlass": (S.from_cutlass, halves, S.to_cutlass(halves, words), 96, 64),
    }


SAMPLES = samples()
every_op = pytest.mark.parametrize("name", SAMPLES)


def test_every_op_has_a_sample():
    """Samples of ops of block-sparse matrices are in blocksparse/test_dispatch.py."""
    names = defined_ops()
    ours = {name for name in names if not name.startswith("blocksparse_")}
    assert names_of(SAMPLES) == ours
    assert len(names) > len(ours)


@every_op
def test_opcheck(name):
    assert_opcheck(SAMPLES[name])


@every_op
@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_tensors_without_values_have_the_results_shape_dtype_and_strides(name, mode):
    assert_fakes(SAMPLES[name], mode)


@every_op
def test_vmap_is_refused(name):
    assert_no_vmap(SAMPLES[name])


def test_fakes_refuse_what_the_ops_refuse():
    values, meta, _ = weight()
    with pytest.raises(InvalidProblemError, match=r"x: expected \[..., 64\]"):
        S.linear(randn(5, 56).to("meta"), values.to("meta"), meta.to("meta"))


# Autograd -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_dense_layer(name, dtype):
    """Gradients of x, bias and the kept values are compared; pruned cells have none."""
    values, meta, dense = weight(dtype=dtype)
    x, values, bias = wanting(randn(2, 5, 64, dtype=dtype)), wanting(values), wanting(randn(96, dtype=dtype))
    dy = randn(2, 5, 96, dtype=dtype, seed=5)
    if name == "relu2":  # its slope is 2v, about 16
        dy = dy / 16
    ours = torch.autograd.grad(S.linear(x, values, meta, bias, None, name), (x, values, bias), dy)
    wide = [wanting(t.double()) for t in (x, dense, bias)]
    theirs = torch.autograd.grad(ACTIVATIONS[name](F.linear(*wide)), wide, dy.double())
    close(ours[0], theirs[0])
    close(S.decompress(ours[1], meta), torch.where(dense != 0, theirs[1], 0.0), dtype)
    close(ours[2], theirs[2])
    assert [g.dtype for g in ours] == [dtype] * 3


def test_a_gradient_of_a_gradient():
    values, meta, dense = weight()
    x, v = wanting(randn(5, 64)), randn(5, 64, seed=9)
    (dx,) = torch.autograd.grad((S.linear(x, values, meta) ** 2).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx, x, v)
    close(ddx, 2 * (v.double() @ dense.double().t()) @ dense.double())


def test_gradients_of_mm_and_dgrad():
    values, meta, dense = weight()
    for product, reference, operand in (
        (lambda v, b: S.mm(v, meta, b, may_transpose=True), lambda w, b: w @ b, randn(64, 5)),
        (lambda v, dy: S.dgrad(dy, v, meta), lambda w, dy: dy @ w, randn(5, 96)),
    ):
        v, b, w, c = wanting(values), wanting(operand), wanting(dense.double()), wanting(operand.double())
        y, z = product(v, b), reference(w, c)
        dy = randn(*y.shape, seed=4)
        dv, db = torch.autograd.grad(y, (v, b), dy)
        dw, dc = torch.autograd.grad(z, (w, c), dy.double())
        close(db, dc)
        close(S.decompress(dv, meta), torch.where(dense != 0, dw, 0.0))


def test_preparing_is_differentiated_where_it_keeps():
    dense = randn(32, 64)
    grad = randn(32, 64, seed=2)
    for op in (
        S.prune,
        lambda d: S.decompress(*S.prune_compress(d)),
        lambda d: S.decompress(*S.tile_prune(d)[:2]),
    ):
        d = wanting(dense)
        kept = op(d)
        (found,) = torch.autograd.grad(kept, d, grad)
        assert torch.equal(found, torch.where(kept != 0, grad, 0.0))


def test_ops_without_a_gradient_say_so():
    bytes_, meta = S.prune_compress(integers(96, 64))
    bias = wanting(randn(96))
    with pytest.raises(UnsupportedError, match="scaled_linear has no gradient"):
        S.scaled_linear(integers(5, 64), bytes_, meta, None, None, bias, out_dtype=torch.float32)
    values, meta, _ = weight(dtype=torch.bfloat16)
    packed = wanting(S.pack(values, meta))
    y = S.linear(randn(5, 64, dtype=torch.bfloat16), packed, None, None, 96)
    with pytest.raises(UnsupportedError, match="packed weight has no gradient"):
        y.sum().backward()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_transforms_that_take_gradients_are_refused(transform):
    values, meta, _ = weight()
    with pytest.raises(UnsupportedError, match=r"sparse24::linear has no .*torch\.func"):
        transform(lambda v: S.linear(v, values, meta).sum())(randn(5, 64))


def test_forward_mode_is_refused_instead_of_giving_no_tangent():
    values, meta, _ = weight()
    x, tangent = randn(5, 64), randn(5, 64, seed=3)
    with pytest.raises(UnsupportedError, match="sparse24::linear has no forward-mode derivative"):
        torch.func.jvp(lambda v: S.linear(v, values, meta), (x,), (tangent,))
    with torch.autograd.forward_ad.dual_level():
        S.linear(x, values, meta)  # of constants
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        with pytest.raises(UnsupportedError, match="no forward-mode"):
            S.linear(dual, values, meta)
        with pytest.raises(UnsupportedError, match="no forward-mode"):
            S.prune(dual)


# Modes --------------------------------------------------------------------------------------------


def test_inference_mode_gives_the_same_bits():
    values, meta, _ = weight()
    x = randn(5, 64)
    with torch.inference_mode():
        inside = S.linear(x, values, meta)
        own = S.linear(x, *S.prune_compress(randn(96, 64)))
    assert inside.is_inference()
    assert own.shape == (5, 96)
    assert torch.equal(inside, S.linear(x, values, meta))


@pytest.mark.parametrize("form", ["float32 weight", "bfloat16 weight", "packed bfloat16 weight"])
def test_autocast_moves_x_and_float32_weights(form):
    """A weight of 16 bits keeps its element, and x goes there; a float32 one goes where autocast says."""
    values, meta, _ = weight(dtype=torch.float32 if form.startswith("float32") else torch.bfloat16)
    arguments = (S.pack(values, meta), None, None, 96) if form.startswith("packed") else (values, meta)
    x = randn(5, 64)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = S.linear(x, *arguments)
        dx = S.dgrad(randn(5, 96), arguments[0], arguments[1], 96, 64)
    halves = values.bfloat16()
    assert torch.equal(y, S.linear(x.bfloat16(), halves, meta))
    assert torch.equal(dx, S.dgrad(randn(5, 96).bfloat16(), halves, meta))


def _into_out(x, w, meta, bias):
    out = x.new_empty(5, 64, dtype=torch.bfloat16)
    S.linear_out(x, w, meta, bias, out)
    return out


BY_GROUPS = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
MIXED = {
    "linear_out": _into_out,
    "bmm": lambda x, w, meta, bias: S.bmm(x[None], w, meta, bias),
    "bmm by name": lambda x, w, meta, bias: S.bmm(x=x[None], weight=w, meta=meta, bias=bias),
    "grouped_mm": lambda x, w, meta, bias: S.grouped_mm(x, w, meta, BY_GROUPS, bias),
    "experts_mm": lambda x, w, meta, bias: S.experts_mm(x, w, meta, CHOSEN, 2, gather=True, bias=bias),
}


@pytest.mark.parametrize("op", MIXED)
@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_moves_the_operands_of_every_product(op, form):
    values, meta = S.prune_compress(randn(64, 64, dtype=form))
    x, bias = randn(5, 64), randn(64)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = MIXED[op](x, values, meta, bias)
    wanted = MIXED[op](*(x.bfloat16(), values.bfloat16()), meta, bias.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", ["weight_only_linear", "packed", "grouped_mm", "bmm"])
def test_autocast_moves_x_to_16_bit_scales(op, scale_dtype, x_dtype):
    """With float32 scales the weight has any dtype of 16 bits, so an x of 16 bits stays."""
    _, meta = (one.cpu() for one in S.prune_compress(randn(64, 64)))
    bytes_, scales = integers(64, 32).cpu(), randn(64, 1).cpu().abs().to(scale_dtype)
    x, bias = randn(5, 64).cpu().to(x_dtype), randn(64).cpu()

    def product(x, bias):
        if op == "weight_only_linear":
            return S.weight_only_linear(x, bytes_, meta, scales, bias, 64)
        if op == "packed":
            tiles = S.pack_quantized(bytes_, meta, scales, 64)
            return S.weight_only_linear(x, tiles, None, None, bias, 64, m=64, scale_dtype=scale_dtype)
        if op == "bmm":
            return S.bmm(x[None], bytes_, meta, bias, scales=scales, group=64)
        return S.grouped_mm(x, bytes_, meta, BY_GROUPS.cpu(), bias, scales=scales, group=64)

    stays = torch.float16 in (scale_dtype, x_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = product(x, bias)
    dtype = torch.float16 if stays else torch.bfloat16
    assert y.dtype == dtype
    assert torch.equal(y, product(x.to(dtype), bias.to(dtype)))


def test_autocast_leaves_the_bias_of_8_bit_operands():
    values, meta = S.prune_compress(integers(64, 64))
    x, bias = integers(5, 64), randn(64)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = S.linear(x, values, meta, bias, out_dtype=torch.float32)
    assert torch.equal(y, S.linear(x, values, meta, bias, out_dtype=torch.float32))


def test_autocast_gradients_have_the_operands_dtypes():
    values, meta, dense = weight()
    x, v = wanting(randn(5, 64)), wanting(values)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = S.linear(x, v, meta)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, v.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    close(x.grad, dense.double().sum(0).expand(5, 64), torch.bfloat16)


WRITING = [name for name, (op, *_) in SAMPLES.items() if op.default._schema.is_mutable]


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("named", [False, True])
def test_versions_count_what_an_op_writes(name, mode, named):
    """Autograd refuses a saved tensor of another version, and a copy of a weight is made anew."""
    op, *args = SAMPLES[name]
    fields = op.default._schema.arguments
    (index,) = [index for index, one in enumerate(fields) if one.is_write]
    args[index] = args[index].clone()
    with mode():
        if named:
            op(**{one.name: given for one, given in zip(fields, args, strict=False)})
        else:
            op(*args)
    assert args[index].any()
    assert args[index]._version == 1
    with torch.inference_mode():
        args[index] = args[index].clone()
    op(*args)  # one that counts nothing


def test_a_saved_tensor_that_an_op_wrote_is_refused_by_autograd():
    values, meta, _ = weight()
    out, factor = torch.ones(5, 96, device=DEVICE), wanting(randn(5, 96))
    y = (factor * out).sum()
    S.linear_out(randn(5, 64), values, meta, None, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_lazy_negatives_are_resolved():
    values, meta, dense = weight()
    x = torch._neg_view(randn(5, 64))
    close(S.linear(x, values, meta), F.linear(x.double(), dense.double()))


# Compilation --------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        values, meta, self.dense = weight(dtype=dtype)
        self.values = torch.nn.Parameter(values, requires_grad=False)
        self.register_buffer("metadata", meta)
        self.bias = torch.nn.Parameter(randn(96, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return S.linear(x * 2, self.values, self.metadata, self.bias, activation="relu") + 1


def test_one_graph_serves_every_number_of_tokens():
    """fullgraph, and one compilation for every n: the plan is selected inside of the op."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for n in (5, 2, 17, 64, 3):
        x = randn(n, 64)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_compiled_gradients():
    torch._dynamo.reset()
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for module in (layer, compiled):
        x = wanting(randn(5, 64))
        layer.bias.grad = None
        module(x).square().sum().backward()
        grads.append((x.grad, layer.bias.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compiled_mutation_of_out():
    torch._dynamo.reset()
    values, meta, _ = weight()

    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        S.linear_out(x, values, meta, None, out)
        return out + 1

    x, out = randn(5, 64), torch.zeros(5, 96, device=DEVICE)
    result = torch.compile(step, fullgraph=True, backend="aot_eager")(x, out)
    assert torch.equal(out, S.linear(x, values, meta))
    assert torch.equal(result, out + 1)


@needs_a_compiler
def test_inductor_reduce_overhead():
    """The compiler that users get, and the mode that captures CUDA graphs where there is a GPU."""
    torch._dynamo.reset()
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(compiled(randn(5, 64)), layer(randn(5, 64)))


def test_export_keeps_the_op_and_the_symbolic_size(tmp_path: Path):
    layer = Layer()
    tokens = torch.export.Dim("tokens")
    program = torch.export.export(layer, (randn(4, 64),), dynamic_shapes=({0: tokens},))
    assert "sparse24.linear" in program.graph_module.code
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for n in (2, 9):
        assert torch.equal(loaded(randn(n, 64)), layer(randn(n, 64)))


@needs_a_compiler
def test_an_aot_inductor_package_runs_where_the_ops_are_registered(tmp_path: Path):
    """A package calls the op through PyTorch's dispatcher, so a process must import sparse24_plans.torch."""
    layer = Layer().requires_grad_(False)
    program = torch.export.export(layer, (randn(4, 64),), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for n in (2, 9):
        torch.testing.assert_close(loaded(randn(n, 64)), layer(randn(n, 64)))


# Threads and memory -------------------------------------------------------------------------------


def test_threads_share_weights_and_forms():
    values, meta, dense = weight()
    start = threading.Barrier(4, timeout=60)

    def work(seed: int) -> None:
        start.wait()
        for n in (1, 5, 9, 5, 1):
            x = randn(n, 64, seed=seed)
            close(S.linear(x, values, meta), F.linear(x.double(), dense.double()))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


CONVERTING = {
    "linear": lambda x, w: S.linear(x, w, None, m=64),
    "dgrad": lambda x, w: S.dgrad(x, w, None, 64, 64),
    "mm": lambda x, w: S.mm(w, None, x.t(), 64),
    "bmm": lambda x, w: S.bmm(x[None], w, None, m=64),
    "grouped_mm": lambda x, w: S.grouped_mm(
        x, w, None, torch.tensor([0, 5], dtype=torch.int32, device=DEVICE), m=64
    ),
    "weight_only_linear": lambda x, w: S.weight_only_linear(
        x, w, None, None, None, 64, m=64, scale_dtype=torch.bfloat16
    ),
}


def packed_by(op: str, seed: int) -> torch.Tensor:
    """A packed weight [64, 64] as the op takes it."""
    dense = randn(64, 64, dtype=torch.bfloat16, seed=seed)
    if op != "weight_only_linear":
        return S.pack(*S.prune_compress(dense))
    _, meta = S.prune_compress(dense)
    bytes_ = integers(64, 32).to(torch.int8) + seed
    return S.pack_quantized(bytes_, meta, torch.ones(64, 1, dtype=torch.bfloat16, device=DEVICE), 64)


@pytest.mark.parametrize("op", CONVERTING)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_place_writes_reach_copies_in_other_layouts(op, mode):
    """PyTorch counts no writes to an inference tensor, so a copy of it can't be told from an old one."""
    x, call = randn(5, 64, dtype=torch.bfloat16), CONVERTING[op]
    with mode():
        weight, other = (packed_by(op, seed) for seed in (1, 2))
        before = call(x, weight)
        weight.copy_(other)
        assert torch.equal(call(x, weight), call(x, other))
        assert not torch.equal(call(x, weight), before)


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_writes_of_a_fused_optimizer_reach_the_product(kind, freezes):
    """PyTorch doesn't count them, so a weight that requires gradients has no copy that could be old."""
    values, meta, _ = weight()
    x = randn(5, 64)
    if freezes:
        S.linear(x, values, meta)
    values.requires_grad_()
    optimizer = kind([values], lr=0.1, fused=True)
    for _ in range(2):
        S.linear(x, values, meta).square().sum().backward()
        optimizer.step()
        close(S.linear(x, values, meta), x.double() @ S.decompress(values, meta).double().t())
    values.requires_grad_(not freezes)
    close(S.linear(x, values, meta), x.double() @ S.decompress(values, meta).double().t())


def test_a_weight_that_goes_takes_its_copies_along():
    """A weight in another layout is kept for as long as the weight lives, and no longer."""
    from sparse24_plans.torch import packed_weight_cache

    before = packed_weight_cache.kept_copies()
    values, meta, _ = weight(dtype=torch.bfloat16)
    packed = S.pack(values, meta)
    S.dgrad(randn(5, 96, dtype=torch.bfloat16), packed, None, 96, 64)
    assert packed_weight_cache.kept_copies() == before + 1
    del packed
    assert packed_weight_cache.kept_copies() == before


def test_many_calls_hold_no_memory():
    values, meta, _ = weight()
    x = randn(5, 64)
    alive = []
    for _ in range(3):
        for _ in range(200):
            S.linear(x, values, meta)
        alive.append(sum(type(one) is torch.Tensor for one in gc.get_objects()))
    assert alive[0] == alive[2]
