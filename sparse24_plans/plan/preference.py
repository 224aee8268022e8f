"""The caller's conditions on a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, SupportsIndex

from ..errors import InvalidProblemError
from ..vocab import INT64_MAX, Flag, Integer, Model, Tier
from .families import BackendName, KernelName
from .guarantee import GuaranteeRequirement


class PlanPreference(Model):
    """The caller's conditions on a plan. No kernel that fails one of them is chosen."""

    max_workspace_bytes: Annotated[int, Integer(most=2**64)] | None = None
    """Largest workspace in bytes; None: any."""
    allow_sm90a: Flag = True
    """Whether kernels that run on compute capability 9.0 alone may serve."""
    prefer_backend: BackendName | None = None
    """The only backend that may serve."""
    prefer_kernel: KernelName | None = None
    """The only kernel entry that may serve: ``plan.kernel`` of another plan, or a name of ``explain``."""
    tier: Tier | None = None
    """The only tier that may serve."""
    exportable: Flag = False
    """Whether only kernels that ``export_plans`` can export may serve: neither a library's nor the host's."""
    require: GuaranteeRequirement = GuaranteeRequirement()
    """Promises that the kernel must make."""
    whole_m: Annotated[int, Integer(least=1, most=INT64_MAX)] | None = None
    """M of the whole weight, if this weight is a shard of it along M. Only batch-invariant kernels serve. If
    batch invariance is required, results have the bits that the whole weight gives: kernels with other bits
    are refused."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            max_workspace_bytes: SupportsIndex | None = ...,
            allow_sm90a: bool = ...,
            prefer_backend: str | None = ...,
            prefer_kernel: str | None = ...,
            tier: Tier | str | None = ...,
            exportable: bool = ...,
            require: GuaranteeRequirement | Mapping[str, Any] = ...,
            whole_m: SupportsIndex | None = ...,
        ) -> None: ...

    @classmethod
    def of(cls, given: PlanPreference | Mapping[str, Any] | None) -> PlanPreference:
        """A preference: ``given``, or a mapping's fields, or no conditions. Raises InvalidProblemError."""
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
