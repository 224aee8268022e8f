"""Sizes, elements, devices, flags and numbers of any library are accepted.

Nothing is taken for what it isn't: True is no size, "yes" no flag, "8" no number.
"""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from sparse24_plans import (
    BackendUnavailableError,
    Device,
    ElementKind,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    GuaranteeRequirement,
    InvalidProblemError,
    PackedWeight,
    PlanPreference,
    PrecisionGuarantee,
    PruneSparse24Descriptor,
    Sparse24Weight,
    TensorView,
    TuningTable,
    explain,
    from_foreign,
    to_foreign,
)
from sparse24_plans.device import devices
from sparse24_plans.vocab import IN_MEMORY, element_kind

from .sample_devices import gpu_of

HUGE = 10**5000  # Python refuses to print it
PROBLEM = {"n": 4, "m": 16, "k": 8, "element": "f32"}


# Sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.uint64])
def test_numpys_integers_are_sizes(kind):
    given = GemmSparse24Descriptor(n=kind(4), m=kind(16), k=kind(8), element="f32")
    assert given == GemmSparse24Descriptor(**PROBLEM)
    assert hash(given) == hash(GemmSparse24Descriptor(**PROBLEM))
    assert {type(given.n), type(given.m), type(given.k)} == {int}
    assert PruneSparse24Descriptor(m=kind(16), k=kind(8), element="f32").m == 16
    assert type(PlanPreference(max_workspace_bytes=kind(3)).max_workspace_bytes) is int


NO_SIZE = [True, "8", 8.0, np.float32(8), np.bool_(True), None, [8], HUGE, -HUGE, 1 << 63, math.nan]


@pytest.mark.parametrize("value", NO_SIZE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["n", "m", "k"])
def test_what_is_no_size(name, value):
    with pytest.raises(InvalidProblemError, match=rf"GemmSparse24Descriptor: .*{name}: .*, got "):
        GemmSparse24Descriptor(**{**PROBLEM, name: value})


# Elements -----------------------------------------------------------------------------------------

TORCH_NAMES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "s8": "int8",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "i32": "int32",
    "u16": "uint16",
    "u8": "uint8",
}


def forms_of(element: ElementKind) -> list[object]:
    """Everything that names it: words, NumPy's and ml_dtypes' types and dtypes, JAX's, PyTorch's."""
    as_in_jax = type(type)("scalar", (), {"dtype": element.dtype})
    found: list[object] = [element, element.value, element.dtype, element.dtype.type, as_in_jax]
    try:
        import torch
    except ImportError:
        return found
    return [*found, getattr(torch, TORCH_NAMES[element])]


@pytest.mark.parametrize("element", IN_MEMORY)
def test_every_form_of_an_element(element):
    for form in forms_of(element):
        assert ElementKind(form) is element
        assert element_kind(form) is element
        assert GuaranteeRequirement(accumulator=form).accumulator is element
        bits = np.zeros((8, 8), element.bits_dtype)
        assert TensorView.of(bits, element=form).element is element


def test_dtypes_as_elements_of_problems_and_weights():
    problem = GemmSparse24Descriptor(n=4, m=16, k=8, element=ml_dtypes.bfloat16, out_element=np.float32)
    assert (problem.element, problem.out_element) == (ElementKind.BF16, ElementKind.F32)
    weight = Sparse24Weight.compress(np.zeros((8, 8), np.uint16), element=np.dtype(ml_dtypes.bfloat16))
    parts = to_foreign("baracuda", weight)
    assert from_foreign("baracuda", parts, element=ml_dtypes.bfloat16).element is ElementKind.BF16


NO_ELEMENT = [
    np.float64,
    np.dtype(">f4"),
    np.dtype("f4,f4"),
    float,
    int,
    bool,
    "float24",
    HUGE,
    object(),
    None,
]


@pytest.mark.parametrize("value", NO_ELEMENT, ids=lambda value: type(value).__name__)
def test_what_is_no_element(value):
    with pytest.raises(InvalidProblemError, match=r"element: .*'?fp8_e4m3'?.*, got "):
        GemmSparse24Descriptor(**{**PROBLEM, "element": value})
    if value is not None:
        with pytest.raises(InvalidProblemError, match=r"element: expected one of f32, .*, got "):
            TensorView.of(np.zeros(4, np.float32), element=value)


# Numbers and flags --------------------------------------------------------------------------------


NO_FACTOR = [True, np.bool_(True), "8", None, [1], b"8", HUGE, math.nan, math.inf, 1j]


@pytest.mark.parametrize("value", NO_FACTOR, ids=lambda value: type(value).__name__)
def test_what_is_no_factor(value):
    with pytest.raises(InvalidProblemError, match=r"alpha: .*, got "):
        GemmSparse24Descriptor(**PROBLEM, alpha=value)


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.float64(2), np.int8(2), np.float16(2)])
def test_numbers_of_any_library_are_factors(value):
    found = GemmSparse24Descriptor(**PROBLEM, alpha=value).alpha
    assert (type(found), found) == (float, 2.0)


