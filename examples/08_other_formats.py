"""Other libraries' 2:4 formats: one weight into several, and a sharded compressed-tensors model into ours.

Needs no GPU and none of those libraries. From a shell, the second part is
`sparse24 convert MODEL OUT --from compressed_tensors --to sparse24`.
"""

import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from sparse24_plans import FormatError, Sparse24Weight, from_foreign, prune, to_foreign
from sparse24_plans.checkpoints.convert import convert_checkpoint
from sparse24_plans.checkpoints.safetensors_file import SafetensorsReader, SafetensorsWriter, TensorInfo
from sparse24_plans.checkpoints.weights_file import iter_weights
from sparse24_plans.formats.convert import FORMATS

rng = np.random.default_rng(0)

# One weight, every format that holds it ----------------------------------------------------------------

weight = Sparse24Weight.prune_compress(rng.standard_normal((128, 256), np.float32).astype(ml_dtypes.bfloat16))
for name, known in FORMATS.items():
    try:
        parts = to_foreign(name, weight)
    except FormatError as error:
        print(f"{name:18} {error}")
        continue
    shape = {"shape": (weight.m, weight.k)} if "shape" in known.options else {}
    back = from_foreign(name, parts, **shape)
    assert back.values.tobytes() == weight.values.tobytes()
    assert back.metadata.tobytes() == weight.metadata.tobytes()
    print(
        f"{name:18} {', '.join(f'{part} {array.dtype}{list(array.shape)}' for part, array in parts.items())}"
    )

# A sharded model -----------------------------------------------------------------------------------------


def write_model(folder: Path) -> dict[str, np.ndarray]:
    """Two shards and their index, as llm-compressor lays out a model; returns the dense weights."""
    folder.mkdir()
    weight_map, layers = {}, {}
    for i in range(2):
        name, shard = f"model.layers.{i}.mlp.up_proj", f"model-0000{i + 1}-of-00002.safetensors"
        dense = prune(rng.standard_normal((64, 128), np.float32).astype(ml_dtypes.bfloat16))
        parts = to_foreign("compressed_tensors", Sparse24Weight.compress(dense))
        types = {"compressed": "BF16", "bitmask": "U8", "shape": "I64"}
        infos = [
            TensorInfo(f"{name}.{part}", types[part], array.shape, array.nbytes)
            for part, array in parts.items()
        ]
        with SafetensorsWriter(folder / shard, infos, {"format": "pt"}) as writer:
            for part, array in parts.items():
                writer.write(f"{name}.{part}", array)
        weight_map |= {info.name: shard for info in infos}
        layers[f"{name}.weight"] = dense
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return layers


with tempfile.TemporaryDirectory() as scratch:
    model, ours, dense = (Path(scratch, name) for name in ("model", "ours", "dense"))
    layers = write_model(model)
    print()
    for report in convert_checkpoint(model, ours, from_format="compressed_tensors", to_format="sparse24"):
        print(f"{report.action} {report.name}: {report.bytes_before} -> {report.bytes_after} bytes")
    found = {
        name: weight for shard in sorted(ours.glob("*.safetensors")) for name, weight in iter_weights(shard)
    }
    assert all(found[name].decompress().tobytes() == layer.tobytes() for name, layer in layers.items())

    convert_checkpoint(ours, dense, from_format="sparse24", to_format="dense")
    for shard in sorted(dense.glob("*.safetensors")):
        with SafetensorsReader(shard) as reader:
            assert all(reader.read(name).tobytes() == layers[name].tobytes() for name in reader.tensors)
    print(f"and dense again: {', '.join(path.name for path in sorted(dense.iterdir()))}")
