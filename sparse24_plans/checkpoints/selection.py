"""Which tensors of a dense model are compressed, by what they are and by patterns of their names."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from fnmatch import fnmatchcase

from ..errors import InvalidProblemError
from .arguments import patterns_of
from .folder import ModelReader
from .layers import FORMAT_KEY, LAYER_KEY_PREFIX, Layer
from .safetensors_file import TensorInfo, shown
from .streaming import ELEMENTS

DEFAULT_EXCLUDE = ("*embed*", "*wte.*", "*wpe.*")
"""Embedding tables are looked up, not multiplied by: they stay dense unless ``include`` names them."""


class Selection:
    """The include and exclude patterns, for tensors of the safetensors types ``dtypes``.

    Raises InvalidProblemError where a pattern is given for a sequence of them.
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
        """The tensors to compress, and why each of the others is copied.

        Raises InvalidProblemError for a compressed model, and for a pattern that matches nothing: most
        likely it is mistyped.
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
        """Why the tensor is not compressed, or None where it is. Patterns come after what is impossible."""
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