@pytest.mark.parametrize("value", ["yes", "true", "1", 1, 0, 1.0, None, [], np.int64(1)])
def test_what_is_no_flag(value):
    for make in (
        lambda: PlanPreference(allow_sm90a=value),
        lambda: GuaranteeRequirement(deterministic=value),
        lambda: PlanPreference(require={"deterministic": value}),
        lambda: PlanPreference.of({"require": {"deterministic": value}}),
    ):
        with pytest.raises(InvalidProblemError, match=r"(allow_sm90a|deterministic): .*, got "):
            make()


def test_numpys_booleans_are_flags():
    assert PlanPreference(allow_sm90a=np.bool_(False)).allow_sm90a is False


@pytest.mark.parametrize("value", [True, "0.1", 0, -1.0, math.nan])
def test_what_bounds_no_error(value):
    with pytest.raises(InvalidProblemError, match=r"max_error_bound: .*, got "):
        GuaranteeRequirement(max_error_bound=value)


def test_numbers_and_flags_of_models_from_strings():
    """Options arrive as text from a command line."""
    found = GuaranteeRequirement.model_validate_strings({"deterministic": "true", "max_error_bound": "0.5"})
    assert found == GuaranteeRequirement(deterministic=True, max_error_bound=0.5)
    for wrong in ({"deterministic": "perhaps"}, {"max_error_bound": "[" * 100_000}, {"typo": "1"}, "text"):
        with pytest.raises(InvalidProblemError, match="GuaranteeRequirement: "):
            GuaranteeRequirement.model_validate_strings(wrong)


# Models -------------------------------------------------------------------------------------------


def test_no_way_round_the_checks_of_a_model():
    problem = GemmSparse24Descriptor(**PROBLEM)
    for make in (
        lambda: problem.model_copy(update={"k": 7}),
        lambda: problem.copy(update={"k": 7}),
        lambda: GemmSparse24Descriptor.model_construct(**{**PROBLEM, "k": 7}),
        lambda: problem.model_copy(update={1: 7}),
        lambda: problem.model_copy(update=7),
        lambda: PlanPreference.of({1: 2}),
        lambda: PlanPreference.of({"require": {1: 2}}),
    ):
        with pytest.raises(InvalidProblemError, match=r", got (7|2|1)"):
            make()
    assert problem.copy(update={"k": 16}) == GemmSparse24Descriptor.model_construct(**{**PROBLEM, "k": 16})


def test_unknown_fields_are_answered_with_the_known_ones():
    with pytest.raises(
        InvalidProblemError, match=r"^PlanPreference: expected fields of max_work.*'required'$"
    ):
        PlanPreference.of({"required": {}})
    with pytest.raises(
        InvalidProblemError, match=r"^GuaranteeRequirement: expected .*, got 'batchinvariant'$"
    ):
        GuaranteeRequirement(batchinvariant=True)


def test_error_names_model_and_path_of_field():
    with pytest.raises(InvalidProblemError) as caught:
        PlanPreference(require={"typo\x1b[31m": 1, "deterministic": "no"})
    message = str(caught.value)
    assert message.startswith("PlanPreference: require.deterministic: ")
    assert (
        f"; require: expected fields of {', '.join(GuaranteeRequirement.model_fields)}, got 'typo" in message
    )
    assert "\x1b" not in message
    with pytest.raises(InvalidProblemError, match=r"^PlanPreference: Input should be "):
        PlanPreference.model_validate(3)


# Constructors, bounds -----------------------------------------------------------------------------


def guarantee() -> PrecisionGuarantee:
    return GemmSparse24Plan.select(GemmSparse24Descriptor(**PROBLEM), device="host").guarantee


@pytest.mark.parametrize("k", [-1, "8", 8.0, True, None, HUGE, 1 << 63], ids=lambda k: type(k).__name__)
def test_an_error_bound_is_of_a_size(k):
    with pytest.raises(InvalidProblemError, match="k: expected an integer from 0 to"):
        guarantee().error_bound(k)
    assert guarantee().error_bound(np.int64(64)) == guarantee().error_bound(64) > 0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"exact": "x"}, "exact"),
        ({"abs_sum": object()}, "abs_sum"),
        ({"out": "f64"}, "out"),
        ({"alpha": [1, 2]}, "alpha"),
        ({"k": -1}, "k"),
    ],
)
def test_a_tolerance_is_of_numbers(change, name):
    good = {"k": 8, "exact": np.ones(3), "abs_sum": np.ones(3), "out": np.float32}
    assert guarantee().tolerance(**good).shape == (3,)
    with pytest.raises(InvalidProblemError, match=f"^{name}: expected "):
        guarantee().tolerance(**{**good, **change})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"layout_id": 3}, "layout_id"),
        ({"m": 8.0}, "m"),
        ({"k": HUGE}, "k"),
        ({"element": 3}, "element"),
        ({"device": "host"}, "device"),
        ({"buffers": 5}, "buffers"),
        ({"buffers": (1, 2)}, "buffers"),
    ],
)
def test_a_packed_weight_checks_its_fields(change, name):
    good = PackedWeight.canonical(Sparse24Weight.compress(np.zeros((8, 8), np.float32)))
    fields = {field: getattr(good, field) for field in PackedWeight.__slots__}
    assert PackedWeight(**{**fields, "m": np.int64(8), "element": "f32"}) == good
    with pytest.raises(InvalidProblemError, match=f"^{name}: expected "):
        PackedWeight(**{**fields, **change})


