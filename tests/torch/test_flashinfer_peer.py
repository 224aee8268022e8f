"""FlashInfer as a peer of block-sparse attention, with a stand-in for its wrapper."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import flashinfer_peer


class Wrapper:
    """Dense attention over the blocks that it was told. ``cake`` has at most 64 blocks of 64 in a row."""

    def __init__(self, workspace, backend):
        assert workspace.dtype == torch.uint8
        self.backend = backend

    def plan(self, kept, rows, columns, heads, kv_heads, head_size, *, q_data_type):
        if self.backend == "cake" and kept.sum(-1).max() > 64:
            raise ValueError("at most 64 KV blocks per query block are supported")
        assert self.backend != "cake" or rows.max() <= 64
        assert (rows.sum(-1) == columns.sum(-1)).all()
        assert (heads, kv_heads, head_size, q_data_type) == (2, 2, 128, torch.float32)
        self.kept = torch.stack(
            [
                one.repeat_interleave(down, 0).repeat_interleave(across, 1)
                for one, down, across in zip(kept, rows, columns, strict=True)
            ]
        )

    def run(self, q, k, v, out):
        assert out.shape == (q.shape[0] * q.shape[1], 1, q.shape[2])
        scores = (q @ k.mT / 128**0.5).masked_fill(~self.kept, -torch.inf)
        out.view(q.shape).copy_(torch.softmax(scores, -1) @ v)


def operands(tokens: int, head_size: int = 128) -> dict[str, torch.Tensor]:
    return {name: torch.randn(1, 2, tokens, head_size) for name in "qkv"}


def first_columns(tokens: int, *counts: int) -> np.ndarray:
    """Blocks of 128 of two heads, each of which keeps so many first columns."""
    return np.arange(tokens // 128) < np.ones((2, tokens // 128, 1)) * np.reshape(counts, (2, 1, 1))


@pytest.fixture
def installed(monkeypatch):
    found = SimpleNamespace(sparse=SimpleNamespace(VariableBlockSparseAttentionWrapper=Wrapper))
    monkeypatch.setattr(flashinfer_peer, "flashinfer", found)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("backend", flashinfer_peer.BACKENDS)
def test_a_pass_reads_the_kept_blocks(backend):
    read = operands(1024)
    run, out = flashinfer_peer.forward(backend, read, first_columns(1024, 2, 5), 128)
    assert out.isnan().all()
    run()
    for head, seen in enumerate((256, 640)):
        q, k, v = (one[0, head] for one in read.values())
        exact = torch.softmax(q @ k[:seen].mT / 128**0.5, -1) @ v[:seen]
        torch.testing.assert_close(out[head], exact)


@pytest.mark.usefixtures("installed")
def test_what_flashinfer_does_not_serve_has_no_pass():
    read, many = operands(8192), first_columns(8192, 33, 33)  # 66 columns of blocks of 64
    assert flashinfer_peer.forward("cake", read, many, 128) is None
    many[1, 7] = False
    assert flashinfer_peer.forward("fa3", read, many, 128) is None
    assert flashinfer_peer.forward("fa2", operands(1024, 64), first_columns(1024, 2, 2), 128) is None


def test_there_is_no_pass_without_flashinfer(monkeypatch):
    monkeypatch.setattr(flashinfer_peer, "flashinfer", None)
    assert flashinfer_peer.forward("fa2", operands(1024), first_columns(1024, 2, 2), 128) is None
