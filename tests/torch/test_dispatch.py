"""Every op does what PyTorch's dispatcher requires: fakes, no vmap, counted writes, inference mode."""

from __future__ import annotations

import pytest
import torch

from sparse24_plans import InvalidProblemError

from .cases import DEVICE, S, close, defined_ops, integers, randn, wanting, weight
from .dispatching import CHOSEN, assert_fakes, assert_no_vmap, assert_opcheck, names_of

F = torch.nn.functional


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


def test_inference_mode_gives_the_same_bits():
    values, meta, _ = weight()
    x = randn(5, 64)
    with torch.inference_mode():
        inside = S.linear(x, values, meta)
        own = S.linear(x, *S.prune_compress(randn(96, 64)))
    assert inside.is_inference()
    assert own.shape == (5, 96)
    assert torch.equal(inside, S.linear(x, values, meta))


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


def test_autograd_refuses_a_saved_tensor_that_an_op_wrote():
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
