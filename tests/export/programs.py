"""The programs in examples/export, compiled, and the folder that they run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.documents import ROOT
from tests.export.c_library import FLAGS

EXAMPLES = ROOT / "examples" / "export"
EXAMPLE = ROOT / "examples" / "13_export_to_c.py"
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def write_folder(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(EXAMPLE), str(folder)]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=600)


def build(language: str, plans: Path, folder: Path, driver: str) -> Path:
    """Build the program of one language, with the C code of the exported folder ``plans``."""
    code, program = folder / "sparse24_export.o", folder / f"run-{language}"
    source, include = str(EXAMPLES / f"run.{language}"), f"-I{plans}"
    subprocess.run(["cc", *FLAGS, "-c", str(plans / "sparse24_export.c"), "-o", str(code)], check=True)
    libraries = [str(code), driver, "-ldl", "-lpthread"]
    commands = {
        "c": ["cc", "-std=c99", *WARNINGS, include, source, *libraries],
        "cpp": ["c++", "-std=c++17", *WARNINGS, include, source, *libraries],
        "rs": ["rustc", "--edition=2021", "-Dwarnings", *(f"-Clink-arg={one}" for one in libraries), source],
    }
    subprocess.run([*commands[language], "-o", str(program)], check=True)
    return program


def run(program: Path, folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(folder)]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
