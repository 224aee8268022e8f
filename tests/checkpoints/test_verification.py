"""Verification: a compressed checkpoint against the dense one that it came from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparse24_plans import ElementKind, InvalidProblemError
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.verify import verify_checkpoint

from .models import ELEMENTS, dense_file, drop, random_array, rewrite, swap


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A dense checkpoint of every element, and its compressed form."""
    dense, out = tmp_path / "dense", tmp_path / "out"
    arrays = {f"{element}.weight": random_array((24, 40), element) for element in ELEMENTS}
    dense_file(dense, {**arrays, "norm": random_array((24,)), "ids": np.arange(5)}, {"format": "pt"})
    compress_checkpoint(dense, out)
    return dense, out


def test_a_sound_checkpoint_verifies(pair, device):
    dense, out = pair
    seen: list[Any] = []
    found = verify_checkpoint(out, dense, device=device, on_layer=seen.append)
    assert found.passed
    assert (found.copied, found.problems, list(found.layers)) == (2, (), seen)
    assert {layer.element for layer in found.layers} == set(ELEMENTS)
    for layer in found.layers:
        assert layer.shape == (24, 40)
        assert 0 <= layer.worst_ratio <= 1
        assert layer.relative_error < 0.01


def test_weights_with_nan_and_inf_verify(files):
    dense, out = files
    arrays = {element: random_array((16, 24), element) for element in ELEMENTS}
    for array in arrays.values():
        array[3, 5], array[7, 0], array[9, 9] = np.nan, np.inf, -np.inf
    arrays["huge"] = np.full((8, 64), 60000, np.float16)  # the product overflows float16
    dense_file(dense, arrays)
    compress_checkpoint(dense, out)
    assert verify_checkpoint(out, dense, device="host").passed


def test_a_compressed_checkpoint_is_no_dense_one(pair):
    """Each of its tensors would differ from, or be missing in, the other, which says nothing."""
    _, out = pair
    with pytest.raises(InvalidProblemError, match=r"dense: expected a dense checkpoint, .*out is compressed"):
        verify_checkpoint(out, out, device="host")


@pytest.mark.parametrize("element", ["f32", "bf16"])
@pytest.mark.parametrize("size", [1e38, 3e38])
def test_weights_near_the_end_of_the_range_verify(files, device, element, size):
    """Sums of them would overflow float32, of which no guarantee speaks: the activations are smaller."""
    dense, out = files
    array = random_array((24, 256)).clip(-1, 1) * np.float32(size)
    array[5] = 1.0
    dense_file(dense, {"w": array.astype(ElementKind(element).dtype)})
    compress_checkpoint(dense, out)
    found = verify_checkpoint(out, dense, device=device)
    assert found.passed, found
    assert 0 < found.layers[0].worst_ratio <= 1
    assert found.layers[0].relative_error < 0.01


def test_a_checkpoint_with_nothing_to_compress_verifies(files):
    dense, out = files
    dense_file(dense, {"norm": random_array((24,)), "odd": random_array((4, 12))})
    reports = compress_checkpoint(dense, out)
    assert {report.action for report in reports} == {"copied"}
    found = verify_checkpoint(out, dense, device="host")
    assert found.passed
    assert (found.layers, found.copied) == ((), 2)
    rewrite(out, drop("norm"))
    found = verify_checkpoint(out, dense, device="host")
    assert found.problems == (f"{out} holds no compressed layer", "norm: missing")


@pytest.mark.parametrize(
    "wrong", [{"tokens": 0}, {"tokens": 10**14}, {"tokens": 1.0}, {"seed": -1}, {"seed": "1"}]
)
def test_tokens_and_seed_have_a_range(pair, wrong):
    dense, out = pair
    with pytest.raises(InvalidProblemError, match=rf"{next(iter(wrong))}: expected [01] to \d+, got"):
        verify_checkpoint(out, dense, device="host", **wrong)


