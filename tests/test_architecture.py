"""Privacy, sizes and side effects of imports, which the import contracts in pyproject.toml can't check."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import sparse24_plans

PACKAGE = Path(sparse24_plans.__file__).parent
ROOT = PACKAGE.parent
MODULES = {
    path.relative_to(PACKAGE).as_posix(): path
    for folder, _, names in os.walk(PACKAGE, followlinks=True)
    for path in sorted(Path(folder, name) for name in names)
    if path.suffix == ".py"
}
MAX_LINES, MAX_LINES_OF_A_FUNCTION = 500, 60


every_module = pytest.mark.parametrize("folder", sorted({os.path.dirname(module) for module in MODULES}))


def modules_in(folder: str) -> list[str]:
    return [module for module in MODULES if os.path.dirname(module) == folder]


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(parsed(module)))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def defined(module: str) -> frozenset[str]:
    """Every name that the module binds, attributes and fields among them."""
    found: set[str] = set()
    for node in nodes(module):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


@cache
def private_homes() -> dict[str, set[str]]:
    """Private name -> the folders whose modules define it."""
    homes = defaultdict(set)
    for module in MODULES:
        for name in filter(is_private, defined(module)):
            homes[name].add(os.path.dirname(module))
    return homes


def reached(module: str) -> list[str]:
    """The private names of others that the module takes: from a module of ours, or off an object.

    An object's are the business of the folder that its class is in, and of classes derived from it.
    """
    taken, homes = [], private_homes()
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom) and node.level:
            taken += [alias.name for alias in node.names if is_private(alias.name) and node.module]
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in defined(module):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            where = homes.get(node.attr, set())
            if where and not own and os.path.dirname(module) not in where:
                taken.append(ast.unparse(node))
    return [name for name in taken if name not in ("_vendor", "_version")]


@every_module
def test_no_module_reaches_into_anothers_private_names(folder):
    assert {module: names for module in modules_in(folder) if (names := reached(module))} == {}


@every_module
def test_no_module_and_no_function_is_long(folder):
    for module in modules_in(folder):
        assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES, module
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        lengths = {
            node.name: node.end_lineno - node.lineno + 1
            for node in nodes(module)
            if isinstance(node, functions)
        }
        long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES_OF_A_FUNCTION}
        assert long == {}, module


def test_the_root_holds_few_modules():
    at_the_root = sorted(module for module in MODULES if "/" not in module)
    assert len(at_the_root) <= 5, at_the_root


ELSEWHERE = {"sys.path", "os.getcwd", "Path.cwd", "runpy.run_path"}
LOADERS = {"__init__.py", "cli/app.py", "plan/families.py", "plan/kernel_table.py", "torch/late_import.py"}
"""Modules that load public names, commands, families, kernels or integrations by relative names."""


@every_module
def test_code_is_loaded_from_the_package_alone(folder):
    for module in modules_in(folder):
        attributes = (node for node in nodes(module) if isinstance(node, ast.Attribute))
        last = {name.rpartition(".")[2] for name in ELSEWHERE}
        names = {ast.unparse(node) for node in attributes if node.attr in last}
        assert names.isdisjoint(ELSEWHERE), module
        calls = [node for node in nodes(module) if isinstance(node, ast.Call)]
        loads = [call for call in calls if ast.unparse(call.func).endswith("import_module")]
        others = [ast.unparse(call.args[0]) for call in loads]
        assert module in LOADERS or set(others) <= {"'torch'"}, module


IMPORTS = """
import sys
import sparse24_plans
heavy = {"cupy", "cuda", "torch", "jax", "numba", "typer", "rich", "numpy", "pydantic"}
print(sorted(heavy & sys.modules.keys()))
"""


def test_importing_the_package_touches_no_cuda_and_no_framework():
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# Documents ------------------------------------------------------------------------------------------


DOCUMENTS = [ROOT / name for name in ("README.md", "VENDOR.md", "docs", "examples/README.md")]
OURS = ("sparse24_plans/", "vendor/", "kernels_cu/", "tests/", "docs/", "examples/", "benchmarks/")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_documents_name_is_there(document):
    texts = [path.read_text() for path in (document.glob("*.md") if document.is_dir() else [document])]
    named = {name for text in texts for name in re.findall(r"`([^`\s]+)`", text)}
    files = {name for name in named if name.startswith(OURS) and not re.search(r"[<>]", name)}
    assert [name for name in sorted(files) if not list(ROOT.glob(name))] == []
