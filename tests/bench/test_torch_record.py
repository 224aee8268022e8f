"""The committed record of PyTorch's door: complete, of these kernels, and as fast as is promised."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sparse24_plans.bench.record import is_current, kernel_files

from .records import record

STEPS = (1, 8, 16, 32, 64, 128)
PREFILLS = (2048, 8192)


def torch_record() -> dict:
    return record("h200-torch.json")


def rows(kind: str, gpus: int = 1) -> dict[int, dict]:
    """By the number of tokens of a call."""
    found = [row for row in torch_record()["decoder"] if (row["kind"], row["gpus"]) == (kind, gpus)]
    by_tokens = {row["n"] * row["tokens"]: row for row in found}
    assert len(by_tokens) == len(found)
    return by_tokens


def test_it_belongs_to_these_kernels():
    found = torch_record()
    assert is_current(found)
    assert set(found["kernel_files"]) <= set(kernel_files())
    assert "kernels_cu/gemm/wgmma_sp.cu" in found["kernel_files"]


def test_it_says_where_it_was_taken():
    found = torch_record()
    assert found["gpu"] == "NVIDIA H200"
    assert found["versions"]["torch"]


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("kind", "tokens"), [("decode", STEPS), ("prefill", PREFILLS)])
def test_every_step_is_there(kind, tokens, gpus):
    found = rows(kind, gpus)
    assert tuple(found) == tokens
    names = ("graph_dense_ms", "graph_sparse_ms", "graph_invariant_ms", "eager_dense_ms", "eager_sparse_ms")
    assert all(row[name] > 0 for row in found.values() for name in names)
    assert {row["weights"] for row in found.values()} == {"bf16"}


def graph_ratios(kind: str, gpus: int = 1) -> dict[int, float]:
    return {n: row["graph_dense_ms"] / row["graph_sparse_ms"] for n, row in rows(kind, gpus).items()}


@pytest.mark.parametrize(
    ("n", "least"),
    [(1, 1.40), (8, 1.38), (16, 1.36), (32, 1.33), (64, 1.28), (128, 1.2)],
)
def test_a_decode_step_in_a_graph(n, least):
    assert graph_ratios("decode")[n] >= least


@pytest.mark.parametrize("tokens", PREFILLS)
def test_a_prefill_in_a_graph(tokens):
    assert graph_ratios("prefill")[tokens] >= 1.35


def test_batch_invariance_stays_faster_than_dense():
    every = [*rows("decode").values(), *rows("prefill").values()]
    assert min(row["graph_dense_ms"] / row["graph_invariant_ms"] for row in every) >= 1.1


def eager_ratios(found: Iterable[dict]) -> list[float]:
    return [row["eager_dense_ms"] / row["eager_sparse_ms"] for row in found]


def test_an_eager_step_is_never_slower_than_the_dense_one():
    assert min(eager_ratios(rows("decode").values())) >= 0.97


def test_eager_calls_are_faster_where_the_gpu_is_the_limit():
    assert min(eager_ratios(rows("prefill").values())) >= 1.3
    assert eager_ratios([rows("decode")[128]])[0] > 1


@pytest.mark.xfail(
    strict=True,
    reason="0.91 for 128 tokens, else 1.04 to 1.30: half a weight leaves less to win, and sums stay",
)
def test_two_gpus_are_faster_with_sparse_weights_too():
    for kind in ("decode", "prefill"):
        assert min(graph_ratios(kind, gpus=2).values()) > 1


def test_the_host_time_of_a_layer():
    host = torch_record()["host"]
    assert host["sparse_linear_us"] <= 1.3 * host["f_linear_us"]
    assert host["torch_sparse_us"] >= 10 * host["sparse_linear_us"]


def test_the_host_time_of_a_compiled_layer():
    host = torch_record()["host"]
    assert host["compiled_sparse_us"] <= 1.1 * host["compiled_dense_us"]
