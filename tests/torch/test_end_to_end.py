"""The benchmark of a decoder in PyTorch, on a decoder small enough for a CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks import torch_end_to_end, torch_ranks
from benchmarks.torch_end_to_end import LISTS, Decoder, DecoderShape, cache_of, contenders, decoder_row
from sparse24_plans import UnsupportedError
from sparse24_plans.bench import record
from sparse24_plans.torch import Sparse24Linear, Sparse24WeightOnlyLinear

from .cases import DEVICE

SMALL = DecoderShape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, cache=8)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Run compiled models eagerly, because compilers are slow, and time few calls."""
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(torch_end_to_end, "host_us", partial(torch_end_to_end.host_us, calls=3, rounds=3))
    monkeypatch.setattr(torch_end_to_end, "STEPS", (1, 3))
    monkeypatch.setattr(torch_end_to_end, "PREFILLS", (5,))


ABOUT = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "versions": {}}
HOST = ("f_linear_us", "sparse_linear_us", "torch_sparse_us", "compiled_dense_us", "compiled_sparse_us")
FIELDS = {"kind", "n", "tokens", "weights", "gpus", "eager_dense_ms", "eager_sparse_ms"}
FIELDS |= {
    "graph_dense_ms",
    "graph_sparse_ms",
    "graph_invariant_ms",
    "compiled_dense_ms",
    "compiled_sparse_ms",
}
BLOCK_US = 2000.0


def measured(steps: list[record.Step], gpus: int) -> dict:
    """The record of a small decoder."""
    found = record.take(steps, ABOUT, LISTS)
    assert {name: found[name] for name in ABOUT} == ABOUT
    assert record.is_current(found)
    assert all(row.keys() == FIELDS for row in found["decoder"])
    assert all(row["eager_dense_ms"] > 0 and row["eager_sparse_ms"] > 0 for row in found["decoder"])
    where = [(row["kind"], row["n"], row["tokens"], row["weights"]) for row in found["decoder"]]
    of_bf16 = [("decode", 1, 1, "bf16"), ("decode", 3, 1, "bf16"), ("prefill", 1, 5, "bf16")]
    of_s4 = [("decode", 1, 1, "s4"), ("decode", 3, 1, "s4")] if gpus == 1 else []
    assert where == of_bf16 + of_s4
    assert all(row["gpus"] == gpus for row in found["decoder"])
    assert all(step.is_done(found) for step in steps)
    return found


def test_a_record_has_the_contracts_fields():
    steps = torch_end_to_end.steps(SMALL, DEVICE, block_us=BLOCK_US)
    assert len(steps) == 6
    found = measured(steps, 1)
    assert tuple(found["host"]) == HOST
    assert all(value is None or value > 0 for value in found["host"].values())
    assert bool(found["kernel_files"]) == (DEVICE == "cuda")
    for name in ("graph_dense_ms", "compiled_dense_ms", "compiled_sparse_ms"):
        assert all((row[name] is None) == (DEVICE == "cpu") for row in found["decoder"])


def test_two_processes_share_a_decoder():
    """The test's processes talk over gloo; on GPUs over nccl. Several processes record no host times."""
    counts = {"decode": (1, 3), "prefill": (5,)}
    found = measured(torch_ranks.steps(2, SMALL, "cpu", counts, block_us=BLOCK_US), 2)
    assert found["host"] == {}


def test_compiled_layers_give_what_the_decoder_gives():
    torch.manual_seed(0)
    model = Decoder(SMALL, torch.float32, DEVICE)
    x = torch.randn(2, 1, SMALL.hidden, device=DEVICE)
    cache = cache_of(SMALL, 2, torch.float32, DEVICE)
    assert torch.equal(torch_end_to_end._compiled(model, "default", x, cache)(), model(x, cache))


def test_a_decode_step_is_the_last_token_of_a_prefill():
    """The two kinds of rows are one model: with a cache of what came before, a token gives the same."""
    torch.manual_seed(0)
    model = Decoder(SMALL, torch.float32, DEVICE)
    x = torch.randn(1, SMALL.cache, SMALL.hidden, device=DEVICE)
    cache = cache_of(SMALL, 1, torch.float32, DEVICE)
    whole = model(x, None)
    before = x
    for layer, (keys, values) in zip(model.layers, cache, strict=True):
        kv = SMALL.kv_heads * SMALL.head_size
        qkv = layer.qkv(torch.nn.functional.rms_norm(before, (SMALL.hidden,)))
        _, k, v = qkv.split((SMALL.hidden, kv, kv), dim=-1)
        for held, new in ((keys, k), (values, v)):
            held.copy_(new.view(1, SMALL.cache, SMALL.kv_heads, SMALL.head_size).transpose(1, 2))
        before = layer(before, None, None)
    torch.testing.assert_close(model(x[:, -1:], cache), whole[:, -1:], rtol=1e-4, atol=1e-4)


def test_the_contenders_hold_the_same_weights():
    dense = Decoder(SMALL, torch.bfloat16, DEVICE)
    sparse = dense.sparse(batch_invariant=True)
    pairs = [
        (m, dense.get_submodule(name)) for name, m in sparse.named_modules() if type(m) is Sparse24Linear
    ]
    assert len(pairs) == 4 * SMALL.layers
    assert all(torch.equal(ours.dense_weight(), theirs.weight) for ours, theirs in pairs)
    assert all(ours.plan().guarantee.batch_invariant for ours, _ in pairs)


def test_a_dense_decoder_holds_what_s4_rounds_to():
    models = contenders(SMALL, torch.bfloat16, torch.device(DEVICE), stored="s4")
    layers = {
        name: layer
        for name, layer in models["sparse"].named_modules()
        if type(layer) is Sparse24WeightOnlyLinear
    }
    assert len(layers) == 4 * SMALL.layers
    for name, layer in layers.items():
        assert layer.weight_element == "s4"
        assert torch.equal(layer.dense_weight(), models["dense"].get_submodule(name).weight)


def test_a_wrong_result_is_not_timed(monkeypatch):
    spoiled = Decoder.sparse

    def wrong(self: Decoder, stored: str | None = None, **require: bool) -> Decoder:
        model = spoiled(self, stored, **require)
        model.layers[0].down = Sparse24Linear(96, 64, bias=False, dtype=torch.bfloat16, device=DEVICE)
        return model

    monkeypatch.setattr(Decoder, "sparse", wrong)
    models = contenders(SMALL, torch.bfloat16, torch.device(DEVICE))
    with pytest.raises(UnsupportedError, match="relative error"):
        decoder_row(models, "decode", 1, set(), block_us=BLOCK_US)
