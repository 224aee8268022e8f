"""Runs a command in this process, and parses what it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from sparse24_plans.cli import app as cli

PROBLEM = ("--n", 16, "--m", 512, "--k", 256)
"""Sizes that ``explain`` takes."""


def run(*arguments: object, exit_code: int = 0) -> Any:
    """Run the command in this process; check its exit code."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result


def run_json(*arguments: object, exit_code: int = 0) -> Any:
    """The one document on stdout; stderr stays empty."""
    result = run(*arguments, "--json", exit_code=exit_code)
    assert result.stderr == ""
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
