"""The demo's sentence encoder, a BERT, in NumPy: its tokenizer, its forward pass, and its calibration."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints.folder import ModelReader
from ..vocab import ElementKind
from ..weights.calibrated import Rounding, output_error, pruned_together, quantized_together

Array = np.ndarray[Any, Any]
See = Callable[[list[str], Array], None]
"""Called with the names of the layers that take an input, and the input [N, K], before they are run."""

_LONGEST_WORD = 100
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""Coefficients of erf by Abramowitz and Stegun, 7.1.26, whose error is at most 1.5e-7."""


class WordPiece:
    """BERT's tokenizer without case: words and marks, each cut into the longest pieces of a vocabulary."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self._ids = {piece: index for index, piece in enumerate(vocabulary)}

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, with [CLS] before and [SEP] after them."""
        plain = unicodedata.normalize("NFD", text.lower())
        spaced = "".join(_spaced(one) for one in plain if unicodedata.category(one) != "Mn")
        pieces = [piece for word in spaced.split() for piece in self._pieces(word)]
        return [self._ids[piece] for piece in ("[CLS]", *pieces, "[SEP]")]

    def _pieces(self, word: str) -> list[str]:
        found: list[str] = []
        rest = word if len(word) <= _LONGEST_WORD else ""
        while rest:
            mark = "##" if found else ""
            sizes = range(len(rest), 0, -1)
            size = next((size for size in sizes if mark + rest[:size] in self._ids), 0)
            if not size:
                return ["[UNK]"]
            found.append(mark + rest[:size])
            rest = rest[size:]
        return found or ["[UNK]"]


def _spaced(one: str) -> str:
    """A character, apart from its neighbours if it is a word of its own; nothing for a control character."""
    kind = unicodedata.category(one)
    if one.isspace():
        return " "
    if kind.startswith("C") or one == "\ufffd":
        return ""
    is_mark = kind.startswith("P") or (one.isascii() and not one.isalnum())
    return f" {one} " if is_mark or 0x4E00 <= ord(one) <= 0x9FFF else one


class Encoder:
    """A BERT that embeds sentences: the mean of the last layer's tokens, normalised. All is float32.

    ``folder`` holds model.safetensors, config.json and vocab.txt. Samples are lists of token ids. ``weights``
    are the tensors by name, or others in their place.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self._heads, self._epsilon = config["num_attention_heads"], config["layer_norm_eps"]
        self._layers = range(config["num_hidden_layers"])
        self.tokenizer = WordPiece((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())
        with ModelReader(folder / "model.safetensors") as model:
            self.weights: dict[str, Array] = {
                name: model.read(name).view(ElementKind.F32.dtype).reshape(info.shape)
                for name, info in model.tensors.items()
                if info.dtype == "F32"
            }

    def embed(self, samples: Sequence[list[int]], weights: Mapping[str, Array]) -> Array:
        """Embeddings [samples, width], each of norm 1."""
        hidden = self._embedded(samples, weights)
        for layer in self._layers:
            hidden = self._layer(layer, hidden, samples, weights)
        means = np.stack([hidden[part].mean(0) for part in _parts(samples)])
        embeddings: Array = means / np.linalg.norm(means, axis=1, keepdims=True)
        return embeddings

    def calibrated(
        self, samples: Sequence[list[int]], method: str, to: Rounding | None = None
    ) -> tuple[dict[str, Array], list[float]]:
        """The weights with the layers' pruned to 2:4, in order, and the relative errors of their outputs.

        ``to`` says how they are quantized, too.
        """
        weights = dict(self.weights)
        errors = []

        def prune(names: list[str], x: Array) -> None:
            moment = x.T @ x
            dense = [weights[f"{name}.weight"] for name in names]
            if to is None:
                changed = pruned_together(dense, moment, method)
            else:
                quantized = quantized_together(dense, moment, method, to)
                changed = [one.decompress().astype(np.float32) for one in quantized]
            for name, before, after in zip(names, dense, changed, strict=True):
                weights[f"{name}.weight"] = after
                errors.append(output_error(before, after, moment))

        hidden = self._embedded(samples, weights)
        for layer in self._layers:
            hidden = self._layer(layer, hidden, samples, weights, prune)
        return weights, errors

    def _embedded(self, samples: Sequence[list[int]], weights: Mapping[str, Array]) -> Array:
        words, places, kinds = (
            weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")
        )
        positions = np.concatenate([np.arange(len(sample)) for sample in samples])
        total = words[np.concatenate(samples)] + places[positions] + kinds[0]
        return self._normalised(total, "embeddings.LayerNorm", weights)

    def _layer(
        self,
        index: int,
        hidden: Array,
        samples: Sequence[list[int]],
        weights: Mapping[str, Array],
        see: See = lambda names, x: None,
    ) -> Array:
        """One layer of the encoder: attention and a feed-forward net, each added to its input."""
        place = f"encoder.layer.{index}"

        def linear(x: Array, *names: str) -> list[Array]:
            full = [f"{place}.{name}" for name in names]
            see(full, x)
            return [x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"] for name in full]

        q, k, v = linear(hidden, *(f"attention.self.{name}" for name in ("query", "key", "value")))
        attended = np.concatenate([self._attention(q[one], k[one], v[one]) for one in _parts(samples)])
        (added,) = linear(attended, "attention.output.dense")
        hidden = self._normalised(added + hidden, f"{place}.attention.output.LayerNorm", weights)
        (inner,) = linear(hidden, "intermediate.dense")
        (added,) = linear(_gelu(inner), "output.dense")
        return self._normalised(added + hidden, f"{place}.output.LayerNorm", weights)

    def _attention(self, q: Array, k: Array, v: Array) -> Array:
        """The attention of one sample's tokens to one another, [tokens, width]."""
        q, k, v = (one.reshape(len(one), self._heads, -1).swapaxes(0, 1) for one in (q, k, v))
        scores = q @ k.swapaxes(1, 2) * np.float32(q.shape[-1] ** -0.5)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed: Array = shares / shares.sum(-1, keepdims=True) @ v
        return mixed.swapaxes(0, 1).reshape(mixed.shape[1], -1)

    def _normalised(self, x: Array, name: str, weights: Mapping[str, Array]) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred * centred).mean(-1, keepdims=True) + np.float32(self._epsilon))
        scaled: Array = centred / scale * weights[f"{name}.weight"]
        return scaled + weights[f"{name}.bias"]


def _parts(samples: Sequence[list[int]]) -> list[slice]:
    """The rows of each sample in the tokens of all."""
    ends = np.cumsum([len(sample) for sample in samples]).tolist()
    return [slice(end - len(sample), end) for end, sample in zip(ends, samples, strict=True)]


_ROWS = 32
"""Rows whose intermediate values a core's cache holds."""


def _gelu(x: Array) -> Array:
    return np.concatenate([_gelu_of_few(x[start : start + _ROWS]) for start in range(0, len(x), _ROWS)])


def _gelu_of_few(x: Array) -> Array:
    z = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = np.zeros_like(t)
    for coefficient in reversed(_ERF):
        series = (series + np.float32(coefficient)) * t
    tail = series * np.exp(-z * z)
    result: Array = x * np.float32(0.5) * np.where(x < 0, tail, 2 - tail)
    return result
