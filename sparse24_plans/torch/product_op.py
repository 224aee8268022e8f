"""An op that multiplies by a 2:4 weight: its call, its kernel and its fake, which follow from its schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .gemm_call import OPERANDS, OWN_OPERANDS, PLAIN, Call, Kind, fake_result
from .gemm_dispatch import CheckedProduct, aligned
from .library import define
from .plan_cache import find, form_of, plans

_RENAMED = {"dy": "x", "values": "weight"}
"""Fields of a Call by the names that ops of gradients have for them."""


class ProductOp:
    """An op whose arguments are fields of a Call, or of its kind, by their names in the schema."""

    def __init__(
        self,
        schema: str,
        kind: Callable[..., Kind] | None = None,
        completed: Callable[[Call], Call] | None = None,
        **fixed: Any,
    ) -> None:
        """``kind`` makes the call's kind of the arguments that are no fields of a Call.

        ``completed`` changes the call, or raises for one that the op doesn't take. ``fixed`` are fields that
        are no arguments.
        """
        arguments = torch._C.parse_schema(schema).arguments
        self.names = tuple(_RENAMED.get(one.name, one.name) for one in arguments)
        self._schema, self._kind, self._completed, self._fixed = schema, kind, completed, fixed
        order = (*OPERANDS[3:], *OWN_OPERANDS)
        self._others = tuple(self.names.index(name) for name in order if name in self.names)

    def named(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments by the names of fields."""
        return dict(zip(self.names, args, strict=False)) | {
            _RENAMED.get(key, key): one for key, one in kwargs.items()
        }

    def call(self, *args: Any, **kwargs: Any) -> Call:
        """The product that the arguments ask for. Raises InvalidProblemError."""
        given = self.named(*args, **kwargs)
        own = {name: given.pop(name) for name in tuple(given) if name not in Call._fields}
        call = Call(**given, **self._fixed, kind=PLAIN if self._kind is None else self._kind(**own))
        if not call.beta and call.kind is PLAIN:
            call = call._replace(residual=None)
        return call if self._completed is None else self._completed(call)

    def kernel(self, *args: Any) -> Tensor:
        """The product of the arguments."""
        form = form_of(self, args)
        found = find(form)
        if found is None:
            found = plans.keep(form, CheckedProduct(self.call(*args)))
        others = [args[at] for at in self._others if at < len(args)]
        y: Tensor | None = found.run(args[0], args[1], args[2], others, None)
        return self.kernel(aligned(args[0], found.column_major), *args[1:]) if y is None else y

    def fake(self, *args: Any, **kwargs: Any) -> Tensor:
        """The result's shape, dtype and strides."""
        return fake_result(self.call(*args, **kwargs))

    def define(self, kernel: Callable[..., Tensor] | None = None, **options: Any) -> None:
        """Register the op, with the options of :func:`define`, and by default with its own kernel."""
        define(self._schema, kernel or self.kernel, self.fake, **options)
