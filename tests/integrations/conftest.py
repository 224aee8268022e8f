"""vLLM without its compiled parts, as its tests import it, and the rank that it takes this process for."""

from __future__ import annotations

import pytest

from .vllm_sources import stub_what_is_compiled

stub_what_is_compiled()


@pytest.fixture
def at_rank(monkeypatch):
    """A function that makes vLLM take this process for a rank of so many."""
    import vllm.model_executor.parameter as vllm_parameter
    from vllm.model_executor.layers import linear as vllm_linear

    def set_rank(rank: int, size: int) -> None:
        for module in (vllm_linear, vllm_parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)

    set_rank(0, 1)
    return set_rank
