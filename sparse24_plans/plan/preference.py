"""What the caller wants of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, SupportsIndex

from ..errors import InvalidProblemError
from ..vocab import INT64_MAX, Flag, Integer, Model, Tier
from .families import BackendName
from .guarantee import GuaranteeRequirement


class PlanPreference(Model):
    """What the caller wants of a plan. ``prefer_backend`` and ``tier`` force: what can't serve raises."""

    max_workspace_bytes: Annotated[int, Integer(most=2**64)] | None = None
    """No kernel that needs more; None: any."""
    allow_sm90a: Flag = True
    """Whether kernels may serve that run on compute capability 9.0 alone."""
    prefer_backend: BackendName | None = None
    """The backend, or the kernel, to use, or to fail."""
    tier: Tier | None = None
    """The tier to use, or to fail."""
    require: GuaranteeRequirement = GuaranteeRequirement()
    """What the kernel has to promise."""
    whole_m: Annotated[int, Integer(least=1, most=INT64_MAX)] | None = None
    """M of the weight that this one is a part of, cut along M. Results have the bits that the whole gives
    where batch invariance is required; only kernels that are batch invariant serve."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            max_workspace_bytes: SupportsIndex | None = ...,
            allow_sm90a: bool = ...,
            prefer_backend: str | None = ...,
            tier: Tier | str | None = ...,
            require: GuaranteeRequirement | Mapping[str, Any] = ...,
            whole_m: SupportsIndex | None = ...,
        ) -> None: ...

    @classmethod
    def of(cls, given: PlanPreference | Mapping[str, Any] | None) -> PlanPreference:
        """``given``, or one of a mapping's fields, or that of no wishes. Raises InvalidProblemError."""
        if given is None:
            return _NO_PREFERENCE
        if type(given) is cls:
            return given
        if not isinstance(given, Mapping):
            raise InvalidProblemError(
                f"preference: expected PlanPreference or a mapping of its fields, got {type(given).__name__}"
            )
        return cls.model_validate(given)


_NO_PREFERENCE = PlanPreference()
