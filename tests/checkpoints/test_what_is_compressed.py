"""Which tensors of a dense checkpoint are compressed, which are copied, and why."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    InvalidProblemError,
)
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.selection import DEFAULT_EXCLUDE

from ..support import same_bits
from .models import (
    dense_file,
    library_load,
    random_array,
)


def mixed_model() -> dict[str, np.ndarray]:
    return {
        "embed_tokens.weight": random_array((64, 16)),
        "wte.weight": random_array((64, 16)),
        "layer.0.weight": random_array((24, 16)),
        "layer.1.weight": random_array((24, 16), "bf16"),
        "lm_head.weight": random_array((64, 16)),
        "norm": random_array((16,)),
        "conv": random_array((4, 2, 2, 8)),
        "scale": random_array(()),
        "odd": random_array((4, 12)),
        "empty": random_array((0, 16)),
        "ids": np.arange(16, dtype=np.int64).reshape(2, 8),
        "double": np.zeros((8, 8)),
        "mask": np.zeros((8, 8), np.bool_),
        "int8": np.zeros((8, 8), np.int8),
    }


ALWAYS_COPIED = {
    "norm": "1-d",
    "conv": "4-d",
    "scale": "0-d",
    "odd": "K=12 is not a multiple of 8",
    "empty": "empty",
    "ids": "element i64",
    "double": "element f64",
    "mask": "element bool",
    "int8": "element i8",
}


LAYERS = {"layer.0.weight": None, "layer.1.weight": None, "lm_head.weight": None}


BY_DEFAULT = {
    "embed_tokens.weight": "excluded by pattern '*embed*' (the default)",
    "wte.weight": "excluded by pattern '*wte.*' (the default)",
}


NOT_INCLUDED = dict.fromkeys(LAYERS, "not included")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), {**BY_DEFAULT, **LAYERS}),
        ((), ("lm_*",), {**BY_DEFAULT, **LAYERS, "lm_head.weight": "excluded by pattern 'lm_*'"}),
        (("layer.*",), (), {**BY_DEFAULT, **LAYERS, "lm_head.weight": "not included"}),
        (("embed*",), (), {**BY_DEFAULT, **NOT_INCLUDED, "embed_tokens.weight": None}),
        (("*",), (), dict.fromkeys((*BY_DEFAULT, *LAYERS))),
        (
            ("*.weight",),
            ("layer.[1-9].*", "*embed*"),
            {
                **LAYERS,
                "wte.weight": None,
                "embed_tokens.weight": "excluded by pattern '*embed*'",
                "layer.1.weight": "excluded by pattern 'layer.[1-9].*'",
            },
        ),
    ],
    ids=["default", "exclude", "include", "include an embedding", "include all", "exclude wins"],
)
def test_which_tensors_are_compressed(files, include, exclude, expected):
    source, out = files
    arrays = dense_file(source, mixed_model())
    seen: list[Any] = []
    reports = compress_checkpoint(source, out, include=include, exclude=exclude, on_tensor=seen.append)
    assert reports == seen
    assert {report.name: report.reason for report in reports} == {**ALWAYS_COPIED, **expected}
    stored, _ = library_load(out)
    for report in reports:
        dense = arrays[report.name]
        assert (report.shape, report.bytes_before) == (dense.shape, dense.nbytes)
        parts = (f"{report.name}.values24", f"{report.name}.meta24")
        if report.reason is None:
            assert report.action == "compressed"
            assert 0.5 < report.kept_energy < 1
            assert report.bytes_after == sum(stored.pop(part).nbytes for part in parts)
        else:
            assert (report.action, report.kept_energy) == ("copied", None)
            assert report.bytes_after == report.bytes_before
            assert same_bits(stored.pop(report.name), dense)
    assert stored == {}


@pytest.mark.parametrize("pattern", DEFAULT_EXCLUDE)
def test_the_default_exclusion_can_be_overridden(files, pattern):
    source, out = files
    name = f"model{pattern.replace('*', '.')}weight"
    dense_file(source, {name: random_array((8, 8))})
    assert compress_checkpoint(source, out)[0].action == "copied"
    assert compress_checkpoint(source, out, include=[name])[0].action == "compressed"


def test_a_type_that_nobody_knows_is_copied(files):
    source, out = files
    header = json.dumps({"new": {"dtype": "F3", "shape": [8, 8], "data_offsets": [0, 24]}}).encode()
    source.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(24)))
    [report] = compress_checkpoint(source, out)
    assert (report.action, report.reason) == ("copied", "element f3")
    assert out.read_bytes().endswith(bytes(range(24)))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"include": ["typo*"]}, r"include: pattern 'typo\*' matches no tensor"),
        ({"exclude": ["typo"]}, "exclude: pattern 'typo' matches no tensor"),
        ({"include": "w"}, "include: expected a sequence of patterns, got 'w'"),
    ],
)
def test_patterns_that_cannot_be_meant(files, options, complaint):
    source, out = files
    dense_file(source, {"w": random_array((8, 8))})
    with pytest.raises(InvalidProblemError, match=complaint):
        compress_checkpoint(source, out, **options)
    assert not out.exists()
