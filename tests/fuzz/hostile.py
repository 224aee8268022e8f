"""Every public call with hostile arguments: it works, or raises an error of ours, in a limited time.

An attack is a call and, for some of its arguments, the names of hostile values. It runs in a folder of its
own; what it may write lies between guard bytes.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparse24_plans import Sparse24Error

from .hostile_calls import CALLS
from .hostile_registry import PATH_ARGUMENTS
from .hostile_values import PATHS, PLAIN, TENSORS, VALUES

LIMIT_S = 20.0
"""A call that takes longer hangs. None of them has much to do."""
LONGEST_MESSAGE = 5000
"""Bytes of a message in UTF-8. A log may hold it."""
FUNCTIONS = ("on_", "multiply")
"""How the names of arguments begin that are functions of the caller's."""


@dataclass(frozen=True)
class Attack:
    """A public call, and which of its arguments are hostile: (argument, name of the value)."""

    call: str
    wrong: tuple[tuple[str, str], ...]


def draw_attack(rng: np.random.Generator) -> Attack:
    """Any call, with one hostile argument, sometimes two."""
    call = _pick(rng, CALLS)
    arguments = list(CALLS[call].arguments)
    count = min(len(arguments), 1 if rng.random() < 0.8 else 2)
    hit = [arguments[at] for at in rng.permutation(len(arguments))[:count]]
    return Attack(call, tuple((name, _value(rng, name)) for name in hit))


def _value(rng: np.random.Generator, argument: str) -> str:
    if argument in PATH_ARGUMENTS and rng.random() < 0.7:
        return _pick(rng, PATHS)
    return _pick(rng, PLAIN if rng.random() < 0.5 else TENSORS if rng.random() < 0.8 else PATHS)


def _pick(rng: np.random.Generator, options: Any) -> str:
    found = list(options)
    return str(found[rng.integers(len(found))])


class CallersError(Exception):
    """An error that the caller's function raised, which passes through unchanged."""


def _marked(function: Callable[..., object]) -> Callable[..., object]:
    def marked(*given: object, **more: object) -> object:
        try:
            return function(*given, **more)
        except Exception as error:
            raise CallersError from error

    return marked


class Hangs(BaseException):
    """No Exception: nothing may take it for an error of an argument."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hangs in a block that takes longer, again where C code swallows it. For main threads."""

    def ring(*_: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_empty: list[tempfile.TemporaryDirectory[str]] = []
"""The folder of the last attack, if nothing is in it: most attacks take less time than a new one."""


@contextmanager
def _own_folder() -> Iterator[Path]:
    before = Path.cwd()
    folder = _empty.pop() if _empty else tempfile.TemporaryDirectory(prefix="hostile-")
    os.chdir(folder.name)
    try:
        yield Path(folder.name)
    finally:
        os.chdir(before)
        if any(Path(folder.name).iterdir()):
            folder.cleanup()
        else:
            _empty.append(folder)


def _new_folder(path: Path) -> Path:
    path.mkdir()
    return path


def check_attack(attack: Attack) -> bool:
    """Whether the call worked; False: it was refused. Raises AssertionError for anything else."""
    with _own_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = CALLS[attack.call].prepare(folder)
        wrong = {
            name: VALUES[value](_new_folder(folder / f"for {name}") if value in PATHS else folder)
            for name, value in attack.wrong
        }
        for name, one in wrong.items():
            if name.startswith(FUNCTIONS) and callable(one):
                wrong[name] = _marked(one)
        served = _served(lambda: prepared.call(**{**prepared.arguments, **wrong}), attack)
        prepared.check()
        return served


def _served(call: Callable[[], object], attack: Attack) -> bool:
    try:
        with limited(LIMIT_S):
            found = call()
            if isinstance(found, Iterator):
                list(found)
            repr(found)
    except Sparse24Error as error:
        if len(str(error).encode()) > LONGEST_MESSAGE:
            raise AssertionError(f"{attack} has a message of {len(str(error))} characters") from error
        return False
    except CallersError:
        return False
    except Hangs:
        raise AssertionError(f"{attack} takes longer than {LIMIT_S:.0f} s") from None
    except Exception as error:  # noqa: BLE001 - what is looked for
        if isinstance(error, TypeError) and not _inside(error):
            return False  # Python's own: the call's syntax
        where = "".join(traceback.format_exception(error))
        raise AssertionError(f"{attack} raised {type(error).__name__}\n{where}") from None
    return True


def _inside(error: Exception) -> bool:
    """Whether the error arose behind the call, not at it."""
    *_, last = traceback.walk_tb(error.__traceback__)
    return not str(last[0].f_globals.get("__name__")).startswith("tests.")
