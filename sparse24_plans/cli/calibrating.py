"""``sparse24 compress --calibrate``: prunes a model of transformers by what its layers' inputs are.

PyTorch and transformers are imported when they are needed.
"""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..checkpoints.compress import COMPRESSED_DTYPES, CalibratedWeights
from ..checkpoints.folder import ModelReader
from ..checkpoints.selection import Selection
from ..device.files import new_folder_at, read_whole, storage_errors
from ..errors import BackendUnavailableError, FormatError, InvalidProblemError
from ..weights.calibrated import METHODS
from ..weights.cutting import slice_weight
from .options import word_option
from .tables import Column, Json, share_text

OUTPUT_ERROR = Column("output error", lambda row: share_text(row["output_error"]), right=True)
_MAX_BYTES = 1 << 30
_LONGEST_SAMPLE, _BATCH_TOKENS = 2048, 8192
"""Tokens of a sample, which is cut if it is longer, and of the samples of one length that run together."""

CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="FILE",
        help="Prune by what the layers' inputs are for these samples: a text with one a line, lists of token "
        "ids (.json), an array of them (.npy), or a folder of such files. CKPT must be a folder that "
        "transformers can load. An interrupted run goes on after its last layer.",
    ),
]
MethodOption = Annotated[
    str | None,
    word_option("--method", known=METHODS[:0:-1], meaning="How --calibrate prunes: sparsegpt by default."),
]


@dataclass(frozen=True)
class Calibration:
    """The pruned weights, their output errors by names of tensors, and the folder of finished blocks."""

    weights: CalibratedWeights
    errors: dict[str, float]
    tokens: int
    folder: Path

    def finish(self, document: Json) -> None:
        """Add the results to the command's document, and remove the folder, because OUT is written."""
        document["calibration"] = {"method": self.weights.method, "tokens": self.tokens}
        for row in document["tensors"]:
            if row["action"] == "compressed":
                row["output_error"] = self.errors[row["name"]]
        shutil.rmtree(self.folder, ignore_errors=True)


def calibration(
    source: Path,
    samples: Path,
    out: Path,
    method: str,
    device: int | str | None,
    include: Sequence[str],
    exclude: Sequence[str],
    quiet: bool,
    **quantized: Any,
) -> Calibration:
    """Load and prune the model, and name its weights. ``quantized`` are arguments of ``calibrate``."""
    try:
        import torch
        import transformers

        from ..torch import calibrate
        from ..torch.calibrated_names import homes_of, matrix_of, parts_by_tensor, whole_parts
    except ImportError as error:
        raise BackendUnavailableError(
            f"--calibrate needs PyTorch and transformers: pip install torch transformers ({error})"
        ) from error
    new_folder_at(out)  # before hours of calibration
    with ModelReader(source) as reader:
        selected = {layer.name for layer in Selection(include, exclude, COMPRESSED_DTYPES).split(reader)[0]}
        shapes = {name: info.shape for name, info in reader.tensors.items()}
    if quiet:
        logging: Any = transformers.utils.logging
        logging.disable_progress_bar()
    model, known = _loaded(transformers, source)
    token_ids = _samples(samples, partial(_tokenized, transformers, source), model, known)
    parts = whole_parts(parts_by_tensor(model, shapes), selected)
    tokens = sum(map(len, token_ids))
    widest = max((matrix_of(model, part).shape[1] for part in parts.values()), default=0)
    if tokens < widest:
        warnings.warn(f"{tokens} calibration tokens are few for layers with {widest} inputs", stacklevel=1)
    cuda = torch.cuda.is_available() if device is None else device != "host"
    place = "cpu" if not cuda else "cuda" if device is None else f"cuda:{device}"
    folder = Path(f"{out}.calibration")
    report = calibrate(
        model,
        [{"input_ids": torch.tensor(batch)} for batch in _batches(token_ids)],
        method=method,
        exclude=sorted(homes_of(model) - {part.home for part in parts.values()}),
        device=place,
        resume=folder,
        progress=False if quiet else None,
        **quantized,
    )
    layers = {layer.name: layer for layer in report.layers}
    done = {name: part for name, part in parts.items() if part.weight in layers}
    errors = {name: layers[part.weight].output_error for name, part in done.items()}
    read = {
        name: partial(_weight, layers[part.weight], part.rows, partial(matrix_of, model, part))
        for name, part in done.items()
    }
    return Calibration(CalibratedWeights(method, read), errors, tokens, folder)


