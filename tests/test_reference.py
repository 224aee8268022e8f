"""The reference is complete: every public name and every public member of it is explained, and it builds.

The reference is what pdoc makes of the docstrings; README.md has the command.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from functools import cache, cached_property
from pathlib import Path

import pytest

import sparse24_plans

ROOT = Path(__file__).parents[1]
NAMES = [name for name in sparse24_plans.__all__ if name != "__version__"]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(sparse24_plans, name))]
METHODS = (staticmethod, classmethod, property, cached_property)


def ours(kind: type) -> list[type]:
    """The class and the bases of it that are ours."""
    return [one for one in kind.__mro__ if one.__module__.split(".")[0] == "sparse24_plans"]


@cache
def described_fields(kind: type) -> dict[str, str]:
    """Fields and constants of the class itself -> the docstring below them, "" where there is none."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    found = {}
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        says = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        for target in targets:
            if isinstance(target, ast.Name):
                found[target.id] = str(after.value.value) if says else ""
    return found


def is_internal(member: str) -> bool:
    return member.startswith("_") or member == "model_config"  # pydantic's


def named_in(doc: str) -> set[str]:
    """Return the names in double backquotes, or before the types of parameters: ``n, m, k : int``."""
    quoted = re.findall(r"``([^`]+)``", doc)
    parameters = re.findall(r"^ *(\w+(?:, \w+)*) : ", doc, re.MULTILINE)
    return set(re.findall(r"\w+", " ".join(quoted + parameters)))


@cache
def members(name: str) -> dict[str, bool]:
    """Public members of a public class -> whether somebody explains them.

    A method or property has a docstring, its own or that of what it overrides. A field has one, or stands in
    double backquotes, or as a parameter, in the docstring of a class that has it. The words of an enum stand
    for themselves.
    """
    kind = getattr(sparse24_plans, name)
    found: dict[str, bool] = {}
    for one in ours(kind):
        named = named_in(vars(one).get("__doc__") or "")
        for member, value in vars(one).items():
            if inspect.isfunction(value) or isinstance(value, METHODS):
                found[member] = found.get(member, False) or bool(inspect.getdoc(getattr(one, member)))
        slots = dict.fromkeys(vars(one).get("__slots__", ()), "")
        for member, text in {**slots, **described_fields(one)}.items():
            if not (issubclass(one, enum.Enum) and isinstance(vars(one).get(member), one)):
                found[member] = found.get(member, False) or bool(text)
        for member in found:
            found[member] |= member in named
    return {member: says for member, says in found.items() if not is_internal(member)}


def test_every_public_member_is_explained():
    assert [(name, member) for name in CLASSES for member, says in members(name).items() if not says] == []


def test_the_members_are_all_that_an_object_shows():
    """Nothing is left out of the test above."""
    known = members("GemmSparse24Descriptor")
    assert {"n", "element", "epilogue", "scale_w", "reduction", "operands"} <= known.keys()
    assert {"select", "run", "guarantee", "descriptor_type", "pack"} <= members("GemmSparse24Plan").keys()
    assert {"address", "shape", "of", "nbytes_spanned"} <= members("TensorView").keys()
    assert {"dtype", "itemsize"} <= members("ElementKind").keys()
    assert "F32" not in members("ElementKind")


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(CLASSES)))
def test_every_function_explains_its_arguments_and_errors(name):
    doc = inspect.getdoc(getattr(sparse24_plans, name))
    assert "Raises" in doc


needs_pdoc = pytest.mark.skipif(importlib.util.find_spec("pdoc") is None, reason="pdoc is not installed")


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """Built as README.md says, but without sources and search, which no test reads; a warning is an error."""
    out = tmp_path_factory.mktemp("reference")
    words = re.search(r"`python (-m pdoc .*?)`", (ROOT / "README.md").read_text())
    command = [word if word != "reference" else str(out) for word in words[1].split()]
    strict = [sys.executable, "-W", "error::UserWarning", *command, "--no-show-source", "--no-search"]
    done = subprocess.run(strict, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Warn" not in done.stderr
    return out


@needs_pdoc
def test_every_name_and_member_is_in_the_reference(pages):
    text = (pages / "sparse24_plans.html").read_text()
    assert [name for name in NAMES if f'id="{name}"' not in text] == []
    for name in CLASSES:
        kind = getattr(sparse24_plans, name)
        own = {*vars(kind), *described_fields(kind)} & members(name).keys()
        assert [member for member in own if f'id="{name}.{member}"' not in text] == [], name
