"""C++ headers of the structs that kernels take, made from their Python declarations.

``python -m tests.kernels.parameter_headers`` writes the headers below kernels_cu/.
"""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import textwrap
from collections.abc import Iterator

import sparse24_plans
from sparse24_plans.device.jit.compiler import KERNEL_FOLDER
from sparse24_plans.device.jit.structs import Field, KernelParams

WITH_KERNELS = ("gemm", "prepare", "blocksparse", "weights", "device")
"""Subpackages whose modules declare structs."""
COLUMNS = 120


def declared_structs() -> list[type[KernelParams]]:
    """Every declared struct, by its header and name."""
    for family in WITH_KERNELS:
        package = importlib.import_module(f"{sparse24_plans.__name__}.{family}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    ours = f"{sparse24_plans.__name__}."
    found = [
        one
        for one in KernelParams.__subclasses__()
        if hasattr(one, "declared") and one.__module__.startswith(ours)  # the decorator leaves the bare class
    ]
    return sorted(found, key=lambda one: (one.header, one.__name__))


def headers() -> dict[str, str]:
    """The text of every header, by its path below kernels_cu/."""
    found: dict[str, list[type[KernelParams]]] = {}
    for struct in declared_structs():
        found.setdefault(struct.header, []).append(struct)
    return {path: header(path, structs) for path, structs in found.items()}


def header(path: str, structs: list[type[KernelParams]]) -> str:
    """A header with ``structs``, which stand in the order of their nesting."""
    nested = {struct: [one.ctype for one in struct.declared.values()] for struct in structs}
    structs = sorted(structs, key=lambda one: sum(one in types for types in nested.values()), reverse=True)
    used = {one.header for types in nested.values() for one in types if hasattr(one, "header")}
    includes = sorted({"common/types.cuh", *used} - {path})
    modules = sorted({one.__module__ for one in structs})
    lines = [
        f"// Written from {', '.join(modules)}: edit the declaration there,",
        "// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.",
        "#pragma once",
        *(f'#include "{one}"' for one in includes),
    ]
    for struct in structs:
        lines += ["", *_struct(struct)]
    return "\n".join(lines) + "\n"


def _struct(struct: type[KernelParams]) -> Iterator[str]:
    name = struct.__name__
    yield f"struct {name} {{"
    for key, one in struct.declared.items():
        yield from textwrap.wrap(one.about, COLUMNS, initial_indent="  // ", subsequent_indent="  // ")
        yield f"  {_declaration(key, one)};"
    yield "};"
    yield f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});"
    for key in struct.declared:
        yield f"static_assert(S24_OFFSET({name}, {key}) == {getattr(struct, key).offset});"


def _declaration(name: str, one: Field) -> str:
    return f"{one.cxx} {name}[{one.length}]" if one.length else f"{one.cxx} {name}"


def main() -> None:
    for path, text in headers().items():
        target = KERNEL_FOLDER / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)


if __name__ == "__main__":
    main()
