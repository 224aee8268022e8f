"""Code that numba compiles gives NumPy's bits, is used where it says so, and is never needed."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    FormatError,
    PackSparse24Descriptor,
    PackSparse24Plan,
    PruneCompressSparse24Descriptor,
    PruneCompressSparse24Plan,
    PruneSparse24Args,
    PruneSparse24Descriptor,
    PruneSparse24Plan,
    Sparse24Weight,
    prune,
)
from sparse24_plans.plan import plan
from sparse24_plans.weights import canonical, compiled, groups, host_code

from ..support import same_bits
from .canonical_model import every_element, every_group
from .test_canonical_properties import matrices, matrices_and_scores

needs_numba = pytest.mark.skipif(compiled.obstacle() is not None, reason=str(compiled.obstacle()))


@pytest.fixture
def everything_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans too: none that was selected without it is taken, and none of it is left."""
    plan._select.cache_clear()
    monkeypatch.setattr(host_code, "MIN_CELLS", 0)
    yield
    plan._select.cache_clear()


@pytest.fixture
def nothing_known() -> Iterator[None]:
    compiled.obstacle.cache_clear()
    yield
    compiled.obstacle.cache_clear()


def as_python(name: str, itemsize: int) -> Callable[..., object]:
    """The loop itself, which needs no numba."""
    return compiled.LOOPS[name]


# The same bits ------------------------------------------------------------------------------------


def assert_the_same(bits: np.ndarray, keys: np.ndarray) -> None:
    """Each function of both modules, on the cells [rows, K] and on what came of the one before."""
    with groups.scratch() as space, groups.scratch() as other:
        codes = groups.largest(keys, space).copy()
        assert same_bits(compiled.largest(keys, other), codes)
        values = canonical.gather(bits, codes, by=groups)
        assert same_bits(canonical.gather(bits, codes, by=compiled), values)
        scattered = canonical.scatter(values, codes, by=groups)
        assert same_bits(canonical.scatter(values, codes, by=compiled), scattered)
        kept, again = np.ones_like(bits), np.ones_like(bits)
        groups.keep(bits, codes, kept)
        compiled.keep(bits, codes, again)
        assert same_bits(again, kept)
        for cells in (bits, kept):
            pairs = zip(groups.covering(cells, space), compiled.covering(cells, other), strict=True)
            for want, got in pairs:
                assert (want is None) == (got is None)
                assert want is None or same_bits(got, want)


@every_element
def test_the_loops_give_what_numpy_gives_for_every_small_group(element, monkeypatch):
    """The loops run as Python, as they do without numba."""
    monkeypatch.setattr(compiled, "_compiled", as_python)
    bits = every_group(element).view(element.bits_dtype)
    assert_the_same(bits, canonical.magnitude_keys(bits, element))


@needs_numba
@every_element
def test_compiled_loops_give_what_numpy_gives(element):
    top = 2 ** (8 * element.itemsize)
    bits = np.random.default_rng(3).integers(0, top, (24, 512), np.uint64).astype(element.bits_dtype)
    bits[:, ::3] = 0
    bits[5:9] = bits[5:9] % 5  # ties
    assert_the_same(bits, canonical.magnitude_keys(bits, element))
    small = every_group(element).view(element.bits_dtype)
    assert_the_same(small, canonical.magnitude_keys(small, element))


@needs_numba
@given(case=matrices())
def test_any_matrix_is_prepared_alike(case):
    """NaN, Inf, -0.0, subnormals and ties among them."""
    dense, _ = case

    def prepared() -> list[object]:
        weight = Sparse24Weight.prune_compress(dense)
        try:
            crowded = Sparse24Weight.compress(dense).metadata.tobytes()
        except FormatError as error:
            crowded = str(error).encode()
        again = Sparse24Weight.compress(prune(dense))
        parts = (
            weight.values,
            weight.metadata,
            weight.decompress(),
            prune(dense),
            again.values,
            again.metadata,
        )
        return [crowded, *(part.tobytes() for part in parts)]

    with pytest.MonkeyPatch.context() as patch:
        by_numpy = prepared()
        patch.setattr(host_code, "MIN_CELLS", 0)
        assert prepared() == by_numpy


@needs_numba
@given(case=matrices_and_scores())
def test_any_scores_rank_alike(case):
    dense, _, scores = case
    with pytest.MonkeyPatch.context() as patch:
        by_numpy = prune(dense, scores=scores)
        patch.setattr(host_code, "MIN_CELLS", 0)
        assert same_bits(prune(dense, scores=scores), by_numpy)


@needs_numba
@given(offset=st.integers(0, 7), readonly=st.booleans())
def test_memory_of_any_kind_is_read(offset, readonly):
    """At addresses that no word is aligned to, read-only, and in columns of something wider."""
    memory = np.random.default_rng(offset).integers(0, 256, 16 * 48 * 4 + 8, np.uint8)
    dense = memory[offset : offset + 16 * 48 * 4].view(np.float32).reshape(16, 48)
    dense.flags.writeable = not readonly
    with pytest.MonkeyPatch.context() as patch:
        want = prune(dense), prune(dense[:, 8:40])
        patch.setattr(host_code, "MIN_CELLS", 0)
        assert same_bits(prune(dense), want[0])
        assert same_bits(prune(dense[:, 8:40]), want[1])


