"""The base of the package's models, and their error messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from ..errors import InvalidProblemError, shown


class Model(BaseModel):
    """Base of the package's models: frozen, no unknown fields, and typed errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, ser_json_inf_nan="strings")

    if not TYPE_CHECKING:  # checkers see the fields instead, or what a model says of its own

        def __new__(cls, /, *given: Any, **data: Any) -> Self:
            if given:
                fields = ", ".join(cls.model_fields)
                raise InvalidProblemError(
                    f"{cls.__name__}: expected fields by name ({fields}), got {len(given)} by position"
                )
            return super().__new__(cls)

        def __init__(self, /, **data: Any) -> None:
            with _TypedErrors(type(self)):
                self.__pydantic_validator__.validate_python(data, self_instance=self)

        # The mark that pydantic's own __init__ bears: nested models are then validated in one pass.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        if (
            not cls.__pydantic_complete__
        ):  # pydantic makes it when the model is first used; help() reads it before
            type.__setattr__(cls, "__signature__", _Signature())

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        with _TypedErrors(cls):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        with _TypedErrors(cls):
            return super().model_validate_json(json_data, **options)

    @classmethod
    def model_validate_strings(cls, obj: Any, **options: Any) -> Self:
        with _TypedErrors(cls):
            return super().model_validate_strings(obj, **options)

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Self:
        """Validates, unlike pydantic's own, which skips it."""
        return cls.model_validate(values)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed; validated, unlike pydantic's own."""
        if update is not None and not isinstance(update, Mapping):
            raise InvalidProblemError(f"update: expected a mapping of fields, got {shown(update)}")
        return type(self).model_validate({**self.__dict__, **(update or {})})

    def copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:  # type: ignore[override]
        """The older name of :meth:`model_copy`."""
        return self.model_copy(update=update)

    def __hash__(self) -> int:
        return hash(_values_of(type(self))(self.__dict__))


class _Signature:
    """Builds the model when its signature is read, which replaces this descriptor by the true signature."""

    def __get__(self, instance: object, model: type[Model]) -> inspect.Signature:
        model.model_rebuild()
        return inspect.signature(model)


class _TypedErrors:
    """Raises InvalidProblemError for what pydantic refuses. A generator would take twice as long."""

    def __init__(self, model: type[Model]) -> None:
        self.model = model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValidationError):
            raise InvalidProblemError(_explain(self.model, error)) from error


@cache
def _values_of(model: type[Model]) -> Callable[[dict[str, Any]], Any]:
    """A function that takes a model's fields, in order, from its dictionary."""
    return itemgetter(*model.model_fields)


def _explain(model: type[Model], error: ValidationError) -> str:
    parts = []
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":
            continue  # its default depends on a field that failed itself
        unknown = item["type"] == "extra_forbidden"
        outer = item["loc"][:-1] if unknown else item["loc"]
        name = ".".join(
            part if isinstance(part, str) and part.isidentifier() else shown(part) for part in outer
        )
        if unknown:
            message = (
                f"expected fields of {', '.join(_fields_of(model, outer))}, got {shown(item['loc'][-1])}"
            )
        elif item["type"] == "value_error":  # one of our validators, whose message is complete
            message = str(item["ctx"]["error"])
        else:
            message = f"{item['msg']}, got {shown(item['input'])}"
        parts.append(f"{name}: {message}" if name else message)
    return f"{model.__name__}: " + "; ".join(parts)


def _fields_of(model: type[Model], path: Iterable[str | int]) -> Iterable[str]:
    """The fields of a model, or of the nested model at the end of ``path``."""
    for part in path:
        inner = model.model_fields[str(part)].annotation
        model = inner if isinstance(inner, type(Model)) else model
    return model.model_fields
