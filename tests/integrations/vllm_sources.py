"""vLLM's sources for the tests, without what its wheel compiles: modules that no test calls are stubs.

``python -m tests.integrations.vllm_sources FOLDER`` puts the sources into the folder. The status is 75 if
PyPI can't be reached.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import Request, urlopen

VERSION, SHA256 = "0.33.0", "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
INDEX = "https://pypi.org/simple/vllm/"
STUBS = ("llguidance", "uvloop", "xgrammar")


class _Stub(ModuleType):
    """A module in which every public name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Stubs(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in STUBS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """The stub is complete."""


def stub_what_is_compiled() -> None:
    if find_spec("vllm") is not None and not any(isinstance(one, _Stubs) for one in sys.meta_path):
        sys.meta_path.append(_Stubs())


def fetch(folder: str) -> None:
    """Unpack the Python files of the source distribution, checked by its hash."""
    asked = Request(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urlopen(asked, timeout=15) as answer:
        files = json.load(answer)["files"]
    name = f"vllm-{VERSION}.tar.gz"
    (url,) = (urljoin(INDEX, one["url"]) for one in files if one["filename"] == name)
    with urlopen(url, timeout=60) as answer:
        archive = answer.read()
    if hashlib.sha256(archive).hexdigest() != SHA256:
        raise SystemExit(f"{url}: expected the SHA-256 {SHA256}, got another")
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        members = [one for one in packed if one.name.endswith(".py") and one.isreg()]
        for one in members:
            one.name = one.name.partition("/")[2]
        members = [one for one in members if one.name.startswith("vllm/")]
        packed.extractall(folder, members, filter="data")


if __name__ == "__main__":
    try:
        fetch(sys.argv[1])
    except HTTPError:
        raise
    except OSError as error:
        print(f"{INDEX}: {error}", file=sys.stderr)
        raise SystemExit(75) from error
