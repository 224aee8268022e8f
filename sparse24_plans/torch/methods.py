"""The methods by which a dense weight becomes 2:4, and what may be said beside each."""

from __future__ import annotations

from ..errors import InvalidProblemError, check_choice
from ..vocab import TileRule

METHODS = ("prune", "compress", "tiles")


def check_scores(method: str, scores: object) -> None:
    """Raise InvalidProblemError for scores beside a method that would not rank by them."""
    if scores is not None and method == "tiles":
        raise InvalidProblemError(
            f"scores: expected None for tiles, which are pruned by rule, got a {type(scores).__name__}"
        )


def check_rule(method: str, rule: object) -> None:
    """Raise InvalidProblemError for a wrong rule, or one beside a method that prunes no tiles."""
    check_choice("rule", rule, TileRule)
    if method != "tiles" and rule != TileRule.OPTIMAL:
        raise InvalidProblemError(
            f"rule: expected {TileRule.OPTIMAL}, the default, for method {method}, got {rule}: method tiles "
            "alone prunes by a rule"
        )
