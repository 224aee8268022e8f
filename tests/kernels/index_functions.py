"""Index functions of kernels, which the compiler compares with tables of a model, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sparse24_plans.device.jit import compiler


class Table(NamedTuple):
    """The values that a kernel's expression must have."""

    expression: str
    """CUDA in the indices ``i0``, ``i1`` and so on, one for each dimension of ``values``."""

    values: ArrayLike
    """One integer for each combination of indices."""


def ptx_of(source: str, defines: Mapping[str, int]) -> str:
    """Return a kernel's code before ptxas."""
    return _ptx(compiler.closure(source), source, defines)


def _ptx(files: Mapping[str, bytes], name: str, defines: Mapping[str, int]) -> str:
    """Compile for a virtual architecture: the compiler stops before ptxas, which takes most of its time."""
    found, _ = compiler._compile(files, compiler.options("compute_90a", defines), "getPTX", name)
    return found.decode() if isinstance(found, bytes) else found


def check_tables(header: str, defines: Mapping[str, int], *tables: Table) -> None:
    """Compile ``header``, a file below kernels_cu/, with an assertion for each table.

    Raises DriverError with the compiler's log, which names the expression, if any value differs.
    """
    text = f'#include "{header}"\n' + "".join(map(_assertion, range(len(tables)), tables))
    files = {"index_functions.cu": text.encode(), **compiler.closure(header)}
    _ptx(files, header, defines)


def _assertion(number: int, table: Table) -> str:
    """Return CUDA that compiles if the expression has the table's values."""
    values = np.asarray(table.values).astype(np.int64)
    assert values.size
    loops = " ".join(f"for (int i{i} = 0; i{i} < {size}; ++i{i})" for i, size in enumerate(values.shape))
    return f"""
constexpr long long table{number}[] = {{{",".join(map(str, values.ravel().tolist()))}}};
constexpr bool equals{number}() {{
  int place = 0;
  {loops} if ((long long)({table.expression}) != table{number}[place++]) return false;
  return true;
}}
static_assert(equals{number}(), "{table.expression}");
"""
