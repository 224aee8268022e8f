"""What the caller wants of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ..errors import InvalidProblemError
from ..vocab import BackendKind, Model, Tier
from .guarantee import GuaranteeRequirement


class PlanPreference(Model):
    """What the caller wants of a plan. ``prefer_backend`` and ``tier`` force: what can't serve raises."""

    max_workspace_bytes: int | None = Field(default=None, ge=0)
    allow_sm90a: bool = True
    prefer_backend: BackendKind | None = None
    tier: Tier | None = None
    require: GuaranteeRequirement = GuaranteeRequirement()

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
