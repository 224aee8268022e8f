"""Finds the matrices of a model that are stored [in, out], the transpose of what nn.Linear stores.

transformers' Conv1D, of which GPT-2 is made, stores them so. 2:4 goes along the inputs, so their groups of
four go down the columns.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .folder import ModelReader

CONV1D_MODELS = ("clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt")
"""The values of ``model_type`` in a ``config.json`` whose models in transformers have Conv1D layers."""
TRANSPOSED_STACKS = ("gpt_oss", "llama4", "llama4_text")
"""The values whose models stack experts as [experts, in, out]."""
CONV1D_LAYERS = ("c_attn", "c_fc", "c_proj", "q_attn")
"""The names of these layers."""
_WEIGHT = ".weight"


class Orientation:
    """Says for each matrix of a model whether it is stored [in, out].

    A matrix's own bias tells if the two sides differ, since it has one value for each output. For a square
    matrix the others of its name tell (every ``c_proj``), and then the model's ``config.json``. A matrix
    about which nothing is known is taken for nn.Linear's.
    """

    def __init__(self, model: ModelReader) -> None:
        types = _model_types(model.config() or {})
        self._of_conv1d = any(one in CONV1D_MODELS for one in types)
        self.has_transposed_stacks = any(one in TRANSPOSED_STACKS for one in types)
        """Whether stacked matrices are [experts, in, out]."""
        self._told: dict[str, bool] = {}
        self._family: defaultdict[str, set[bool]] = defaultdict(set)
        for name, info in model.tensors.items():
            if len(info.shape) != 2 or not name.endswith(_WEIGHT):
                continue
            bias = model.tensors.get(name.removesuffix(_WEIGHT) + ".bias")
            (rows, columns), outputs = info.shape, bias.shape if bias is not None else ()
            if rows != columns and outputs in ((rows,), (columns,)):
                self._told[name] = outputs == (columns,)
                self._family[_leaf(name)].add(self._told[name])

    def transposed(self, name: str) -> bool | None:
        """Whether the matrix is stored [in, out]; None if the others of its name contradict each other."""
        if name in self._told:
            return self._told[name]
        known = self._family.get(_leaf(name), set())
        if len(known) == 1:
            return next(iter(known))
        if self._of_conv1d and _leaf(name) in CONV1D_LAYERS:
            return True
        return None if known else False


def _leaf(name: str) -> str:
    """The last name of the module that has the weight."""
    return name.removesuffix(_WEIGHT).rpartition(".")[2]


def _model_types(config: dict[str, Any]) -> list[Any]:
    """The ``model_type`` of a model and of the models that it is composed of."""
    inner = [value.get("model_type") for value in config.values() if isinstance(value, dict)]
    return [config.get("model_type"), *inner]
