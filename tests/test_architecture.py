"""The arrows between modules: low ones import only lower ones, in no circle, and nobody's private names."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import sparse24_plans

PACKAGE = Path(sparse24_plans.__file__).parent
SOURCES = {
    (Path(folder, name).relative_to(PACKAGE).with_suffix("")).as_posix().replace("/", "."): Path(folder, name)
    for folder, _, names in os.walk(PACKAGE, followlinks=True)
    for name in sorted(names)
    if name.endswith(".py")
}


def resolved(parts: list[str]) -> str | None:
    """The module of ours with this dotted path, or None."""
    dotted = ".".join(parts)
    package = f"{dotted}.__init__" if parts else "__init__"
    return dotted if dotted in SOURCES else package if package in SOURCES else None


def imported(module: str) -> list[tuple[str, str | None, str]]:
    """(module of ours, name taken from it or None for the module itself, name it is bound to)."""
    found = []
    folder = module.split(".")[:-1]
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                bound, itself = alias.asname or alias.name, resolved([*base, alias.name])
                home = itself or resolved(base)
                assert home is not None, f"{module} imports {alias.name} from nowhere"
                found.append((home, None if itself else alias.name, bound))
    return found


def test_the_sources_are_found():
    assert {"__init__", "registry", "backends.host", "_vendor.cublaslt_abi"} <= set(SOURCES)
    assert ("errors", "InvalidProblemError", "InvalidProblemError") in imported("vocab")
    assert ("_vendor.cublaslt_abi", None, "cublaslt_abi") in imported("backends.inflate_cublas")


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("errors", set()),
        ("vocab", {"errors"}),
        ("tensors", {"errors", "vocab"}),
        ("canonical", {"errors", "vocab"}),
        ("limits", {"vocab"}),
        ("registry", {"errors", "vocab", "limits"}),
        ("weights", {"errors", "vocab", "tensors", "devices", "canonical"}),
        ("jit", {"errors", "vocab", "tensors", "_vendor.cuda_driver_abi"}),
    ],
)
def test_a_low_module_imports_only_lower_ones(module, allowed):
    assert {home for home, _, _ in imported(module)} <= allowed


@pytest.mark.parametrize("module", [name for name in SOURCES if name.startswith("_vendor")])
def test_vendor_code_imports_nothing_of_ours(module):
    assert {home for home, _, _ in imported(module) if not home.startswith("_vendor")} == set()


@pytest.mark.parametrize("module", [name for name in SOURCES if not name.startswith("backends")])
def test_only_backends_import_backends(module):
    """``gemm`` loads the chosen one by name."""
    assert not [home for home, _, _ in imported(module) if home.startswith("backends")]


def test_arrows_point_one_way():
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"a circle: {' -> '.join((*trail, module))}"
        if module in done:
            return
        for home, name, _ in imported(module):
            if (home, name) != ("__init__", "__version__"):
                visit(home, (*trail, module))
        done.add(module)

    for module in SOURCES:
        visit(module, ())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("module", SOURCES)
def test_no_module_reaches_into_anothers_private_names(module):
    taken = [f"{home}.{name}" for home, name, _ in imported(module) if name is not None and is_private(name)]
    modules = {bound for _, name, bound in imported(module) if name is None}
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            taken += [f"{node.value.id}.{node.attr}"] * is_private(node.attr)
    assert not taken
