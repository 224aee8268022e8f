"""``calibrate`` goes on after the blocks that a folder holds, and refuses files that are not of its run."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from sparse24_plans import FormatError, InvalidProblemError, StorageError
from sparse24_plans.torch import calibrate, calibrated_block

from .calibration_cases import inputs, stack, token_batches, transformer
from .saved_models import same_state


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interrupted_run_goes_on_after_its_last_block(name, dtype, tmp_path, monkeypatch):
    whole = transformer(name).to(dtype)
    expected = calibrate(whole, token_batches())

    original, started = calibrated_block.Block.prune, []

    def interrupted(self, *args):
        started.append(self)
        if len(started) == 2:
            raise KeyboardInterrupt
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(calibrated_block.Block, "prune", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calibrate(transformer(name).to(dtype), token_batches(), resume=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["block-0000.safetensors"]

    groups: list[int] = []
    together = calibrated_block.pruned_together
    monkeypatch.setattr(
        calibrated_block, "pruned_together", lambda *given: groups.append(1) or together(*given)
    )
    resumed = transformer(name).to(dtype)
    report = calibrate(resumed, token_batches(), resume=tmp_path / "run")
    assert len(groups) == 4 * (len(list((tmp_path / "run").iterdir())) - 1)  # the first block is read
    assert same_state(resumed, whole)
    assert report == expected


def change_batches(options):
    options["batches"] = token_batches(seed=9)


def change_model(options):
    options["model"] = transformer("BertModel", seed=5)


def change_method(options):
    options["method"] = "wanda"


def change_layers(options):
    options["exclude"] = ["*query"]


def change_stored(options):
    options["weights"] = "s8"


@pytest.mark.parametrize(
    "change", [change_batches, change_model, change_method, change_layers, change_stored]
)
def test_files_of_another_run_are_refused(change, tmp_path):
    calibrate(transformer("BertModel"), token_batches(), resume=tmp_path)
    options = {"model": transformer("BertModel"), "batches": token_batches(), "resume": tmp_path}
    change(options)
    before = copy.deepcopy(options["model"])
    with pytest.raises(
        InvalidProblemError, match="resume: expected blocks of this model, batches and method"
    ):
        calibrate(**options)
    assert same_state(before, options["model"])


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_broken_file_is_refused(cut, tmp_path):
    calibrate(stack(), inputs(), resume=tmp_path)
    file = tmp_path / "block-0002.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(FormatError, match=re.escape(str(file))):
        calibrate(stack(), inputs(), resume=tmp_path)


def test_folder_that_cannot_be_made_is_error_of_storage(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        calibrate(stack(), inputs(), resume=tmp_path / "file" / "folder")
