"""Work on the host in blocks, on every core that the process may use.

NumPy releases the interpreter's lock inside its passes, so threads share the work. Each call starts threads
and ends them, so that a fork breaks nothing, and any thread may call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from threading import Lock, Thread
from typing import TypeVar

T = TypeVar("T")

_MAX_THREADS = 16
"""Most threads of a call. With more, memory bandwidth is the limit."""


def cores() -> int:
    """Number of cores that the process may use, at most 16."""
    try:
        found = len(os.sched_getaffinity(0))
    except AttributeError:  # some systems lack it
        found = os.cpu_count() or 1
    return min(found, _MAX_THREADS)


def for_each(work: Callable[[T], object], blocks: Iterable[T]) -> None:
    """Call ``work`` on every block, on all cores. The blocks' results must not overlap.

    The threads see the caller's context, which includes NumPy's error state. If ``work`` raises, no further
    blocks are begun, and the exception of the first failed block, in their order, is raised.
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
            except BaseException as error:  # noqa: BLE001 - nothing may be written after an interrupt
                queue.failures[-1] = error
    if queue.failures:
        raise queue.failures[min(queue.failures)]


class _Queue(Iterator[tuple[int, T]]):
    """Blocks, taken one at a time, in order, until one fails."""

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
    """Started threads, fewer than ``count`` if the system refuses more."""
    threads: list[Thread] = []
    for _ in range(count):
        thread = Thread(target=copy_context().run, args=(work,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # "can't start new thread": a limit, or the interpreter is ending
            break
        threads.append(thread)
    return threads
