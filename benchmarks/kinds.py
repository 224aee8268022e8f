"""The kinds of records: their lists, and the measurements that make a whole one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from sparse24_plans.bench.record import GRID, Lists, Step
from sparse24_plans.bench.scope import ELEMENTS, PARTS, SHAPES, TOKENS, Scope
from sparse24_plans.vocab import ElementKind
from sparse24_plans.weights.quantized_weight import STORED

_FLOAT32_SHAPES = 4
"""float32 is measured on the first shapes alone: its dense products take long."""


class Kind(NamedTuple):
    """A kind of record. Both calls import what the kind needs, such as PyTorch."""

    lists: Callable[[], Lists]
    steps: Callable[[argparse.Namespace], list[Step]]
    is_seeded: bool = False
    """Whether a seed draws the record's problems."""
    compile_all: Callable[[argparse.Namespace], None] | None = None
    """Compiles the timed kernels in parallel, if that saves minutes."""


def _lists_of(module: str) -> Callable[[], Lists]:
    """The lists of a kind that a module of benchmarks measures, which is imported when they are asked for."""

    def lists() -> Lists:
        found: Lists = import_module(f"{__package__}.{module}").LISTS
        return found

    return lists


def _grid(options: argparse.Namespace) -> list[Step]:
    """The shapes of Llama, one element after another, and the host's times."""
    from sparse24_plans.bench import run

    found = []
    for element in options.element or ELEMENTS:
        is_float32 = element is ElementKind.F32
        shapes = SHAPES[:_FLOAT32_SHAPES] if is_float32 else SHAPES
        parts = ("gemm",) if is_float32 else tuple(part for part in PARTS if part != "host")
        found += run.steps(Scope((element,), options.n or TOKENS, shapes, parts))
    return found + run.steps(Scope(parts=("host",)))


def _random(options: argparse.Namespace) -> list[Step]:
    """Shapes of other models, and any number of tokens."""
    from . import random_cells

    return random_cells.steps(options.seed, options.element or tuple(random_cells.MATRICES))


def _blocks(options: argparse.Namespace) -> list[Step]:
    """Products of block-sparse matrices, and attention."""
    from . import blocks

    return blocks.steps()


def _grouped(options: argparse.Namespace) -> list[Step]:
    """Layers of experts, and random ones."""
    from . import grouped

    return grouped.steps(options.seed, tuple(options.element or grouped.ELEMENTS))


def _quantized(options: argparse.Namespace) -> list[Step]:
    """Weights that store 4 or 8 bits a value, on the grid's shapes and random ones."""
    from . import quantized

    return quantized.steps(options.seed, options.element or STORED, options.n or quantized.TOKENS)


def _random_blocks(options: argparse.Namespace) -> list[Step]:
    """Block-sparse products of other models' shapes, any density and any number of tokens."""
    from . import random_blocks

    return random_blocks.steps(options.seed)


def _compile_random_blocks(options: argparse.Namespace) -> None:
    """Compile the kernels of random products side by side."""
    from . import random_blocks

    random_blocks.compile_all(options.seed)


def _layers(options: argparse.Namespace) -> list[Step]:
    """Layers of 8 bits in PyTorch."""
    from . import fp8_layers

    return fp8_layers.steps()


def _experts(options: argparse.Namespace) -> list[Step]:
    """Whole layers of experts in PyTorch, and random ones."""
    from . import expert_layers

    return expert_layers.steps(options.seed)


def _torch(options: argparse.Namespace) -> list[Step]:
    """A decoder in PyTorch, and the host's times."""
    from . import torch_end_to_end, torch_ranks

    return torch_end_to_end.steps() if options.gpus == 1 else torch_ranks.steps(options.gpus)


def _calibration(options: argparse.Namespace) -> list[Step]:
    """Pruning of a decoder by its layers' inputs."""
    from . import calibration

    return calibration.steps()


KINDS = {
    "grid": Kind(lambda: GRID, _grid),
    "random": Kind(_lists_of("random_cells"), _random, is_seeded=True),
    "blocksparse": Kind(_lists_of("blocks"), _blocks),
    "grouped": Kind(_lists_of("grouped"), _grouped, is_seeded=True),
    "quantized": Kind(_lists_of("quantized"), _quantized, is_seeded=True),
    "blocksparse-random": Kind(_lists_of("random_blocks"), _random_blocks, True, _compile_random_blocks),
    "torch": Kind(_lists_of("torch_end_to_end"), _torch),
    "layers": Kind(_lists_of("fp8_layers"), _layers),
    "experts": Kind(_lists_of("expert_layers"), _experts, is_seeded=True),
    "calibration": Kind(_lists_of("calibration"), _calibration),
}
SEEDED = tuple(name for name, kind in KINDS.items() if kind.is_seeded)
"""Kinds of records with random cells, which a seed draws."""


def kind_of(file_name: str) -> str:
    """The kind of a record by its file's name: ``random`` of h200-random.json, ``grid`` of h200.json."""
    return file_name.removesuffix(".json").partition("-")[2] or "grid"