def _weight(layer: Any, rows: slice, read: Callable[[], Any]) -> Any:
    """Rows of the layer's quantized weight, or of its dense one as an array."""
    if layer.weight is None:
        return np.asarray(read().float().cpu())
    start, stop, _ = rows.indices(layer.weight.m)
    return slice_weight(layer.weight, start, stop)


_LOADING_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError)
"""Errors that transformers raises for files that it can't load."""


def _loaded(transformers: Any, source: Path) -> tuple[Any, int]:
    """The model of a folder, on the CPU, and the number of token ids that it knows."""
    if not source.is_dir():
        raise InvalidProblemError(f"transformers can't load {source}: expected a folder with its config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        kind = getattr(transformers, str((config.architectures or [""])[0]), transformers.AutoModel)
        model = kind.from_pretrained(source, dtype="auto")
    except _LOADING_ERRORS as error:
        raise InvalidProblemError(f"transformers can't load {source}: {_first_line(error)}") from error
    with suppress(NotImplementedError):  # which models without an embedding raise
        known = getattr(model.get_input_embeddings(), "num_embeddings", None)  # pixels' embedding has none
        if known is not None and not config.is_encoder_decoder:
            return model, known
    raise InvalidProblemError(
        f"expected a model of one stack that takes token ids in {source}, got {kind.__name__}"
    )


def _tokenized(transformers: Any, source: Path, lines: list[str]) -> Any:
    """The token ids of each line, by the tokenizer of a model's folder.

    Without a vocabulary transformers makes some tokenizers that know no word, which is refused, too.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except _LOADING_ERRORS as error:
        raise InvalidProblemError(
            f"--calibrate: expected lists of token ids, because transformers can't load a tokenizer from "
            f"{source}, got text: {_first_line(error)}"
        ) from error
    ids = tokenizer(lines)["input_ids"]
    special = set(tokenizer.all_special_ids)
    if all(one in special for line in ids for one in line):
        raise InvalidProblemError(
            f"--calibrate: expected a text with words of {source}'s tokenizer, got none that it knows"
        )
    return ids


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]


def _samples(path: Path, tokenized: Callable[[list[str]], Any], model: Any, known: int) -> list[list[int]]:
    """Token ids below ``known`` of every sample of a file or folder, in pieces that the model can take."""
    with storage_errors(path):
        files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
    found: list[list[int]] = []
    for file in files:
        raw = read_whole(file, _MAX_BYTES)
        lines: list[str] = []
        ids: Any = []
        try:
            if file.suffix == ".json":
                ids = json.loads(raw)
            elif file.suffix == ".npy":
                ids = np.load(io.BytesIO(raw), allow_pickle=False).tolist()
            else:
                lines = [line for line in raw.decode().splitlines() if line.strip()]
        except (ValueError, EOFError, OSError, RecursionError) as error:
            raise FormatError(f"{file}: expected text in UTF-8 or token ids: {error}") from error
        if lines:
            ids = tokenized(lines)
        if not (isinstance(ids, list) and all(_are_ids(one, known) for one in ids)):
            raise FormatError(f"{file}: expected lists of token ids from 0 to {known - 1}")
        found += ids
    limit = min(_LONGEST_SAMPLE, getattr(model.config, "max_position_embeddings", None) or _LONGEST_SAMPLE)
    pieces = [one[start : start + limit] for one in found for start in range(0, len(one), limit)]
    if not pieces:
        raise InvalidProblemError(f"--calibrate: expected samples, got none in {path}")
    return pieces


def _are_ids(sample: object, known: int) -> bool:
    return isinstance(sample, list) and all(type(one) is int and 0 <= one < known for one in sample)


def _batches(samples: list[list[int]]) -> list[list[list[int]]]:
    """Samples of one length together, so that none needs padding."""
    batches = []
    for length, group in groupby(sorted(samples, key=len), key=len):
        same, step = list(group), max(1, _BATCH_TOKENS // length)
        batches += [same[start : start + step] for start in range(0, len(same), step)]
    return batches
