"""The exported C code and a stub of the CUDA driver, compiled and called through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import sparse24_plans.export

SOURCES = Path(sparse24_plans.export.__file__).parent / "c"
STUB = Path(__file__).parent / "stub_driver.c"
FLAGS = ("-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-D_POSIX_C_SOURCE=200809L")


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 248)]


class CPlan(ctypes.Structure):
    _fields_ = [
        ("library", ctypes.c_void_p),
        ("plan", ctypes.c_void_p),
        ("row", ctypes.c_void_p),
        ("n", ctypes.c_int64),
    ]


class COperand(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("stride", ctypes.c_int64)]


class Promises(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint32), ("kernel", ctypes.c_char_p), ("guarantee", ctypes.c_char_p)]


class Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("kind", "grid", "threads", "shared_bytes", "early", "byte")),
        *((name, ctypes.c_uint64) for name in ("stream", "address", "nbytes")),
        ("code", ctypes.c_char * 1024),
        ("symbol", ctypes.c_char * 64),
        ("parameters", ctypes.c_ubyte * 4096),
    ]


class RefusedError(Exception):
    def __init__(self, error: Error) -> None:
        super().__init__(error.text.decode())
        self.code = error.code


class C(NamedTuple):
    """The compiled library and the stub, which it finds because its file name is the driver's."""

    library: Any
    stub: Any

    def open(self, folder: Path) -> ctypes.c_void_p:
        opened, error = ctypes.c_void_p(), Error()
        self._raise(
            self.library.s24_open(str(folder).encode(), ctypes.byref(opened), ctypes.byref(error)), error
        )
        return opened

    def find(self, opened: ctypes.c_void_p, problem: str, n: int) -> CPlan:
        plan, error = CPlan(), Error()
        found = self.library.s24_find(
            opened, problem.encode(), ctypes.c_int64(n), ctypes.byref(plan), ctypes.byref(error)
        )
        self._raise(found, error)
        return plan

    def names(self, plan: CPlan) -> list[str]:
        count = self.library.s24_operand_count(ctypes.byref(plan))
        return [self.library.s24_operand_name(ctypes.byref(plan), at).decode() for at in range(count)]

    def check(self, plan: CPlan, operands: list[tuple[int, int]], workspace: int, nbytes: int) -> None:
        self._call(self.library.s24_check, plan, operands, workspace, nbytes)

    def run(
        self, plan: CPlan, operands: list[tuple[int, int]], workspace: int, nbytes: int, stream: int = 0
    ) -> list[Call]:
        """The stub's launches and fills that the run makes."""
        count = ctypes.c_uint.in_dll(self.stub, "stub_count")
        count.value = 0
        self.launch(plan, operands, workspace, nbytes, stream)
        calls = (Call * 16).in_dll(self.stub, "stub_calls")
        return [Call.from_buffer_copy(calls[at]) for at in range(count.value)]

    def launch(
        self, plan: CPlan, operands: list[tuple[int, int]], workspace: int, nbytes: int, stream: int
    ) -> None:
        self._call(self.library.s24_run, plan, operands, workspace, nbytes, ctypes.c_void_p(stream))

    def _call(
        self,
        function: Any,
        plan: CPlan,
        operands: list[tuple[int, int]],
        workspace: int,
        nbytes: int,
        *more: Any,
    ) -> None:
        error, given = Error(), (COperand * len(operands))(*operands)
        scratch = ctypes.c_uint64(workspace), ctypes.c_uint64(nbytes)
        self._raise(function(ctypes.byref(plan), given, *scratch, *more, ctypes.byref(error)), error)

    @staticmethod
    def _raise(code: int, error: Error) -> None:
        if code:
            assert code == error.code
            assert error.text
            raise RefusedError(error)


def source_in_one_set(folder: Path) -> Path:
    """The C code in a folder, with one hash for all calls: those that a library keeps share a set."""
    source, code = folder / "sparse24_export.c", (SOURCES / "sparse24_export.c").read_text()
    hashed = "return (hash ^ hash >> 32) * factor | HASHED;"
    assert code.count(hashed) == 1
    source.write_text(code.replace(hashed, "return hash ? HASHED : HASHED;"))
    return source


def compiled(folder: Path, *, stub: bool = True, source: Path = SOURCES / "sparse24_export.c") -> C:
    """Compile both. The stub is loaded first, so that the library's dlopen finds it and not the driver."""
    driver = ctypes.CDLL(str(compiled_stub(folder))) if stub else None
    library = folder / "libsparse24_export.so"
    shared = ("-shared", "-fPIC", *FLAGS, f"-I{SOURCES}")
    subprocess.run(["cc", *shared, str(source), "-o", str(library), "-ldl", "-lpthread"], check=True)
    found = ctypes.CDLL(str(library))
    found.s24_operand_name.restype = found.s24_problem.restype = ctypes.c_char_p
    found.s24_workspace.restype, found.s24_guarantee.restype = ctypes.c_uint64, Promises
    found.s24_close.restype = None
    return C(found, driver)


def compiled_stub(folder: Path, *macros: str) -> Path:
    """The stub in a folder, under the driver's name. The macro PROGRAMS gives it memory and graphs."""
    driver = folder / "libcuda.so.1"
    shared = ("-shared", "-fPIC", *FLAGS, "-Wl,-soname,libcuda.so.1", *macros)
    subprocess.run(["cc", *shared, str(STUB), "-o", str(driver)], check=True)
    return driver
