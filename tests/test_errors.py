"""The error tree: kinds, what they carry, what they say, and that they travel."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from sparse24_plans import (
    BackendUnavailableError,
    BufferTooSmallError,
    DriverError,
    FormatError,
    InvalidProblemError,
    MisalignedOperandError,
    Sparse24Error,
    StorageError,
    UnsupportedError,
    WorkspaceTooSmallError,
    errors,
)

ERRORS = {
    InvalidProblemError("x: wrong"): ValueError,
    UnsupportedError("no kernel"): NotImplementedError,
    MisalignedOperandError("x", 16, 0x1004): ValueError,
    WorkspaceTooSmallError(10, 7): ValueError,
    BufferTooSmallError("out", 10, 7): ValueError,
    BackendUnavailableError("pip install it"): RuntimeError,
    FormatError("metadata: wrong", row=3, group=5): ValueError,
    StorageError(28, "no space left", "/some/file"): OSError,
    DriverError("cuLaunchKernel", 700, "the log"): RuntimeError,
}
every_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


def test_every_error_is_listed_here():
    public = {
        kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Sparse24Error) and not name.startswith("_")
    }
    assert {type(error) for error in ERRORS} == public - {Sparse24Error}


@every_error
def test_errors_are_ours_and_of_the_builtin_kind(error):
    assert isinstance(error, Sparse24Error)
    assert isinstance(error, ERRORS[error])


def test_errors_carry_what_a_program_acts_on():
    by_type = {type(error): error for error in ERRORS}
    workspace, buffer = by_type[WorkspaceTooSmallError], by_type[BufferTooSmallError]
    assert (workspace.argument, workspace.needed, workspace.got) == ("workspace", 10, 7)
    assert (buffer.argument, buffer.needed, buffer.got) == ("out", 10, 7)
    misaligned = by_type[MisalignedOperandError]
    assert (misaligned.argument, misaligned.needed, misaligned.address) == ("x", 16, 0x1004)
    assert (by_type[FormatError].row, by_type[FormatError].group) == (3, 5)
    assert (by_type[DriverError].call, by_type[DriverError].code) == ("cuLaunchKernel", 700)
    assert (by_type[StorageError].errno, by_type[StorageError].filename) == (28, "/some/file")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (WorkspaceTooSmallError(10, 7), ("workspace", "10", "7")),
        (BufferTooSmallError("out", 10, 7), ("out", "10", "7")),
        (MisalignedOperandError("x", 16, 0x1004), ("x", "16", "0x1004", "remainder 4")),
        (FormatError("metadata: wrong", row=3, group=5), ("metadata: wrong", "row 3", "group 5")),
        (DriverError("cuLaunchKernel", 700, "the log"), ("cuLaunchKernel", "700", "the log")),
        (StorageError(28, "no space left", "/some/file"), ("no space left", "/some/file")),
    ],
)
def test_messages_say_what_was_needed_and_what_came(error, words):
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    "value", [None, "c", [1], {}, float("nan"), np.arange(2), np.array(["a", "b"])], ids=str
)
def test_a_choice_is_one_of_those_known(value):
    """Comparing an array has no single truth."""
    errors.check_choice("mode", "a", "ab")
    with pytest.raises(InvalidProblemError, match="mode: expected one of a, b, got "):
        errors.check_choice("mode", value, "ab")


@every_error
def test_a_message_fits_into_any_log(error):
    """However long, and whatever characters, the text is that a caller or a file gave."""
    text = "begin" + 50_000 * "\ud800" + "end"
    long = type(error)(28, text, text) if isinstance(error, OSError) else copy_with(error, text)
    said = str(long)
    assert len(said.encode()) < 40_000
    assert "begin" in said
    assert "end" in said
    assert str(pickle.loads(pickle.dumps(long))) == said
    assert long.args[-1] == text


def copy_with(error: Sparse24Error, message: str) -> Sparse24Error:
    made = type(error).__new__(type(error), message)
    made.__dict__.update(error.__dict__)
    return made


def test_a_format_error_needs_no_place():
    error = FormatError("not a safetensors file")
    assert (error.row, error.group, str(error)) == (None, None, "not a safetensors file")


@every_error
def test_errors_travel_between_processes(error):
    """Worker processes hand their errors back pickled."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
