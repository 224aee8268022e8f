"""Work on the host in blocks on all cores: the bits and the errors that one group after the other gives."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    CompressSparse24Args,
    CompressSparse24Descriptor,
    CompressSparse24Plan,
    DecompressSparse24Args,
    DecompressSparse24Descriptor,
    DecompressSparse24Plan,
    FormatError,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PruneCompressSparse24Args,
    PruneCompressSparse24Descriptor,
    PruneCompressSparse24Plan,
    PruneSparse24Args,
    PruneSparse24Descriptor,
    PruneSparse24Plan,
    Sparse24Weight,
    prune,
)
from sparse24_plans.weights import canonical, compiled, groups, threads

from ..forks import Fork
from ..plan.cases import PlanCase, equal, random_inputs
from ..support import same_bits
from .canonical_model import assert_is, every_element, model_prune
from .test_canonical_properties import without_payloads

ROWS, K = 37, 24


@pytest.fixture
def two_rows_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "_HOST_STEP", 2 * K)
    monkeypatch.setattr(threads, "cores", lambda: 4)
    with groups.scratch() as space:  # what an earlier block may have left
        cells, words = ("keys", "flags", "kept", "low", "high", "pairs", "first"), ("index", "sound", "masks")
        for name in (*cells, *words, "positions"):
            space.array(name, 8 * K, np.uint64)[:] = 2**64 - 1


@every_element
def test_blocks_give_what_groups_give(two_rows_a_block, element):
    bits = np.random.default_rng(1).integers(0, 2 ** (8 * element.itemsize), (ROWS, K), np.uint64)
    dense = without_payloads(bits.astype(element.bits_dtype), element)
    weight = Sparse24Weight.prune_compress(dense)
    assert_is(weight, model_prune(dense), element, dense.shape)
    pruned = weight.decompress()
    again = Sparse24Weight.compress(pruned)
    assert same_bits(again.decompress(), pruned)
    assert same_bits(prune(dense), pruned)


@pytest.mark.parametrize("element", ["f32", "bf16", "s8"])
def test_plans_give_what_the_short_forms_give(two_rows_a_block, element):
    size = {"m": ROWS, "k": K, "element": element}
    rng = np.random.default_rng(2)
    kind = PruneSparse24Descriptor(**size).element
    dense = rng.integers(0, 2 ** (8 * kind.itemsize), (ROWS, K), np.uint64).astype(kind.bits_dtype)
    weight = Sparse24Weight.prune_compress(dense, element=element)
    pruned, back = np.ones_like(dense), np.ones_like(dense)
    values, metadata = np.ones((ROWS, K // 2), kind.bits_dtype), np.ones((ROWS, K // 8), np.uint16)
    status = np.zeros(8, np.uint8)

    def run(plan, descriptor, args):
        plan.select(descriptor(**size), device="host").run(args)

    def typed(array):
        return array.view(kind.dtype)

    run(PruneSparse24Plan, PruneSparse24Descriptor, PruneSparse24Args(typed(dense), typed(pruned)))
    assert same_bits(typed(pruned), weight.decompress())
    for plan, descriptor, args in (
        (
            PruneCompressSparse24Plan,
            PruneCompressSparse24Descriptor,
            PruneCompressSparse24Args(typed(dense), typed(values), metadata),
        ),
        (
            CompressSparse24Plan,
            CompressSparse24Descriptor,
            CompressSparse24Args(typed(pruned), typed(values), metadata, status),
        ),
    ):
        values[...], metadata[...] = 1, 1
        run(plan, descriptor, args)
        made = Sparse24Weight(typed(values), metadata)
        assert same_bits(made.decompress(), weight.decompress())
    run(DecompressSparse24Plan, DecompressSparse24Descriptor, DecompressSparse24Args(weight, typed(back)))
    assert same_bits(back, pruned)


@given(bad=st.sets(st.tuples(st.integers(0, ROWS - 1), st.integers(0, K // 4 - 1)), min_size=1, max_size=6))
@settings(max_examples=30)
def test_first_bad_group_is_named_whichever_block_is_done_first(bad):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canonical, "_HOST_STEP", 2 * K)
        patch.setattr(threads, "cores", lambda: 4)
        dense = np.zeros((ROWS, K), np.float16)
        for row, group in bad:
            dense[row, 4 * group : 4 * group + 3] = 1
        with pytest.raises(FormatError, match="got 3; prune first") as caught:
            Sparse24Weight.compress(dense)
        assert (caught.value.row, caught.value.group) == min(bad)
        plan = CompressSparse24Plan.select(
            CompressSparse24Descriptor(m=ROWS, k=K, element="f16"), device="host"
        )
        args = CompressSparse24Args(
            dense,
            np.empty((ROWS, K // 2), np.float16),
            np.empty((ROWS, K // 8), np.uint16),
            np.empty(8, np.uint8),
        )
        plan.run(args)
        with pytest.raises(FormatError) as reported:
            plan.check(args)
        assert (reported.value.row, reported.value.group) == min(bad)


# Threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["none", "tensor", "row"])
def test_blocks_of_results_are_finished_as_all_at_once(monkeypatch, scale):
    scales = {"scale_x": scale, "scale_w": scale, "beta": 0.5, "epilogue": "bias_relu"}
    desc = GemmSparse24Descriptor(n=7, m=16, k=16, element="fp8_e4m3", **scales)
    plan = GemmSparse24Plan.select(desc, device="host", preference={"require": {"batch_invariant": True}})
    case = PlanCase(plan, random_inputs(desc))
    want = case.run()
    case.poison()
    monkeypatch.setattr(canonical, "_HOST_STEP", 2 * desc.m)
    assert equal(case.run(), want)


def test_every_block_is_worked_on_once_and_in_callers_context(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 3)
    seen: list[tuple[int, str]] = []
    meet = threading.Barrier(3, timeout=300)

    def work(block: int) -> None:
        if block < 3:
            meet.wait()  # three threads are at work at once
        seen.append((block, np.geterr()["over"]))

    with np.errstate(over="raise"):
        threads.for_each(work, range(50))
    assert sorted(seen) == [(block, "raise") for block in range(50)]


def test_the_first_failure_is_raised_and_no_thread_is_left(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 4)
    before, begun = set(threading.enumerate()), []

    def work(block: int) -> None:
        begun.append(block)
        if block >= 2:
            raise ValueError(block)

    with pytest.raises(ValueError, match=r"^2$"):
        threads.for_each(work, range(10_000))
    assert set(threading.enumerate()) == before
    assert len(begun) < 100


def test_a_system_without_more_threads_gets_its_work_done(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 4)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    threads.for_each(done.append, range(5))
    assert done == list(range(5))


def test_scratch_that_is_in_use_is_not_handed_out_again():
    with groups.scratch() as outer, groups.scratch() as inner:
        one, other = (space.array("keys", 64, np.uint8) for space in (outer, inner))
        assert not np.shares_memory(one, other)
    with groups.scratch() as again:
        again.array("keys", 64 << 20, np.uint8)
    with groups.scratch() as small:
        assert small.nbytes == 0  # so much isn't kept


@pytest.mark.skipif(sys.platform != "linux", reason="counts the kernel's page faults")
def test_running_again_takes_no_fresh_memory():
    """Fresh pages for what lies between passes cost more time than the passes."""
    import resource

    m, k = 2048, 4096
    dense = np.random.default_rng(0).standard_normal((m, k), np.float32).astype(np.float16)
    values, metadata = np.zeros((m, k // 2), np.float16), np.zeros((m, k // 8), np.uint16)
    plan = PruneCompressSparse24Plan.select(
        PruneCompressSparse24Descriptor(m=m, k=k, element="f16"), device="host"
    )

    def faults() -> int:
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        plan.run(PruneCompressSparse24Args(dense, values, metadata))
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

    pages = dense.nbytes // resource.getpagesize()
    assert min(faults() for _ in range(3)) < pages


# Forks --------------------------------------------------------------------------------------------

FORK = """
import os, signal, threading, time
from sparse24_plans.device.install import lock_across_forks

