"""The demo's second half: how accurate its encoder is on its own task after pruning by each method."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from ..checkpoints.compressed_form import compressed_form
from ..vocab import ElementKind
from ..weights.calibrated import METHODS, Rounding
from .minilm import Encoder
from .output import progress
from .tables import Column, Json, share_text, show_line, show_table

_FOLDER = Path(__file__).parent / "sentences"
_FORMS = {**{method: (method, None) for method in METHODS}, "sparsegpt, s4": ("sparsegpt", ElementKind.S4)}
"""The rows of the table: a method of calibration, and the stored element of quantized weights."""


def rounding_to(stored: ElementKind | str) -> Rounding:
    """How calibration quantizes the encoder's weights, by the defaults of ``sparse24 compress``."""
    found = compressed_form(None, stored, None, None).rounding(ElementKind.F32)
    assert found is not None
    return found


def sentences(name: str) -> list[str]:
    """The sentences ``"calibration"`` or ``"evaluation"``, which have none in common."""
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def measured(folder: Path, quiet: bool) -> Json:
    """Cosines between the embeddings of the dense and of the pruned encoder in ``folder``, by method."""
    encoder = Encoder(folder)
    samples, others = (
        [encoder.tokenizer.ids(text) for text in sentences(name)] for name in ("calibration", "evaluation")
    )
    dense = encoder.embed(others, encoder.weights)
    rows: list[Json] = []
    with progress("pruning the encoder", len(_FORMS), quiet) as advance:
        for name, (method, stored) in _FORMS.items():
            start = time.perf_counter()
            to = None if stored is None else rounding_to(stored)
            weights, errors = encoder.calibrated(samples, method, to)
            seconds = time.perf_counter() - start
            cosines = (encoder.embed(others, weights) * dense).sum(1)
            rows.append(
                {
                    "method": name,
                    "mean_cosine": float(cosines.mean()),
                    "worst_cosine": float(cosines.min()),
                    "mean_output_error": float(np.mean(errors)),
                    "seconds": seconds,
                }
            )
            advance(1)
    sizes = {"layers": len(errors), "sentences": len(others), "calibration_sentences": len(samples)}
    return {**sizes, "calibration_tokens": sum(map(len, samples)), "methods": rows}


def show_accuracy(found: Json | None) -> None:
    """Say what the verification left open, and show the accuracy, if the model has a task."""
    show_line(
        "This verified the arithmetic: products with the pruned weights. It says nothing about accuracy."
    )
    if found is None:
        show_line("Random weights have no task, so no accuracy can be shown: install the demo's model.")
        return
    show_line(
        f"Accuracy with {found['layers']} layers at 2:4: cosine of embeddings to the dense model's, over "
        f"{found['sentences']} sentences, calibrated on {found['calibration_sentences']} others:"
    )
    columns = (
        Column("method", "method"),
        Column("mean cosine", lambda row: f"{row['mean_cosine']:.2f}", right=True),
        Column("worst", lambda row: f"{row['worst_cosine']:.2f}", right=True),
        Column("output error of a layer", lambda row: share_text(row["mean_output_error"]), right=True),
    )
    show_table(columns, found["methods"])
    show_line("The compressed file is pruned by magnitude. compress --calibrate prunes by the others.")
