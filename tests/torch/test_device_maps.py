"""Saved models are loaded onto the devices of a map, unless it holds weights on a disk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse24_plans import UnsupportedError
from sparse24_plans.torch import Sparse24Linear

from .llamas import saved_llama, swapped
from .saved_models import logits, same_state

transformers = pytest.importorskip("transformers", minversion="5.8")
AutoModelForCausalLM = transformers.AutoModelForCausalLM

folder = pytest.fixture(saved_llama, scope="module")


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_a_device_map_is_followed(folder, device_map):
    pytest.importorskip("accelerate")
    assert same_state(AutoModelForCausalLM.from_pretrained(folder, device_map=device_map).cpu(), swapped())


def test_hooks_that_bring_inputs_to_a_layer_move_along(folder, monkeypatch):
    hooks = pytest.importorskip("accelerate.hooks")
    seen: list[Any] = []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(module))
            return args, kwargs

    def dispatch(model: Any, *_: Any) -> None:
        hooks.add_hook_to_module(model.model.layers[0].self_attn.q_proj, Hook())

    monkeypatch.setattr(transformers.modeling_utils, "accelerate_dispatch", dispatch)
    devices = {"model": "cpu", "lm_head": torch.device("cpu")}
    logits(AutoModelForCausalLM.from_pretrained(folder, device_map=devices))
    assert seen == [Sparse24Linear]


def test_weights_on_a_disk_are_refused(folder, tmp_path):
    pytest.importorskip("accelerate")
    with pytest.raises(UnsupportedError, match="device_map: expected devices that hold 2:4 weights"):
        AutoModelForCausalLM.from_pretrained(
            folder, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path
        )
