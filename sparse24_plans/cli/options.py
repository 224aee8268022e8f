"""Options that several commands share, and parsers of their texts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoints.compressed_form import DEFAULT_GROUP, DEFAULT_RULE
from ..checkpoints.selection import DEFAULT_EXCLUDE
from ..checkpoints.verify import MAX_TOKENS
from ..errors import InvalidProblemError
from ..gemm.kernel_table import ENTRIES
from ..plan.guarantee import GuaranteeRequirement
from ..plan.preference import PlanPreference
from ..vocab import ElementKind, EpilogueKind, ScaleRule
from ..weights.quantized_weight import GROUPS, STORED

ELEMENTS = tuple(kind for kind in ElementKind if any(kind in entry.elements for entry in ENTRIES))
"""The elements that some kernel multiplies."""
BACKENDS = tuple(dict.fromkeys(entry.backend for entry in ENTRIES))
"""The backends that multiply."""


# Words --------------------------------------------------------------------------------------------


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """A parser that accepts one of these words and returns it as it stands there."""
    words = {str(word): word for word in known}

    def parse(text: str) -> str:
        if text not in words:
            with suppress(ValueError):  # an element may have NumPy's name: float16
                text = ElementKind(text).value
        if text not in words:
            raise typer.BadParameter(
                f"expected one of {', '.join(words)}, got {text!r:.80}{hint(text, words)}"
            )
        return words[text]

    return parse


def hint(text: str, words: Iterable[str]) -> str:
    """The end of a message that suggests the word that was most likely meant."""
    known = list(words)
    near = [word for word in known if text and word.startswith(text)]
    near += difflib.get_close_matches(text, known)
    return f"; did you mean {near[0]}?" if near else ""


def named(known: Iterable[str]) -> str:
    """A help text that lists the words."""
    return f"One of {', '.join(known)}."


def word_option(*names: str, known: Iterable[str], meaning: str, metavar: str = "NAME") -> Any:
    """An option that takes one of the known words and lists them in its help."""
    return typer.Option(*names, metavar=metavar, parser=one_of(known), help=f"{meaning} {named(known)}")


def device_of(text: str) -> int | str | None:
    """Parse a device: None for ``auto``, ``"host"``, or an ordinal."""
    if text == "auto":
        return None
    if text == "host":
        return text
    ordinal = 0 if text == "cuda" else whole_number(text.removeprefix("cuda:"))
    if ordinal is None:
        raise typer.BadParameter(f"expected auto, host, cuda:N or N, got {text!r:.80}")
    return ordinal


# Options ------------------------------------------------------------------------------------------

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")]
Everything = Annotated[bool, typer.Option("--all", help="Show every tensor, not the few that matter most.")]
Force = Annotated[
    bool, typer.Option("--force", "-f", help="Replace a file that is there already, without asking.")
]
DeviceOption = Annotated[
    Any,
    typer.Option(
        "--device",
        metavar="auto|host|N",
        parser=device_of,
        help="The device: a CUDA device N, the host, or auto: the GPU if there is one, else the host.",
    ),
]
RequireOption = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="NAME[=VALUE]",
        help="Guarantees that the kernel must give; repeatable, or separated by commas. Names: "
        + ", ".join(GuaranteeRequirement.model_fields)
        + ".",
    ),
]
BackendOption = Annotated[
    str | None,
    word_option("--backend", known=BACKENDS, meaning="Force this backend."),
]
ElementsOption = Annotated[
    list[ElementKind] | None,
    word_option(
        "--element", known=ELEMENTS, meaning="Type of W and X; repeatable, bf16 by default.", metavar="TYPE"
    ),
]
WeightShapesOption = Annotated[
    list[str], typer.Option("--shape", metavar="MxK", help="Weight shape; repeatable.")
]
EpiloguesOption = Annotated[
    list[EpilogueKind] | None,
    word_option("--epilogue", known=EpilogueKind, meaning="The epilogue; repeatable, identity by default."),
]
TokensOption = Annotated[
    int, typer.Option("--tokens", min=1, max=MAX_TOKENS, metavar="N", help="Rows of random activations.")
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, metavar="N", help="Seed of the random activations.")
]

A_MODEL = "A safetensors file, or a folder of them with its index."
DenseArgument = Annotated[Path, typer.Argument(metavar="CKPT", help=f"The dense model. {A_MODEL}")]
OutOption = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="OUT", help="The file to write, or for a folder a new folder."),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Take only the tensors whose names match this shell pattern, such as '*.mlp.*'; repeatable.",
    ),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Copy the tensors whose names match this shell pattern; repeatable, and stronger than "
        f"--include. Copied unless --include names them: {', '.join(DEFAULT_EXCLUDE)}.",
    ),
]
WeightsOption = Annotated[
    ElementKind | None,
    word_option("--weights", known=STORED, meaning="Quantize weights, for layers that keep their input."),
]
GroupOption = Annotated[
    int | None,
    typer.Option(
        "--group",
        metavar="N",
        parser=lambda text: int(one_of(map(str, GROUPS))(text)),
        help=f"With --weights: the columns of a row that share a scale, {DEFAULT_GROUP} by default; 0: all. "
        + named(map(str, GROUPS)),
    ),
]
ScaleRuleOption = Annotated[
    ScaleRule | None,
    word_option(
        "--scale-rule",
        known=ScaleRule,
        meaning=f"With --weights: how scales are chosen, {DEFAULT_RULE} by default.",
    ),
]


def put_once(values: dict[str, Any], name: str, value: Any, option: str) -> None:
    """Add what a repeatable option says of a name. Another value for the same name is wrong usage."""
    if values.setdefault(name, value) != value:
        raise _wrong(option, f"expected one value of {name}, got {values[name]} and {value}")


@contextmanager
def usage_checked(prefix: str = "") -> Iterator[None]:
    """Report values of options that no model takes as wrong usage; ``prefix`` begins the message."""
    try:
        yield
    except InvalidProblemError as error:
        raise typer.BadParameter(f"{prefix}{error}") from error


def _wrong(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=f"'{option}'")


# Texts --------------------------------------------------------------------------------------------

_LONGEST_NUMBER = 18


def preference_of(require: list[str] | None, backend: str | None, **more: Any) -> PlanPreference:
    """The preference that options state. ``more`` are further fields."""
    wanted: dict[str, Any] = {}
    for item in ",".join(require or ()).split(","):
        name, has_value, value = item.strip().partition("=")
        if name:
            put_once(wanted, name, _required(name, value if has_value else None), "--require")
    try:
        requirement = GuaranteeRequirement(**wanted)
    except InvalidProblemError as error:
        raise _wrong("--require", str(error)) from error
    return PlanPreference(prefer_backend=backend, require=requirement, **more)


def _required(name: str, value: str | None) -> Any:
    """The value of a requirement. A flag needs no value, all others do."""
    fields = GuaranteeRequirement.model_fields
    if name not in fields:
        raise _wrong(
            "--require", f"expected one of {', '.join(fields)}, got {name!r:.80}{hint(name, fields)}"
        )
    if fields[name].default is False:
        if value not in (None, "true"):
            raise _wrong("--require", f"expected {name} without a value, got {value!r:.80}")
        return True
    if not value:
        raise _wrong("--require", f"expected {name}=VALUE, got no value")
    if name != "max_error_bound":
        return value
    try:
        return float(value)
    except ValueError:
        raise _wrong("--require", f"{name}: expected a number, got {value!r:.80}") from None


def tokens_of(text: str) -> list[int]:
    """Parse comma-separated numbers of tokens."""
    found = [whole_number(part.strip()) for part in text.split(",")]
    numbers = [number for number in found if number is not None]
    if len(numbers) < len(found):
        raise _wrong("--n", f"expected numbers such as 1,16,4096, got {text!r:.80}")
    return numbers


def shape_of(text: str) -> tuple[int, int]:
    """Parse ``MxK`` as (m, k)."""
    sides = text.lower().partition("x")
    m, k = whole_number(sides[0]), whole_number(sides[2])
    if m is None or k is None:
        raise _wrong("--shape", f"expected MxK such as 4096x4096, got {text!r:.80}")
    return m, k


def whole_number(text: str) -> int | None:
    """The value of a decimal number of at most 18 digits, or None."""
    if text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER:
        return int(text)
    return None