@pytest.mark.parametrize("fields", [(1, "driver", ()), ("gpu", None, ()), ("gpu", "1", 3), ("gpu", "1", [3])])
def test_a_tuning_table_checks_its_fields(fields):
    with pytest.raises(InvalidProblemError, match=r"^(gpu|driver|entries): expected "):
        TuningTable(*fields)
    for method in ("find", "merged"):
        with pytest.raises(InvalidProblemError, match=r"^(problem|newer): expected "):
            getattr(TuningTable("gpu", "1", ()), method)(3)


# Devices ------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """Eight of them, number 3 current."""
    runtime = SimpleNamespace(getDevice=lambda: 3, getDeviceCount=lambda: 8)
    monkeypatch.setattr(
        devices, "import_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    )
    monkeypatch.setattr(devices, "cuda_properties", lambda ordinal: gpu_of(9, 0, ordinal=ordinal))


def torchs(text: str) -> object:
    return pytest.importorskip("torch").device(text)


class Named:
    """A ``torch.device`` with the two attributes that are read."""

    def __init__(self, kind: object, index: object) -> None:
        self.type, self.index = kind, index

    def __repr__(self) -> str:
        return f"Named({self.type!r}, {self.index!r})"


@pytest.mark.parametrize(
    ("given", "ordinal"),
    [
        (None, 3),
        ("cuda", 3),
        ("cuda:0", 0),
        ("cuda:7", 7),
        (5, 5),
        (np.int64(5), 5),
        (Device("cuda", 2), 2),
        (Named("cuda", None), 3),
        (Named("cuda", 1), 1),
        ("torch cuda", 3),
        ("torch cuda:6", 6),
    ],
    ids=str,
)
def test_every_form_of_a_cuda_device(gpus, given, ordinal):
    if isinstance(given, str) and given.startswith("torch "):
        given = torchs(given.removeprefix("torch "))
    assert devices.resolve(given) == gpu_of(9, 0, ordinal=ordinal)


def test_every_form_of_the_host(gpus):
    torch = pytest.importorskip("torch")
    for given in ("host", "cpu", Device("host", 0), torch.device("cpu"), Named("cpu", None), "cpu:0"):
        assert devices.resolve(given) is devices.HOST_PROPERTIES
        plan = GemmSparse24Plan.select(GemmSparse24Descriptor(**PROBLEM), device=given)
        assert plan is GemmSparse24Plan.select(GemmSparse24Descriptor(**PROBLEM), device="host")
        weight = Sparse24Weight.compress(np.zeros((8, 8), np.float32))
        assert weight.to(given) is weight


NO_DEVICE = [
    *(
        "gpu",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda: 1",
        "cuda:1:1",
        "cuda:" + "9" * 5000,
        "cuda:\u0661",
        "host:1",
        "",
    ),
    *(True, 1.0, -1, HUGE, 1 << 31, b"cuda", ["cuda"], ("cuda", 0), object(), ElementKind.F32),
    *(Device("tpu", 0), Device("cuda", -1), Device("cuda", True), Device("cuda", "0"), Named("mps", 0)),
    *(Named("cuda", 1.0), Named(None, None)),
]


@pytest.mark.parametrize("given", NO_DEVICE, ids=lambda given: type(given).__name__)
def test_what_is_no_device(gpus, given):
    with pytest.raises(InvalidProblemError, match=r"^device: expected .*'cuda:N'.*, got "):
        devices.resolve(given)


def test_a_device_that_is_not_there():
    if devices.cuda_device_count():
        pytest.skip("there is one")
    for given in ("cuda", "cuda:1", 0, Device("cuda", 0), Named("cuda", None)):
        with pytest.raises(BackendUnavailableError):
            devices.resolve(given)


@pytest.mark.parametrize(
    "name", ["x" * 300, "../../../etc/passwd", "a\0b", "\x1b[31m", "nvidia h200/../x", ""]
)
@pytest.mark.parametrize("version", [None, "abc", "0", "0.8", "0.8.0.1", "9" * 5000, "\u0661.\u0662", "-1.2"])
def test_explain_takes_properties_of_any_gpu(name, version):
    """A GPU may report nonsense: its name is looked for in the shipped tables, and never opened."""
    device = gpu_of(9, 0, name=name, cusparselt=version)
    problem = GemmSparse24Descriptor(n=16, m=32, k=32, element="f16")
    found = explain(problem, device=device)
    assert found.chosen == "wgmma_sp"
    reasons = {row: reason for row, _, reason in found.rows}
    served = version in ("0.8", "0.8.0.1")
    assert (reasons["cusparselt"] is None) == served
    assert copy.copy(found) == found
