"""The benchmark of PyTorch's door, on a decoder small enough for a CPU."""

from __future__ import annotations

import pytest
import torch

from sparse24_plans import UnsupportedError
from sparse24_plans.bench.torch_door import Decoder, DecoderShape, cache_of, measured
from sparse24_plans.torch import Sparse24Linear

from .cases import DEVICE

SMALL = DecoderShape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, cache=8)


@pytest.fixture(autouse=True)
def quick_host(monkeypatch):
    """Compilers are slow; what is compiled here is eager."""
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)


def test_a_record_has_the_contracts_fields():
    sources: set[str] = set()
    found = measured(
        SMALL, steps=(1, 3), prefills=(5,), device=DEVICE, rounds=3, host_calls=3, sources=sources
    )
    assert set(found["host"]) == {
        "f_linear_us",
        "sparse_linear_us",
        "torch_sparse_us",
        "compiled_dense_us",
        "compiled_sparse_us",
    }
    assert all(value is None or value > 0 for value in found["host"].values())
    names = {"kind", "n", "tokens", "weights", "gpus", "eager_dense_ms", "eager_sparse_ms"}
    names |= {"graph_dense_ms", "graph_sparse_ms", "graph_invariant_ms"}
    assert all(set(row) == names for row in found["decoder"])
    where = [(row["kind"], row["n"], row["tokens"]) for row in found["decoder"]]
    assert where == [("decode", 1, 1), ("decode", 3, 1), ("prefill", 1, 5)]
    assert bool(sources) == (DEVICE == "cuda")


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


def test_a_wrong_result_is_not_timed(monkeypatch):
    spoiled = Decoder.sparse

    def wrong(self: Decoder, **require: bool) -> Decoder:
        model = spoiled(self, **require)
        model.layers[0].down = Sparse24Linear(96, 64, bias=False, dtype=torch.bfloat16, device=DEVICE)
        return model

    monkeypatch.setattr(Decoder, "sparse", wrong)
    with pytest.raises(UnsupportedError, match="relative error"):
        measured(SMALL, steps=(1,), prefills=(), device=DEVICE, rounds=1)
