"""Work on the host in blocks, on every core that the process may use.

NumPy lets go of the interpreter's lock inside its passes, so threads share the work. A call starts its own
threads and ends them: nothing is left behind that a fork would break, and callers may call from threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from threading import Lock, Thread
from typing import TypeVar

T = TypeVar("T")

_MOST = 16
"""Threads: beyond, memory is the limit."""


def cores() -> int:
    """Cores that the process may use, at most 16."""
    try:
        found = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        found = os.cpu_count() or 1
    return min(found, _MOST)


def for_each(work: Callable[[T], object], blocks: Iterable[T]) -> None:
    """``work`` on every block, on all cores. The blocks' results must not overlap.

    The threads see the caller's context, NumPy's error state in it. Raises what ``work`` raised on the first
    block, in their order, that it raised on; blocks that weren't begun by then are left out.
    """
    items = list(blocks)
    if len(items) == 1:
        work(items[0])
        return
    queue = _Queue(enumerate(items))
    helpers = _started(min(cores(), len(items)) - 1, lambda: queue.drain(work))
    queue.drain(work)
    for helper in helpers:
        while helper.is_alive():
            try:
                helper.join()
            except BaseException as error:  # noqa: BLE001 - an interrupt: nothing may be written after it
                queue.failures[-1] = error
    if queue.failures:
        raise queue.failures[min(queue.failures)]


class _Queue(Iterator[tuple[int, T]]):
    """Blocks that are taken one at a time, in order, until one fails."""

    def __init__(self, blocks: Iterator[tuple[int, T]]) -> None:
        self._blocks, self._lock = blocks, Lock()
        self.failures: dict[int, BaseException] = {}

    def __next__(self) -> tuple[int, T]:
        with self._lock:
            if self.failures:
                raise StopIteration
            return next(self._blocks)

    def drain(self, work: Callable[[T], object]) -> None:
        for number, block in self:
            try:
                work(block)
            except BaseException as error:  # noqa: BLE001 - an interrupt too ends the others' work
                self.failures[number] = error


def _started(count: int, work: Callable[[], None]) -> list[Thread]:
    """Threads at work; fewer than ``count`` where the system gives no more."""
    threads: list[Thread] = []
    for _ in range(count):
        thread = Thread(target=copy_context().run, args=(work,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # "can't start new thread": a limit, or the interpreter is ending
            break
        threads.append(thread)
    return threads
