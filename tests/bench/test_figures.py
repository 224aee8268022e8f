"""Tables of figures in documents are what the records say."""

from __future__ import annotations

import re

import pytest

from benchmarks import figures, table_format

from .records import RESULTS, ROOT, record

DOCUMENTS = figures.documents(ROOT)
PAGES = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if path.name != "CHANGELOG.md"]
WRITTEN = re.compile(r"<!-- figures: .*?<!-- end -->|^```.*?^```", re.DOTALL | re.MULTILINE)
TYPED = re.compile(r"\b\d[\d.]*(?: (?:[num]s|[GT]B/s|T?FLOPS|tokens/s)\b|x? (?:as fast|faster|slower))")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_agree_with_the_record(path):
    text = path.read_text()
    assert figures.rendered(text, figures.everything(ROOT)) == text, "python -m benchmarks.figures"


def test_every_table_stands_in_a_document():
    texts = [path.read_text() for path in DOCUMENTS]
    assert all(any(f"<!-- figures: {name} -->" in text for text in texts) for name in figures.TABLES)
    assert {path.name for path in DOCUMENTS} >= {"README.md", "preparing.md"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_measured_figure_is_typed_by_hand(path):
    """Times, rates and speed-ups stand in the tables that are written from records, and nowhere else."""
    text = WRITTEN.sub("", path.read_text())
    assert [found.group() for found in TYPED.finditer(text)] == []


def test_a_table_is_replaced_and_nothing_else():
    old = "before\n<!-- figures: host -->\n| 1 |\n<!-- end -->\nafter\n"
    new = figures.rendered(old, {"host": {"launch_us": 4.56, "import_s": 0.25}})
    lines = new.splitlines()
    assert (lines[:2], lines[-2:]) == (["before", "<!-- figures: host -->"], ["<!-- end -->", "after"])
    assert "|`launch`|4.6 us|" in lines
    assert "|`import sparse24_plans`|250.0 ms|" in lines
    assert "|`run`, new arguments|-|" in lines, "what is not measured"
    assert figures.rendered(new, {"host": {"launch_us": 4.56, "import_s": 0.25}}) == new


def test_a_table_that_is_not_known():
    with pytest.raises(KeyError):
        figures.rendered("<!-- figures: typo -->\n<!-- end -->", {})


def test_the_table_of_products_has_each_gpu_with_a_record():
    first = record("h200.json")
    other = {**first, "gpu": "NVIDIA Other 80GB"}
    one, both = (
        figures.TABLES["products"]({"records": records})
        for records in ({"h200.json": first}, {"h200.json": first, "h100.json": other})
    )
    assert [line.count("over cuSPARSELt") for line in (one[0], both[0])] == [1, 2]
    assert "H200: over dense" in one[0]
    assert "Other: over dense" in both[0]
    for line, wider in zip(one[2:], both[2:], strict=True):
        n, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert [cell.strip() for cell in wider.strip("|").split("|")] == [n, *cells, *cells]


def test_the_table_of_systems_has_every_record():
    text = "\n".join(figures.TABLES["systems"](figures.everything(ROOT)))
    names = [path.name for path in sorted(RESULTS.glob("*.json"))]
    assert {"h200.json", "h200-tests.json"} <= set(names)
    assert text.splitlines()[0] == f"|  | {' | '.join(f'`{name}`' for name in names)} |"
    for name in names:
        assert record(name)["driver"] in text
        assert all(version in text for version in record(name)["versions"].values())


def test_compile_times_are_of_each_kernel_and_source():
    about = {"kernel": "mma_sp", "source": "gemm/mma_sp.cu", "nbytes": 20_000, "cached_ms": 0.5}
    rows = [{**about, "seconds": seconds} for seconds in (1.0, 2.0, 6.0)]
    other = {**about, "kernel": "pack", "source": "prepare/pack.cu", "seconds": 0.25}
    found = {"records": {figures.COMPILE_RECORD: {"compile": [*rows, other]}}}
    assert figures.TABLES["compilation"](found)[2:] == [
        "| `mma_sp` | `gemm/mma_sp.cu` | 3 | 2.0 s (1.0 to 6.0) | 0.5 ms | 20 kB |",
        "| `pack` | `prepare/pack.cu` | 1 | 0.2 s (0.2 to 0.2) | 0.5 ms | 20 kB |",
    ]
    assert figures.TABLES["compilation"]({"records": {}}) == [], "no record, no table"


STEP = {
    "kind": "decode",
    "n": 8,
    "tokens": 1,
    "weights": "bf16",
    "gpus": 2,
    "graph_dense_ms": 3.0,
    "graph_sparse_ms": 2.0,
    "graph_invariant_ms": 2.5,
    "eager_dense_ms": 9.0,
    "eager_sparse_ms": 10.0,
    "compiled_dense_ms": None,
    "compiled_sparse_ms": None,
}
HOST = {
    "f_linear_us": 10.0,
    "sparse_linear_us": 12.5,
    "torch_sparse_us": None,
    "compiled_dense_us": 20.0,
    "compiled_sparse_us": 19.0,
}


def torch_tables(**parts: object) -> dict[str, list[str]]:
    """Return the tables of an end-to-end record of PyTorch with these parts."""
    found = {"records": {figures.TORCH_RECORD: {"host": {}, "decoder": [], **parts}}}
    return {name: figures.TABLES[name](found) for name in ("torch_host", "decoder")}


def test_steps_of_a_decoder_are_over_dense():
    prefill = {**STEP, "kind": "prefill", "n": 1, "tokens": 2048, "gpus": 1}
    prefill |= {"compiled_dense_ms": 2.8, "compiled_sparse_ms": 2.0}
    head, _, *rows = torch_tables(decoder=[STEP, prefill])["decoder"]
    assert head == (
        "| step | weights | GPUs | dense | sparse | speed-up | captured | batch-invariant | eager |"
    )
    assert rows == [
        "| decode, n 8 | `bf16` | 2 | - | - | - | 1.50 | 1.20 | 0.90 |",
        "| prefill of 2048 | `bf16` | 1 | 2.80 ms | 2.00 ms | 1.40 | 1.50 | 1.20 | 0.90 |",
    ]


def test_pytorch_host_time_is_over_dense_call_of_its_kind():
    assert torch_tables(host=HOST)["torch_host"][2:] == [
        "| `F.linear`, dense | 10.0 us | 1.00 |",
        "| `Sparse24Linear` | 12.5 us | 1.25 |",
        "| PyTorch's own semi-structured tensor | - | - |",
        "| compiled, dense | 20.0 us | 1.00 |",
        "| compiled, `Sparse24Linear` | 19.0 us | 0.95 |",
    ]


def test_8_bit_layers_are_listed_with_their_parts():
    row = {"m": 64, "k": 32, "n": 16, "dtype": "fp8", "linear_us": 5.24, "quantize_us": 1.2, "layer_us": 6.5}
    found = {"records": {figures.LAYERS_RECORD: {"layers": [{**row, "dense_us": 13.0}]}}}
    assert figures.TABLES["layers"](found)[2:] == [
        "| 64 x 32 | fp8 | 16 | 5.2 us | 1.2 us | 6.5 us | 13.0 us | 2.00 |"
    ]
    assert figures.TABLES["layers"]({"records": {}}) == []


def test_what_was_not_measured_in_pytorch_has_no_table():
    assert torch_tables() == {"torch_host": [], "decoder": []}
    assert [figures.TABLES[name]({"records": {}}) for name in ("torch_host", "decoder")] == [[], []]


def product(backend: str, us: float, m: int = 8) -> dict:
    about = {"m": m, "k": 8, "n": 16, "element": "bf16", "backend": backend}
    return {**about, "us": us, "dense_us": 12.0, "cusparselt_us": None}


def test_ratios_are_of_what_select_chose_for_each_shape():
    found = {"gemm": [product("auto", 6.0), product("invariant", 9.0), product("auto", 3.0, 64)]}
    assert figures.ratios(found, "bf16", 16, peer="dense_us") == [2.0, 4.0]
    assert figures.ratios(found, "bf16", 16, peer="cusparselt_us") == []
    assert figures.ratios(found, "bf16", 16, backend="invariant") == [1.5]
    assert figures.ratios(found, "bf16", 8, peer="dense_us") == []


def test_energy_is_power_times_time():
    own = {**product("auto", 100.0, 8192), "k": 8192, "n": 2048, "watts": 600, "sm_mhz": 1500}
    own |= {"dense_us": 150.0, "dense_watts": 700, "cusparselt_us": 110.0, "cusparselt_watts": 600}
    other = {**own, "m": 64, "dense_us": 300.0, "cusparselt_us": None, "cusparselt_watts": None}
    unknown = {**own, "m": 72, "watts": None}
    assert figures.TABLES["energy"]({"gemm": [own, other, unknown]})[2:] == [
        "| bf16 | 2048 | 60 mJ | 600 W | 1500 MHz | 2.47 (1.75-3.50) | 1.10 (1.10-1.10) |"
    ]


def test_cell_of_table_has_geometric_mean_and_range():
    assert table_format.with_range([2.0, 8.0]) == "4.00 (2.00-8.00)"
    assert table_format.with_range([]) == table_format.mean([]) == table_format.ratio(None) == "-"


@pytest.mark.parametrize("arguments", [("--typo",), ("--check", "--check")])
def test_wrong_usage(arguments):
    with pytest.raises(SystemExit, match="usage"):
        figures.main(*arguments)


def test_the_command_writes_and_checks(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / figures.RECORD).write_text((ROOT / figures.RECORD).read_text())
    (tmp_path / "README.md").write_text("<!-- figures: host -->\n<!-- end -->\n")
    monkeypatch.chdir(tmp_path)
    assert figures.main("--check") == 1
    assert (tmp_path / "README.md").read_text().count("\n") == 2, "a check writes nothing"
    assert figures.main() == 0
    assert figures.main("--check") == 0
    assert "README.md" in capsys.readouterr().out