lock, held = lock_across_forks(), threading.Event()

def hold():
    with lock:
        held.set()
        time.sleep(0.5)

holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    os._exit(not lock.acquire(timeout=300))
holder.join()
assert lock.acquire(timeout=300)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

FORK_WHILE_COMPILING = """
import os, signal, threading, time
import numpy as np
from sparse24_plans import Sparse24Weight
from sparse24_plans.weights import compiled, host_code

host_code.MIN_CELLS = 0
begun, compile_now = threading.Event(), compiled._compile

def compile_slowly(*given):
    begun.set()
    time.sleep(0.5)
    return compile_now(*given)

compiled._compile = compile_slowly
matrix = np.ones((64, 64), np.float16)
threading.Thread(target=Sparse24Weight.prune_compress, args=(matrix,)).start()
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    weight = Sparse24Weight.prune_compress(matrix)
    os._exit(int(np.count_nonzero(weight.decompress()) != 64 * 32))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

FORK_WHILE_IMPORTING = """
import os, signal, sys, threading, time
from sparse24_plans.device import install

begun = threading.Event()

class SlowFinder:
    def find_spec(self, name, path=None, target=None):
        if name == "slow":
            begun.set()
            time.sleep(0.5)

sys.meta_path.insert(0, SlowFinder())
sys.path.insert(0, os.environ["SLOW"])
def load():
    with install.importing("slow"):
        import slow
    return slow.status

threading.Thread(target=load).start()
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(load())
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system doesn't fork")
@pytest.mark.parametrize(
    "script",
    [
        FORK,
        FORK_WHILE_IMPORTING,
        pytest.param(
            FORK_WHILE_COMPILING,
            marks=pytest.mark.skipif(compiled.obstacle() is not None, reason=str(compiled.obstacle())),
        ),
    ],
    ids=["a lock", "importing", "compressing"],
)
def test_a_forks_child_finds_no_lock_held(script, tmp_path):
    (tmp_path / "slow.py").write_text("import logging; logging.getLogger('slow'); status = 0")
    slow = {**os.environ, "SLOW": str(tmp_path)}
    done = Fork("-c", script, env=slow).wait()
    assert done.returncode == 0, done.stderr
