"""The hostile part of the fuzzer: every public call is attacked; what hangs or is untyped is found."""

from __future__ import annotations

import enum
import inspect
import os
import time
from pathlib import Path

import numpy as np
import pytest

import sparse24_plans
from sparse24_plans import InvalidProblemError
from sparse24_plans.device.tensors import contiguous_strides

from ..support import check_each
from . import hostile, worker
from .hostile import Attack, check_attack, draw_attack
from .hostile_calls import CALLS
from .hostile_registry import Call, Prepared
from .hostile_values import VALUES
from .problems import draw

REFUSED_HERE = {
    *("tune", "CompressSparse24Plan.check(compress_sparse24)"),
    "PruneQuantizeSparse24Plan.check(prune_quantize_sparse24)",
    *(f"BlockSparse{one}Plan.update" for one in ("Matmul", "Softmax", "Attention", "Conv2d")),
}
"""Calls that need a GPU, to tune for or to update on, or cells that are 2:4, which random cells are not."""
WITHOUT_ARGUMENTS = {
    *(
        "Bound",
        "Bound.launch",
        "Caller",
        "Caller.launch",
        "GemmSparse24TokenPlans",
        "Exported",
        "RecordedRun",
        "Verdict",
        "Device",
        "Explanation",
        "KernelSku",
        "PrecisionGuarantee",
    ),
    *("operands", "unmet", "explain", "workspace_size", "configuration", "configurations"),
    *("mismatch", "promises", "PrecisionGuarantee"),
}
"""Called with what plans give them, or with nothing. Arguments are attacked in ``run``."""


def public_calls() -> set[str]:
    """Names of the public functions, classes and methods."""
    found = set()
    for name in sparse24_plans.__all__:
        thing = getattr(sparse24_plans, name)
        if inspect.isclass(thing) and issubclass(thing, (enum.Enum, BaseException)):
            continue
        if callable(thing):
            found.add(name)
        for kind in thing.__mro__ if inspect.isclass(thing) else ():
            if kind.__module__.startswith("sparse24_plans"):
                found |= {
                    f"{name}.{method}"
                    for method, value in vars(kind).items()
                    if not method.startswith("_")
                    and (inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod)))
                }
    return found


def test_every_public_call_is_attacked():
    attacked = {name.partition("(")[0] for name in CALLS}
    plain = {name for name in public_calls() if name.rpartition(".")[2] in WITHOUT_ARGUMENTS}
    made = {name for name in public_calls() if name.endswith(("Args", "Plan"))}
    assert public_calls() - attacked - plain - made - WITHOUT_ARGUMENTS == set()


def called_in(name: str) -> str:
    """The class or function of a call."""
    return name.partition("(")[0].partition(".")[0]


def works(name: str) -> bool:
    return name not in REFUSED_HERE and not name.endswith("model_validate_strings")


@pytest.mark.parametrize("called", sorted({called_in(name) for name in CALLS if works(name)}))
def test_calls_work_with_the_arguments_that_attacks_replace(called):
    def check(name):
        assert check_attack(Attack(name, ()))

    check_each(check, ({"name": name} for name in CALLS if works(name) and called_in(name) == called))


@pytest.mark.parametrize("case", range(60))
def test_random_attacks(case):
    found = worker.outcome(30_000, 4 * case + 3, "host")
    assert isinstance(draw(30_000, 4 * case + 3, "host"), Attack)
    assert "error" not in found, found["trace"]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        ("GemmSparse24Plan.run(gemm_sparse24_forward)", "x"),
        ("GemmSparse24Plan.run(gemm_sparse24_forward)", "y"),
        ("TuningTable.load", "path"),
    ],
)
def test_every_value_where_an_operand_is_expected(call, argument):
    check_each(check_attack, ({"attack": Attack(call, ((argument, value),))} for value in VALUES))


