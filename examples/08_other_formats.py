"""Convert one weight to other libraries' 2:4 formats, and a sharded compressed-tensors model to ours.

This example needs no GPU and none of those libraries. From a shell, the second part is
`sparse24 convert MODEL OUT --from compressed_tensors --to sparse24`.
"""

import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from sparse24_plans import (
    FormatError,
    Sparse24Weight,
    convert_checkpoint,
    from_foreign,
    iter_weights,
    prune,
    to_foreign,
)

rng = np.random.default_rng(0)

# One weight, every format that holds it ----------------------------------------------------------------

weight = Sparse24Weight.prune_compress(rng.standard_normal((128, 256), np.float32).astype(ml_dtypes.bfloat16))
shape = weight.m, weight.k
FORMATS = {
    "baracuda": None,
    "torch_cutlass": None,
    "cutlass_sm90": None,
    "tilelang": None,
    "torch_tile": shape,
    "cusparselt_sm80": shape,
    "cusparselt_sm90": shape,
    "compressed_tensors": None,
}
"""The shape of each format whose packed form does not give it; None for the others."""
for name, told in FORMATS.items():
    try:
        parts = to_foreign(name, weight)
    except FormatError as error:
        print(f"{name:18} {error}")
        continue
    back = from_foreign(name, parts, shape=told)
    assert back.values.tobytes() == weight.values.tobytes()
    assert back.metadata.tobytes() == weight.metadata.tobytes()
    print(
        f"{name:18} {', '.join(f'{part} {array.dtype}{list(array.shape)}' for part, array in parts.items())}"
    )

# A sharded model -----------------------------------------------------------------------------------------


def write(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """A safetensors file: the length of a JSON header, the header, the bytes."""
    header, end = {}, 0
    for name, (dtype, array) in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for _, array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(path: Path) -> dict[str, bytes]:
    """Every tensor's bytes."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    header.pop("__metadata__", None)
    spans = {name: about["data_offsets"] for name, about in header.items()}
    return {name: raw[begin + start : begin + end] for name, (start, end) in spans.items()}


def write_model(folder: Path) -> dict[str, np.ndarray]:
    """Two shards and their index, as llm-compressor lays out a model; returns the dense weights."""
    folder.mkdir()
    weight_map: dict[str, str] = {}
    layers: dict[str, np.ndarray] = {}
    for i in range(2):
        name, shard = f"model.layers.{i}.mlp.up_proj", f"model-0000{i + 1}-of-00002.safetensors"
        dense = prune(rng.standard_normal((64, 128), np.float32).astype(ml_dtypes.bfloat16))
        parts = to_foreign("compressed_tensors", Sparse24Weight.compress(dense))
        types = {"compressed": "BF16", "bitmask": "U8", "shape": "I64"}
        tensors = {f"{name}.{part}": (types[part], np.asarray(array)) for part, array in parts.items()}
        write(folder / shard, tensors)
        weight_map |= dict.fromkeys(tensors, shard)
        layers[f"{name}.weight"] = dense
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return layers


with tempfile.TemporaryDirectory() as scratch:
    model, ours, dense = (Path(scratch, name) for name in ("model", "ours", "dense"))
    layers = write_model(model)
    print()
    for report in convert_checkpoint(model, ours, from_format="compressed_tensors", to_format="sparse24"):
        print(f"{report.action} {report.name}: {report.bytes_before} -> {report.bytes_after} bytes")
    found = dict(iter_weights(ours))
    assert all(found[name].decompress().tobytes() == layer.tobytes() for name, layer in layers.items())

    convert_checkpoint(ours, dense, from_format="sparse24", to_format="dense")
    for shard in sorted(dense.glob("*.safetensors")):
        assert all(data == layers[name].tobytes() for name, data in read(shard).items())
    print(f"and dense again: {', '.join(path.name for path in sorted(dense.iterdir()))}")
