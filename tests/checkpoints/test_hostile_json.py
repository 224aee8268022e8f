"""Documents that anything may stand in: what reads them gives a result or a typed error, and nothing else.

The index and the configuration of a model, the header of a safetensors file, tuning tables, records.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import Sparse24Error, TuningTable
from sparse24_plans.bench import record
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.verify import verify_checkpoint
from sparse24_plans.checkpoints.weights_file import iter_weights

from .models import INDEX, convert, dense_file, random_array, sharded_model, tiled

TABLES = Path(record.__file__).parents[1] / "tuning" / "tables"
RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"

NASTY = st.sampled_from(["", "\ud800", "a\0b", "../x", "\x1b[2J", "x" * 300, "nan", "1e999", "F3", "bf16"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | NASTY
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NASTY | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the places where another value may be put."""
    yield path
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document[:3])
        if isinstance(document, list)
        else ()
    )
    for key, value in items:
        yield from places(value, (*path, key))


@st.composite
def mutated(draw: Any, document: Any) -> Any:
    """The document with one or two of its parts replaced, removed or renamed."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(places(changed))))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(VALUES)
            continue
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        how = draw(st.sampled_from(["replace", "remove", "rename"]))
        if how == "replace" or isinstance(parent, list):
            parent[path[-1]] = draw(VALUES)
        else:
            value = parent.pop(path[-1])
            if how == "rename":
                parent[draw(NASTY)] = value
    return changed


def typed(attempt: Callable[[], Any]) -> None:
    try:
        attempt()
    except Sparse24Error as error:
        str(error).encode()


def shorter(document: dict[str, Any], *lists: str) -> dict[str, Any]:
    return {**document, **{name: document[name][:2] for name in lists}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    sharded_model(folder)
    return folder


@settings(max_examples=10)
@given(data=st.data())
@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_the_documents_of_a_model(model, name, data):
    document = data.draw(mutated(json.loads((model / name).read_text())))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        folder.mkdir()
        for path in model.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / name).write_text(json.dumps(document))
        typed(lambda: convert(folder, Path(place) / "out", "compressed_tensors", "dense"))
        typed(lambda: compress_checkpoint(folder, Path(place) / "out2", device="host"))
        assert not list(Path(place).glob(".sparse24*"))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    dense, ours, theirs = (folder / name for name in ("dense", "sparse24", "tilelang"))
    dense_file(dense, {"a.weight": tiled((16, 32), "f16"), "norm": random_array((8,))})
    compress_checkpoint(dense, ours, device="host")
    convert(ours, theirs, "sparse24", "tilelang")
    return [dense, ours, theirs]


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("which", [0, 1, 2], ids=["dense", "sparse24", "tilelang"])
def test_the_header_of_a_file(files, which, data):
    content = files[which].read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for key, text in list(header.get("__metadata__", {}).items()):
        if key.startswith("sparse24."):
            header["__metadata__"][key] = json.dumps(data.draw(mutated(json.loads(text))))
    raw = json.dumps(data.draw(mutated(header))).encode()
    with tempfile.TemporaryDirectory() as place:
        path, out = Path(place) / "file", Path(place) / "out"
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + length :])
        typed(lambda: list(iter_weights(path)))
        typed(lambda: compress_checkpoint(path, out, device="host"))
        typed(lambda: verify_checkpoint(path, files[0], device="host", tokens=1))
        typed(lambda: verify_checkpoint(files[1], path, device="host", tokens=1))
        for known in ("sparse24", "tilelang", "dense"):
            typed(
                lambda known=known: convert(
                    path, out, known, "torch_cutlass" if known != "dense" else "sparse24"
                )
            )
        assert not list(Path(place).glob(".sparse24*"))


TABLE = shorter(json.loads(next(iter(TABLES.glob("*.json"))).read_text()), "entries")
RECORD = shorter(
    json.loads((RECORDS / "h200.json").read_text()),
    *("gemm", "epilogues", "variants", "prepare", "prepare_peers"),
)


@given(data=st.data())
@pytest.mark.parametrize(
    ("load", "document"), [(TuningTable.load, TABLE), (record.load, RECORD)], ids=["table", "record"]
)
def test_tables_and_records(load, document, data):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "file.json"
        path.write_text(json.dumps(data.draw(mutated(document))))
        typed(lambda: load(path))


@pytest.mark.parametrize("to_format", ["dense", "compressed_tensors", "cutlass_sm90"])
def test_rows_without_columns_cost_nothing_however_many_a_file_claims(tmp_path, to_format):
    rows = 2**40
    note = json.dumps({"shape": [rows, 0], "element": "bf16"})
    empty = {"shape": [rows, 0], "data_offsets": [0, 0]}
    header = {
        "__metadata__": {"sparse24_format": "1", "sparse24.w.weight": note},
        "w.weight.values24": {"dtype": "BF16", **empty},
        "w.weight.meta24": {"dtype": "U16", **empty},
    }
    text = json.dumps(header).encode()
    source = tmp_path / "ours"
    source.write_bytes(len(text).to_bytes(8, "little") + text)
    started = time.process_time()
    [(name, weight)] = iter_weights(source)
    assert (name, weight.m, weight.k) == ("w.weight", rows, 0)
    [report] = convert(source, tmp_path / "out", "sparse24", to_format)
    assert report.action == "converted"
    assert time.process_time() - started < 5
