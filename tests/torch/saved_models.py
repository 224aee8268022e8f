"""Models in folders that several tests save, change and compare."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

TOKENS = torch.arange(8)[None]
INVARIANT = {"batch_invariant": True}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS.to(model.device)).logits.cpu()


def same_state(a: nn.Module, b: nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[key].cpu(), other[key].cpu()) for key in one)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def changed(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of the folder with other entries in its configuration."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    stored = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**stored, **changes}))
    return copy
