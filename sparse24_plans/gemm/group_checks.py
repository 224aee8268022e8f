"""Checks of the fields of a gemm's descriptor that say which rows its weights multiply."""

from __future__ import annotations

from typing import Any

from ..vocab import ElementKind, GroupTokens, MatrixOrder

_MAX_ROWS = 2**31 - 1
"""Rows that i32 offsets can name."""
_MAX_CHOICES = 1024
"""The largest ``top_k``."""
MAX_GROUPS = 1024
"""Groups whose table a CTA's shared memory holds."""
_SUMMED = (ElementKind.F32, ElementKind.F16, ElementKind.BF16)
"""Types of results that are added up to rows of Y."""


def check_groups(desc: Any) -> None:
    """Raise ValueError, naming a field, for groups, rows of a router or batches that a product can't have."""
    _check_group_tokens(desc)
    _check_routing(desc)
    if desc.batches is None and desc.shared_weight:
        raise ValueError("shared_weight: expected False without batches, got True")
    if desc.batches is not None and desc.groups:
        raise ValueError(f"batches: expected None with groups, got {desc.batches}")


def _check_group_tokens(desc: Any) -> None:
    if not desc.groups:
        if desc.group_tokens is not GroupTokens.OFFSETS:
            raise ValueError(f"group_tokens: expected offsets without groups, got {desc.group_tokens}")
        return
    for name in ("x_order", "y_order"):
        if getattr(desc, name) is not MatrixOrder.ROW:
            raise ValueError(f"{name}: expected row with groups, got {getattr(desc, name)}")
    if desc.n > _MAX_ROWS:
        raise ValueError(f"n: expected at most {_MAX_ROWS} rows with groups, got {desc.n}")
    if desc.group_tokens is GroupTokens.COUNTS and desc.n % desc.groups:
        raise ValueError(
            f"n: expected a multiple of groups, {desc.groups}, with group_tokens counts, got {desc.n}"
        )


def _check_routing(desc: Any) -> None:
    for name in ("x_rows", "y_rows") if not desc.groups else ():
        if getattr(desc, name) is not None:
            raise ValueError(f"{name}: expected None without groups, got {getattr(desc, name)}")
    for name in ("x_rows", "y_rows"):
        if (rows := getattr(desc, name)) is not None and rows > _MAX_ROWS:
            raise ValueError(f"{name}: expected at most {_MAX_ROWS} rows, got {rows}")
    if desc.x_rows == 0 and desc.n:
        raise ValueError(f"x_rows: expected at least 1 row for n = {desc.n} places, got 0")
    by_experts = desc.group_tokens is GroupTokens.EXPERTS
    if desc.y_rows is None and not by_experts:
        if desc.top_k:
            raise ValueError(f"top_k: expected 0 without y_rows, got {desc.top_k}")
        return
    if not 1 <= desc.top_k <= _MAX_CHOICES:
        beside = "group_tokens experts" if by_experts else "y_rows"
        raise ValueError(f"top_k: expected 1 to {_MAX_CHOICES} with {beside}, got {desc.top_k}")
    if by_experts:
        _check_experts(desc)
    if desc.y_rows is None:
        return
    if desc.has_c:
        raise ValueError(f"beta: expected 0 with y_rows, got {desc.beta}")
    if desc.out_element not in _SUMMED:
        raise ValueError(f"out_element: expected {', '.join(_SUMMED)} with y_rows, got {desc.out_element}")


def _check_experts(desc: Any) -> None:
    rows, rest = divmod(desc.n, desc.top_k)
    if rest:
        raise ValueError(
            f"n: expected a multiple of top_k, {desc.top_k}, with group_tokens experts, got {desc.n}"
        )
    if desc.groups > MAX_GROUPS:
        raise ValueError(
            f"groups: expected at most {MAX_GROUPS} with group_tokens experts, got {desc.groups}"
        )
    for name in ("x_rows", "y_rows"):
        if getattr(desc, name) not in (None, rows):
            raise ValueError(
                f"{name}: expected None or n/top_k, {rows}, with group_tokens experts, "
                f"got {getattr(desc, name)}"
            )