@needs_numba
def test_pruning_in_place_is_pruning(everything_compiled):
    dense = np.random.default_rng(4).standard_normal((16, 64), np.float32)
    want = prune(dense)
    chosen = PruneSparse24Plan.select(PruneSparse24Descriptor(m=16, k=64, element="f32"), device="host")
    assert chosen.explain().details.startswith("compiled by numba")
    chosen.run(PruneSparse24Args(dense, dense))
    assert same_bits(dense, want)


# Which is used, and who is told -------------------------------------------------------------------

SIZE = {"m": 64, "k": 128, "element": "bf16"}


def title_of(**size: object) -> str:
    desc = PruneCompressSparse24Descriptor(**{**SIZE, **size})
    return PruneCompressSparse24Plan.select(desc, device="host").explain().details


def test_small_matrices_are_numpys():
    assert host_code.best(host_code.MIN_CELLS - 1) is groups
    assert title_of() == "NumPy"


@needs_numba
def test_large_matrices_are_numbas_and_the_plan_says_so():
    version = host_code.versions()["numba"]
    assert host_code.best(host_code.MIN_CELLS) is compiled
    assert title_of(m=host_code.MIN_CELLS // 128) == f"compiled by numba {version}"


@needs_numba
def test_an_op_that_numba_has_no_part_in_says_numpy(everything_compiled):
    chosen = PackSparse24Plan.select(PackSparse24Descriptor(**SIZE), device="host")
    assert chosen.explain().details == "NumPy"


def missing(monkeypatch):
    monkeypatch.setattr(compiled.util, "find_spec", lambda name: None)


def unfit(monkeypatch):
    def refuse():
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setattr(compiled.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compiled, "_numba", refuse)


def standing_in(version, **config):
    def stand_in(monkeypatch):
        numba = SimpleNamespace(
            __version__=version,
            version_info=tuple(map(int, version.split("."))),
            config=SimpleNamespace(**config),
        )
        monkeypatch.setattr(compiled.util, "find_spec", lambda name: object())
        monkeypatch.setattr(compiled, "_numba", lambda: numba)

    return stand_in


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (missing, "numba isn't installed"),
        (unfit, "numba can't be imported: Numba needs NumPy 2.3 or less"),
        (standing_in("0.61.2"), "numba 0.61.2 is older than 0.62"),
        (
            standing_in("0.62.0", DISABLE_JIT=True),
            "numba's compiler is switched off (NUMBA_DISABLE_JIT)",
        ),
    ],
    ids=["missing", "unfit", "old", "switched off"],
)
def test_without_numba_numpy_works_and_reports_say_why(
    nothing_known, everything_compiled, monkeypatch, caplog, how, reason
):
    how(monkeypatch)
    assert title_of(m=72) == "NumPy"  # a size that no other test selects
    assert host_code.versions() == {"numba": None, "no_numba": reason}
    assert Sparse24Weight.prune_compress(np.ones((8, 8), np.float32)).m == 8
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == (how is unfit)


def test_the_extra_installs_a_numba_that_is_used():
    wanted = f"numba>={'.'.join(map(str, compiled.OLDEST))}"
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert set(re.findall(r"numba[<>=][^\"]*", text)) == {wanted}


@needs_numba
def test_a_plan_compiles_at_select_and_logs_it(everything_compiled, monkeypatch, caplog):
    monkeypatch.setattr(compiled, "_known", {})
    caplog.set_level(logging.INFO, "sparse24_plans.compile")
    chosen = PruneSparse24Plan.select(PruneSparse24Descriptor(m=40, k=72, element="f16"), device="host")
    lines = [record.getMessage() for record in caplog.records if record.name == "sparse24_plans.compile"]
    assert [line.split(": compiled by numba in ")[0] for line in lines] == [
        "keep of 2-byte cells",
        "largest of 2-byte cells",
    ]
    monkeypatch.setattr(compiled, "_compile", None)  # calling it is an error from here
    dense = np.random.default_rng(5).standard_normal((40, 72), np.float32).astype(np.float16)
    pruned = np.empty_like(dense)
    chosen.run(PruneSparse24Args(dense, pruned))
    assert same_bits(pruned, prune(dense))


def test_small_work_imports_no_numba():
    code = (
        "import sys, numpy as np, sparse24_plans as s; s.prune(np.ones((64, 64), np.float32)); "
        "print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# Speed: with room for a busy machine --------------------------------------------------------------


@needs_numba
@pytest.mark.parametrize("element", ["f32", "bf16", "s8", "fp8_e4m3"])
def test_it_takes_less_of_the_processor_than_numpys_passes(element, monkeypatch):
    """Quietly a third; of both what pruning and compressing take, with their results' fresh memory."""
    kind = PruneSparse24Descriptor(**{**SIZE, "element": element}).element
    dense = np.random.default_rng(6).standard_normal((512, 4096), np.float32).astype(kind.dtype)

    def spent(least_cells: int) -> float:
        monkeypatch.setattr(host_code, "MIN_CELLS", least_cells)
        begin = time.process_time()  # of all threads, on which other processes have little influence
        Sparse24Weight.compress(prune(dense))
        return time.process_time() - begin

    pairs = [(spent(0), spent(dense.size + 1)) for _ in range(8)]
    ours, numpys = (min(times) for times in zip(*pairs, strict=True))
    assert ours < numpys
