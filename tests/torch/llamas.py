"""A small Llama that tests of saved models build, swap and save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparse24_plans.torch import fuse_gated, save_sparse24, to_sparse24

transformers = pytest.importorskip("transformers", minversion="5.8")


def config(**changes: Any) -> Any:
    options = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaConfig(**{**options, **changes})


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config(**changes)).eval()


def swapped(**changes: Any) -> Any:
    model = llama(**changes)
    fuse_gated(model)
    to_sparse24(model)
    return model


def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fused and swapped Llama, which modules of tests have as a fixture."""
    path = tmp_path_factory.mktemp("saved") / "llama"
    save_sparse24(swapped(), path)
    return path
