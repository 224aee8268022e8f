"""Every documented form type-checks: README, docs and examples under mypy, and strings where words are meant.

CI runs pyright's rules over the same modules (.ci/run).
"""

from __future__ import annotations

import inspect
import os
import pydoc
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import sparse24_plans
from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.vocab import Model

from .documents import DOCUMENTS, ROOT, blocks, code_of, write_modules

MODELS = [
    thing
    for thing in (getattr(sparse24_plans, name) for name in sparse24_plans.__all__)
    if inspect.isclass(thing) and issubclass(thing, Model)
]


CONFIGURATION = """
[mypy]
allow_redefinition = true
check_untyped_defs = true
follow_imports = silent
ignore_missing_imports = true
[mypy-torch.*,transformers.*,rich.*]
follow_imports = skip
"""


@dataclass(frozen=True)
class Checked:
    modules: set[str]
    """The names of the modules of what is shown, beside ``forms.py``."""

    errors: dict[str, list[str]]
    """mypy's lines about errors, by the module's name."""


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> Checked:
    """mypy's answers for all of these tests, from one run, which mostly reads the package and NumPy."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("mypy")
    modules = write_modules(folder / "shown")
    forms = folder / "forms.py"
    forms.write_text(FORMS + "\n".join(REFUSED) + "\n")
    (folder / "mypy.ini").write_text(CONFIGURATION)
    options = (f"--config-file={folder / 'mypy.ini'}", f"--cache-dir={os.devnull}")
    command = [sys.executable, "-m", "mypy", *options, *map(str, [*modules, forms])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    count = len({*modules, forms})
    assert f"(checked {count} source files)" in done.stdout, done.stdout + done.stderr
    errors: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if ": error:" in line:
            errors.setdefault(Path(line.partition(":")[0]).name, []).append(line)
    return Checked({module.name for module in modules}, errors)


def test_every_documented_form_type_checks(checked):
    assert {"readme_page.py", "concepts_page.py", "example_01_first_plan_on_the_host.py"} <= checked.modules
    assert {name: lines for name, lines in checked.errors.items() if name != "forms.py"} == {}


def test_pages_are_checked_line_for_line():
    for page in DOCUMENTS:
        lines = code_of(page).splitlines()
        for first, mark, body in blocks(page):
            if mark.startswith("python"):
                assert lines[first - 1 : first - 1 + len(body.splitlines())] == body.splitlines()


FORMS = """
import ml_dtypes
import numpy as np
from sparse24_plans import *

size = np.int64(8)
desc = GemmSparse24Descriptor(
    n=size, m=8, k=np.uint8(8), element=ml_dtypes.bfloat16, out_element=np.dtype(np.float32),
    alpha=np.float32(2),    epilogue="bias", x_order="column", scale_w="row", op="forward",
)
name: str = "f32"
GemmSparse24Descriptor(n=1, m=8, k=8, element=name)
PruneSparse24Descriptor(m=size, k=8, element=np.float16, scores="f32")
TilePruneSparse24Descriptor(m=8, k=8, element="f16", rule="optimal")
MaskSparse24Descriptor(m=8, k=8, element="f16", layout="tiles")
PackSparse24Descriptor(m=8, k=8, element="f16", direction="unpack")
preference = PlanPreference(prefer_backend="host", tier="host", require={"deterministic": True})
PlanPreference(require=GuaranteeRequirement(math_precision="f32", accumulator=np.float32))
for device in (None, 0, size, "cuda:1", Device("cuda", 1)):
    plan = GemmSparse24Plan.select(desc, device=device, preference={"tier": "host"})
element: ElementKind = desc.element
count: int = desc.n
"""
REFUSED = (
    'GemmSparse24Descriptor(n="8", m=8, k=8, element="f32")',
    "GemmSparse24Descriptor(n=8, m=8, k=8)",
    'GemmSparse24Descriptor(n=8, m=8, k=8, element="f32", typo=1)',
    "GemmSparse24Descriptor(n=8, m=8, k=8, element=3)",
    'PlanPreference(allow_sm90a="yes")',
    "GemmSparse24Plan.select(desc, device=1.5)",
)


def test_what_callers_have_type_checks_and_mistakes_do_not(checked):
    first = FORMS.count("\n") + 1
    wrong = {int(line.split(":")[1]) for line in checked.errors["forms.py"]}
    assert wrong == set(range(first, first + len(REFUSED))), checked.errors["forms.py"]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_help_shows_the_fields(model):
    """The signature is complete before the first instance is made."""
    signature = inspect.signature(model)
    assert list(signature.parameters) == list(model.model_fields)
    for name, field in model.model_fields.items():
        required = signature.parameters[name].default is inspect.Parameter.empty
        assert required == field.is_required()
    first_lines = pydoc.plain(pydoc.render_doc(model)).splitlines()[2:8]
    assert all(name in " ".join(first_lines) for name in model.model_fields)


FRESH = """
import inspect
from sparse24_plans import GemmSparse24Descriptor
print(*inspect.signature(GemmSparse24Descriptor).parameters)
"""


def test_help_shows_the_fields_in_a_fresh_process():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(GemmSparse24Descriptor.model_fields)