def test_messages_stay_short_and_encodable_for_any_text():
    """Each run draws a third of the arguments; ``python -m tests.fuzz.sweep`` gives both texts to all."""
    rng = np.random.default_rng()
    drawn = [
        Attack(name, ((argument, str(rng.choice(["long text", "surrogate"]))),))
        for name, call in CALLS.items()
        for argument in call.arguments
        if rng.random() < 1 / 3
    ]
    check_each(check_attack, ({"attack": one} for one in drawn))


@pytest.mark.parametrize(
    ("call", "argument", "value"),
    [
        ("BlockSparseLayout.from_bsr", "block", "huge"),
        ("BlockSparseLayout.from_dense", "block", "huge"),
        ("Explanation", "rows", "endless"),
        ("PackedWeight", "device", "Device"),
        ("PrecisionGuarantee.tolerance", "k", "mock"),
        ("Sparse24Weight", "validate", "empty"),
        ("from_product", "multiply", "broken"),
        ("register_format", "permutation", "broken"),
        ("register_format", "permutation", "endless"),
        ("slice_weight", "start", "huge"),
        ("slice_weight", "stop", "huge"),
        ("split_weight", "sizes", "huge"),
    ],
)
def test_what_attacks_found_stays_mended(call, argument, value):
    check_attack(Attack(call, ((argument, value),)))


def test_an_attack_follows_from_seed_and_number():
    attacks = [draw_attack(np.random.default_rng(seed)) for seed in range(500)]
    assert attacks == [draw_attack(np.random.default_rng(seed)) for seed in range(500)]
    assert len({attack.call for attack in attacks}) > 150
    assert len({value for attack in attacks for _, value in attack.wrong}) > 100


# Detection of errors ------------------------------------------------------------------------------


@pytest.fixture
def played(monkeypatch):
    """A call that a test plays."""

    def play(call, check=lambda: None) -> Attack:
        monkeypatch.setitem(CALLS, "played", Call(lambda folder: Prepared(call, {"it": 1}, check), ("it",)))
        return Attack("played", (("it", "text"),))

    return play


def test_an_untyped_error_is_found(played):
    with pytest.raises(AssertionError, match=r"(?s)'played'.* raised ZeroDivisionError"):
        check_attack(played(lambda it: 1 / 0))


def test_a_typeerror_is_allowed_at_the_call_alone(played):
    def pythons() -> None: ...

    assert not check_attack(played(lambda it: pythons(it)))
    with pytest.raises(AssertionError, match="TypeError"):
        check_attack(played(lambda it: contiguous_strides(3)))


def reads_a_pipe(it: object) -> None:
    os.mkfifo("pipe")
    Path("pipe").read_bytes()


def swallows(it: object) -> None:
    """Python drops what a finaliser raises."""

    class Sleeper:
        def __del__(self) -> None:
            time.sleep(60)

    Sleeper()
    time.sleep(60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "hang",
    [lambda it: time.sleep(60), reads_a_pipe, swallows],
    ids=["sleep", "pipe", "swallows"],
)
def test_a_call_that_hangs_is_found(played, monkeypatch, hang):
    monkeypatch.setattr(hostile, "LIMIT_S", 0.3)
    with pytest.raises(AssertionError, match="takes longer than"):
        check_attack(played(hang))


def test_what_is_written_beyond_is_found(played):
    def fail() -> None:
        raise AssertionError("guard bytes were overwritten")

    with pytest.raises(AssertionError, match="guard bytes"):
        check_attack(played(lambda it: None, fail))


def test_an_error_of_ours_is_a_refusal(played):
    def refuse(it: object) -> None:
        raise InvalidProblemError("it: expected another")

    assert not check_attack(played(refuse))


def test_an_error_of_the_callers_passes(monkeypatch):
    def call(on_layer) -> None:
        on_layer()

    monkeypatch.setitem(CALLS, "played", Call(lambda at: Prepared(call, {}, lambda: None), ("on_layer",)))
    assert not check_attack(Attack("played", (("on_layer", "broken"),)))
