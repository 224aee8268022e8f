"""Processes that form a group of torch.distributed (gloo) and run the tests' checks side by side.

Imports take seconds, so the processes are forks of one that has imported what they need, and a module's
checks share a world. Nothing waits for ever: neither the processes for one another, nor the test for them.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 120


class World:
    """``ranks`` processes. A check is a function of ``module``, called in each of them."""

    def __init__(self, ranks: int, folder: Path, module: str) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([module, "torch._dynamo.backends.debugging"])
        self.ranks = ranks
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, ranks, str(folder / "store"), there), daemon=True
            )
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def run(self, check: Callable[..., Any], *args: Any) -> list[Any]:
        """Return ``check(*args)`` of each rank. AssertionError has the traceback of a rank that failed."""
        for end in self._ends:
            end.send((check, args))
        waiting, found = dict(enumerate(self._ends)), {}
        while waiting:
            ready = wait(waiting.values(), LIMIT_S)
            if not ready:
                self.close()
                raise AssertionError(f"ranks {sorted(waiting)} gave no answer in {LIMIT_S} s")
            for rank, end in list(waiting.items()):
                if end in ready:
                    found[rank] = _received(end, rank)
                    del waiting[rank]
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in sorted(found.items()) if not good]
        assert not failed, "\n".join(failed)
        return [found[rank][1] for rank in range(self.ranks)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)


def four_ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[World]:
    """Yield the world of a module of tests, which has this as a fixture; most checks use it as two pairs."""
    world = World(4, tmp_path_factory.mktemp("world"), request.module.__name__)
    yield world
    world.close()


def _received(end: Connection, rank: int) -> tuple[bool, Any]:
    try:
        good, value = end.recv()
    except EOFError:
        return False, "the process ended"
    return good, value


def _serve(rank: int, ranks: int, store: str, end: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    shared = dist.FileStore(store, ranks)
    dist.init_process_group(
        "gloo", store=shared, rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT_S / 2)
    )
    while True:
        try:
            check, args = end.recv()
        except EOFError:
            return
        try:
            answer = (True, check(*args))
            pickle.dumps(answer)
        except BaseException:  # noqa: BLE001 - the test raises it
            answer = (False, traceback.format_exc())
        end.send(answer)