def flip_value(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    arrays["f16.weight.values24"] = arrays["f16.weight.values24"].copy()
    arrays["f16.weight.values24"][7, 3] += 1


def change_norm(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    arrays["norm"] = arrays["norm"] + 1


def forget_layer(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    for key in ("f16.weight.values24", "f16.weight.meta24"):
        del arrays[key]
    del metadata["sparse24.f16.weight"]


def forget_all_layers(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    for element in ELEMENTS:
        del metadata[f"sparse24.{element}.weight"]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize(("step", "passes"), [(0, True), (1, False)])
def test_a_float32_tensor_may_be_rounded_to_16_bits(pair, dtype, step, passes):
    """A model loaded in 16 bits saves its norms so. Any other number or shape is a problem."""
    dense, out = pair
    special = np.array([np.nan, -np.inf, 1e38, -0.0, 1 + 2.0**-9, 3e-8], np.float32)
    wide = np.concatenate([special, random_array((1 << 21,))])  # more than is read at a time
    rewrite(dense, swap("norm", wide))
    with np.errstate(over="ignore"):
        narrow = wide.astype(ElementKind(dtype).dtype)
    narrow.view(np.uint16)[-1] += step
    rewrite(out, swap("norm", narrow))
    found = verify_checkpoint(out, dense, device="host")
    assert (found.passed, found.copied, found.rounded) == (passes, 1, int(passes))
    assert found.problems == (() if passes else ("norm: differs from the dense checkpoint",))
    rewrite(out, swap("norm", narrow[:-1]))
    assert not verify_checkpoint(out, dense, device="host").passed


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (flip_value, "differs from the pruned dense tensor at row 7"),
        (change_norm, "norm: differs from the dense checkpoint"),
        (forget_layer, "f16.weight: missing"),
        (drop("ids"), "ids: missing"),
        (swap("more", np.zeros(3)), "more: not in the dense checkpoint"),
        (swap("f16.weight", np.zeros((24, 40), np.float16)), "f16.weight: not in the dense checkpoint"),
        (swap("f16.weight_scale", np.ones((24, 1), np.float32)), "f16.weight_scale: not in the dense"),
        (swap("f16.weight.scales24", np.ones((24, 1), np.float16)), "f16.weight.scales24: not in the dense"),
        (forget_all_layers, "holds no compressed layer"),
    ],
)
def test_what_was_changed_is_found_in_the_compressed_file(pair, change, complaint):
    dense, out = pair
    rewrite(out, change)
    found = verify_checkpoint(out, dense, device="host")
    assert not found.passed
    problems = [*found.problems, *(layer.problem for layer in found.layers if layer.problem)]
    assert any(complaint in problem for problem in problems)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (drop("f16.weight"), "the dense checkpoint lacks it"),
        (swap("f16.weight", random_array((24, 48), "f16")), r"the dense tensor is f16[24, 48]"),
        (swap("f16.weight", random_array((24, 40), "bf16")), r"the dense tensor is bf16[24, 40]"),
        (swap("f16.weight", np.zeros((24, 40), np.int32)), r"the dense tensor is i32[24, 40]"),
        (swap("f16.weight", random_array((24, 40), "f16", seed=1)), "differs from the pruned dense tensor"),
    ],
)
def test_what_does_not_match_is_found_in_the_dense_file(pair, change, complaint):
    dense, out = pair
    rewrite(dense, change)
    found = verify_checkpoint(out, dense, device="host")
    [bad] = [layer for layer in found.layers if not layer.passed]
    assert bad.name == "f16.weight"
    assert complaint in bad.problem
    assert bad.worst_ratio is None
    assert not found.passed


@pytest.mark.parametrize("wrong", [0.01, np.nan, np.inf])
def test_a_kernel_outside_its_guarantee_is_found(pair, monkeypatch, wrong):
    dense, out = pair
    from sparse24_plans.arithmetic import epilogue

    right = epilogue.apply_epilogue
    monkeypatch.setattr(epilogue, "apply_epilogue", lambda acc, *rest: right(acc + np.float32(wrong), *rest))
    found = verify_checkpoint(out, dense, device="host")
    [f32] = [layer for layer in found.layers if layer.element == "f32"]
    assert "times what the plan guarantees" in f32.problem
    assert not found.passed
    assert replace(f32, problem=None).passed
