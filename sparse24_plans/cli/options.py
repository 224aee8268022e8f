"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InvalidProblemError
from ..gemm.table import ROWS
from ..plan.guarantee import GuaranteeRequirement
from ..plan.preference import PlanPreference
from ..vocab import BackendKind, ElementKind

ELEMENTS = tuple(kind for kind in ElementKind if any(kind in row.elements for row in ROWS))
"""Those that some kernel multiplies."""


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """A parser of an option that takes one of these words, and gives it as it stands there."""
    words = {str(word): word for word in known}

    def parse(text: str) -> str:
        if text not in words:
            raise typer.BadParameter(
                f"expected one of {', '.join(words)}, got {text!r:.80}{hint(text, words)}"
            )
        return words[text]

    return parse


def hint(text: str, words: Iterable[str]) -> str:
    """What a mistyped word most likely means, as the end of a message."""
    known = list(words)
    near = [word for word in known if text and word.startswith(text)] or difflib.get_close_matches(
        text, known
    )
    return f"; did you mean {near[0]}?" if near else ""


def named(known: Iterable[str]) -> str:
    """Words for a help text."""
    return f"One of {', '.join(known)}."


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="auto|host|N", help="auto: the GPU if there is one, else the host.")
]
RequireOption = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="NAME[=VALUE]",
        help="Guarantees that the kernel must give, comma-separated or repeated: "
        + ", ".join(GuaranteeRequirement.model_fields)
        + ".",
    ),
]
BackendOption = Annotated[BackendKind | None, typer.Option("--backend", help="Force this backend.")]
ElementsOption = Annotated[
    list[ElementKind] | None,
    typer.Option(
        "--element",
        metavar="TYPE",
        parser=one_of(ELEMENTS),
        help=f"Type of W and X; repeatable, bf16 by default. {named(ELEMENTS)}",
    ),
]
TokensOption = Annotated[int, typer.Option("--tokens", min=1, help="Rows of random activations.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the random activations.")]

A_MODEL = "A safetensors file, or a folder of them with its index."
DenseArgument = Annotated[Path, typer.Argument(metavar="CKPT", help=f"The dense model. {A_MODEL}")]
OutOption = Annotated[
    Path, typer.Option("--out", "-o", help="What to write: a file, or for a folder a new folder.")
]

_LONGEST_NUMBER = 18


def device_of(text: str) -> int | str | None:
    """None for ``auto``, ``"host"``, or an ordinal."""
    if text == "auto":
        return None
    if text == "host":
        return text
    ordinal = whole_number(text.removeprefix("cuda:"))
    if ordinal is None:
        raise typer.BadParameter(f"--device: expected auto, host or a CUDA ordinal, got {text!r:.80}")
    return ordinal


def preference_of(require: list[str] | None, backend: BackendKind | None) -> PlanPreference:
    wanted: dict[str, Any] = {}
    for item in ",".join(require or ()).split(","):
        name, has_value, value = item.strip().partition("=")
        if name:
            wanted[name] = value if has_value else "true"
    try:
        return PlanPreference(
            prefer_backend=backend, require=GuaranteeRequirement.model_validate_strings(wanted)
        )
    except InvalidProblemError as error:
        raise typer.BadParameter(f"--require: {error}") from error


def tokens_of(text: str) -> list[int]:
    """Numbers of tokens, comma-separated."""
    found = [whole_number(part.strip()) for part in text.split(",")]
    numbers = [number for number in found if number is not None]
    if len(numbers) < len(found):
        raise typer.BadParameter(f"--n: expected numbers such as 1,16,4096, got {text!r:.80}")
    return numbers


def shape_of(text: str) -> tuple[int, int]:
    """(m, k) of ``MxK``."""
    m, k = (whole_number(side) for side in (text.partition("x")[0], text.partition("x")[2]))
    if m is None or k is None:
        raise typer.BadParameter(f"--shape: expected MxK such as 4096x4096, got {text!r:.80}")
    return m, k


def whole_number(text: str) -> int | None:
    """A plain decimal number of a sane length, or None."""
    if text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER:
        return int(text)
    return None
