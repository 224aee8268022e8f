"""Selects the tensors of a dense model to compress, by type, shape and patterns of their names."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ..errors import InvalidProblemError
from ..errors import shown as shown_value
from .folder import ELEMENTS, ModelReader
from .layers import FORMAT_KEY, LAYER_KEY_PREFIX, Layer
from .safetensors_file import TensorInfo, shown

DEFAULT_EXCLUDE = ("*embed*", "*wte.*", "*wpe.*")
"""Names of embedding tables, which are looked up, not multiplied. They stay dense unless included."""


def patterns_of(argument: str, value: Collection[str]) -> tuple[str, ...]:
    """Shell patterns as a tuple. Raises InvalidProblemError for anything but a sequence of strings."""
    found: list[str] = []
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        len(value)  # an endless iterator has none
        for pattern in value:
            if not isinstance(pattern, str):
                raise TypeError
            found.append(pattern)
    except Exception:  # noqa: BLE001 - a broken object may raise anything
        raise InvalidProblemError(
            f"{argument}: expected a sequence of patterns, got {shown_value(value)}"
        ) from None
    return tuple(found)


def check_callback(argument: str, value: Any) -> None:
    """Raise InvalidProblemError for anything but a callable or None."""
    if value is not None and not callable(value):
        raise InvalidProblemError(f"{argument}: expected a callable, got {shown_value(value)}")


class Selection:
    """The include and exclude patterns for tensors of the safetensors types ``dtypes``.

    Raises InvalidProblemError if one pattern is given instead of a sequence.
    """

    def __init__(
        self, include: Sequence[str], exclude: Sequence[str], dtypes: Container[str] = ELEMENTS
    ) -> None:
        self._include, self._exclude = patterns_of("include", include), patterns_of("exclude", exclude)
        self._dtypes = dtypes

    def __bool__(self) -> bool:
        """Whether there is any pattern."""
        return bool(self._include or self._exclude)

    def split(self, model: ModelReader) -> tuple[list[Layer], dict[str, str]]:
        """The tensors to compress, and for each other tensor the reason to copy it.

        Raises InvalidProblemError for a compressed model, and for a pattern that matches nothing, because it
        is most likely mistyped.
        """
        for shard in model.shards:
            if any(key == FORMAT_KEY or key.startswith(LAYER_KEY_PREFIX) for key in shard.reader.metadata):
                raise InvalidProblemError(
                    f"source: expected a dense checkpoint, {shard.reader.path} is compressed already"
                )
        self._check(model.tensors)
        layers: list[Layer] = []
        reasons: dict[str, str] = {}
        for info in model.tensors.values():
            reason = self._reason_to_copy(info)
            if reason is None:
                m, k = info.shape
                layers.append(Layer(info.name, m, k, ELEMENTS[info.dtype], (info.name,)))
            else:
                reasons[info.name] = reason
        return layers, reasons

    def names(self, name: str) -> bool:
        """Whether an include pattern matches, and no exclude pattern."""
        return _first_match(name, self._include) is not None and _first_match(name, self._exclude) is None

    def _check(self, names: Mapping[str, object]) -> None:
        for argument, patterns in (("include", self._include), ("exclude", self._exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise InvalidProblemError(f"{argument}: pattern {pattern!r} matches no tensor")

    def _reason_to_copy(self, info: TensorInfo) -> str | None:
        """The reason to copy the tensor, or None. Type and shape are checked before the patterns."""
        if info.dtype not in self._dtypes:
            return f"element {shown(info.dtype).lower()}"
        if len(info.shape) != 2:
            return f"{len(info.shape)}-d"
        if info.nbytes == 0:
            return "empty"
        if info.shape[1] % 8:
            return f"K={info.shape[1]} is not a multiple of 8"
        return self._reason_by_name(info.name)

    def _reason_by_name(self, name: str) -> str | None:
        if (pattern := _first_match(name, self._exclude)) is not None:
            return f"excluded by pattern {pattern!r}"
        if _first_match(name, self._include) is not None:
            return None
        if (pattern := _first_match(name, DEFAULT_EXCLUDE)) is not None:
            return f"excluded by pattern {pattern!r} (the default)"
        return "not included" if self._include else None


def _first_match(name: str, patterns: Sequence[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
