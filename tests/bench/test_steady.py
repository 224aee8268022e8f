"""Contenders alone in a steady state, on a device that only counts."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.bench import additions, gemm, power, steady
from sparse24_plans.bench.steady import BLOCK_US, MANY_TOKENS, SHORT_BLOCK_US, Steady, Work
from sparse24_plans.tuning import timing
from sparse24_plans.tuning.timing import Contender
from sparse24_plans.vocab import ElementKind


class Device:
    """Runs what is enqueued in no time, and slows down while the same contender runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[tuple[str, float]] = []

    def work(self, name: str, us: float, launches: int = 1, settles_after: float = 0.0) -> Work:
        def enqueue() -> None:
            begin = next((start for other, start in self._runs() if other == name), self.now)
            slow = 2.0 if self.now - begin < settles_after else 1.0
            self.ran.append((name, self.now))
            self.now += us * slow

        return Work(enqueue, launches)

    def _runs(self) -> list[tuple[str, float]]:
        """The name and the beginning of the run that is going on."""
        found: list[tuple[str, float]] = []
        for name, start in self.ran[::-1]:
            if found and found[0][0] != name:
                break
            found = [(name, start)]
        return found

    def mark(self) -> float:
        return self.now

    def wait(self, mark: float) -> None:
        pass

    def is_past(self, mark: float) -> bool:
        return True

    def us_between(self, begin: float, end: float) -> float:
        return end - begin


def blocks(device: Device) -> list[tuple[str, float]]:
    """The name and the length of each run of one contender."""
    found: list[tuple[str, float]] = []
    ends = [start for _, start in device.ran[1:]] + [device.now]
    for (name, start), end in zip(device.ran, ends, strict=True):
        if found and found[-1][0] == name:
            found[-1] = name, found[-1][1] + end - start
        else:
            found.append((name, end - start))
    return found


def test_each_contender_has_two_long_blocks_in_changing_order():
    device = Device()
    times = steady.steady({"a": device.work("a", 1000.0), "b": device.work("b", 500.0, 5)}, device)
    assert {name: one.us for name, one in times.items()} == {"a": 1000.0, "b": 100.0}
    names = [name for name, _ in blocks(device)]
    assert names == ["a", "b", "a", "b", "a"], "to size the blocks, then a b and b a, which meet"
    lengths = [length for _, length in blocks(device)][2:]
    assert lengths[0] >= BLOCK_US
    assert lengths[1] >= 2 * BLOCK_US
    assert lengths[2] >= BLOCK_US


def test_only_the_second_half_of_a_block_counts():
    device = Device()
    works = {
        "a": device.work("a", 1000.0, settles_after=0.4 * BLOCK_US),
        "b": device.work("b", 1000.0),
    }
    assert steady.steady(works, device)["a"].us == 1000.0


@pytest.mark.parametrize(("us", "length"), [(40.0, SHORT_BLOCK_US), (60.0, BLOCK_US)])
def test_blocks_are_short_where_every_product_is(us, length):
    device = Device()
    works = {"a": device.work("a", 100 * us, 100), "b": device.work("b", 1000.0, 100)}
    steady.steady(works, device)
    longest = max(total for name, total in blocks(device) if name == "a")
    assert length <= longest <= 1.5 * length


def test_product_longer_than_block_runs_once_for_each_half():
    device = Device()
    found = steady.steady({"a": device.work("a", 5 * BLOCK_US)}, device)
    assert found["a"].us == 5 * BLOCK_US
    assert len(device.ran) == 2 + 2 * steady.BLOCKS


def test_processes_that_run_together_run_as_often():
    counts = []
    for us in (1000.0, 1300.0):
        device = Device()
        steady.steady({"a": device.work("a", us)}, device, lambda number: max(int(number), 400))
        counts.append(len(device.ran))
    assert counts[0] == counts[1]


def test_clock_and_power_are_medians_of_what_the_sensors_say(monkeypatch):
    device = Device()
    samples = iter(range(10**6))
    monkeypatch.setattr(device, "is_past", lambda mark: next(samples) % 4 == 3)
    monkeypatch.setattr(steady.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(power, "sample", lambda: power.Sample(1500.0, 699.6))
    found = steady.steady({"a": device.work("a", 1000.0)}, device)["a"]
    assert (found.sm_mhz, found.watts) == (1500.0, 699.6)
    assert found.fields() == {"sm_mhz": 1500, "watts": 700}
    assert found.fields("dense_us") == {"dense_sm_mhz": 1500, "dense_watts": 700}


def test_without_sensors_clock_and_power_are_null(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(power.ctypes, "CDLL", missing)
    power._device.cache_clear()
    try:
        assert power.sample() == (None, None)
    finally:
        power._device.cache_clear()
    assert Steady(1.0).fields() == {"sm_mhz": None, "watts": None}


def test_the_sensors_are_read_through_nvml(monkeypatch):
    """A library that writes what NVML would; the field is asked for by its number."""

    class Library:
        def nvmlDeviceGetClockInfo(self, handle, kind, out):  # noqa: N802
            assert kind == 1
            out._obj.value = 1425
            return 0

        def nvmlDeviceGetFieldValues(self, handle, count, out):  # noqa: N802
            assert (count, out._obj.field_id) == (1, 186)
            out._obj.value, out._obj.result = 698_500, 0
            return 0

    monkeypatch.setattr(power, "_device", lambda: (Library(), None))
    assert power.sample() == (1425.0, 698.5)
    assert power.ctypes.sizeof(power._FieldValue) == 40


# CUDA graphs --------------------------------------------------------------------------------------


class FakeCupy:
    """A GPU on which a launch takes the microseconds that its contender says."""

    def __init__(self) -> None:
        self.now, self.captured = 0.0, None
        self.launched: list[str] = []
        gpu = self

        class Stream:
            ptr = 7

            def __init__(self, non_blocking: bool) -> None:
                assert non_blocking

            def synchronize(self) -> None:
                pass

            def begin_capture(self) -> None:
                gpu.captured = []

            def end_capture(self) -> object:
                launches, gpu.captured = gpu.captured, None
                return SimpleNamespace(launch=lambda stream: [gpu.run(*one) for one in launches])

        class Event:
            done = True

            def record(self, stream: object) -> None:
                self.at = gpu.now

            def synchronize(self) -> None:
                pass

        self.cuda = SimpleNamespace(
            Stream=Stream, Event=Event, get_elapsed_time=lambda begin, end: (end.at - begin.at) / 1e3
        )

    def run(self, name: str, us: float) -> None:
        if self.captured is not None:
            self.captured.append((name, us))
        else:
            self.now += us
            self.launched.append(name)

    def contender(self, name: str, us: float, copies: int) -> timing.Contender:
        def launch(stream: int, copy: int) -> None:
            assert stream == 7
            self.run(f"{name}{copy}", us)

        return timing.Contender(name, [partial(launch, copy=copy) for copy in range(copies)])


@pytest.fixture
def gpu(monkeypatch) -> FakeCupy:
    found = FakeCupy()
    for module in (timing, steady):
        monkeypatch.setattr(module, "import_cupy", lambda: found)
    return found


def test_a_launch_is_timed_alone_over_all_copies(gpu):
    times = steady.time_alone([gpu.contender("a", 70.0, 3), gpu.contender("b", 9000.0, 2)])
    assert {name: one.us for name, one in times.items()} == {"a": pytest.approx(70.0), "b": 9000.0}
    assert {gpu.launched.count(f"a{copy}") for copy in range(3)} == {gpu.launched.count("a0")}


def test_bursts_alternate_and_agree_on_a_gpu_without_limits(gpu):
    times = timing.time_contenders([gpu.contender("a", 70.0, 3), gpu.contender("b", 9000.0, 2)], rounds=3)
    assert times == {"a": pytest.approx(70.0), "b": 9000.0}


def test_nothing_to_time(gpu):
    assert steady.time_alone([]) == {}
    assert timing.time_contenders([]) == {}


def test_names_of_one_kernel_share_a_time(gpu, monkeypatch):
    """A whole cell with played kernels: dense and what was selected alone, the rest in bursts."""
    made = {
        "auto": ("k1", 10.0),
        "invariant": ("k1", 10.0),
        "cusparselt": ("k2", 30.0),
        "mma_sp": ("k3", 20.0),
    }

    class Played(gemm.Cell):
        def __init__(self, matrix: object, n: int) -> None:
            self.desc = GemmSparse24Descriptor(n=n, m=64, k=64, element="bf16")
            self.contenders, self.kernels, self.sources = {}, {}, set()
            self._errors, self._first = {}, {}

        def plan(self, preference):
            name = next(name for name, one in (gemm._ALONE | gemm._IN_BURSTS).items() if one == preference)
            if name not in made:
                return None
            chosen, us = made[name]
            return SimpleNamespace(explain=lambda: SimpleNamespace(chosen=chosen, details=""), us=us)

        def contender(self, name, plan):
            return gpu.contender(name, plan.us, 2)

        def rel_error(self, launch):
            return 0.001

        def dense(self):
            return [gpu.contender("dense", 15.0, 2)]

        def peer_is_tuned(self):
            return True

    monkeypatch.setattr(gemm, "Cell", Played)
    monkeypatch.setattr(gemm, "sources_of", lambda plan: ("gemm/mma_sp.cu",))
    for n in (16, 2048):
        sources: set[str] = set()
        rows = {one["backend"]: one for one in gemm.measured(None, n, (), sources)}
        wanted = {"auto": 10.0, "invariant": 10.0, "cusparselt": 30.0} | ({"mma_sp": 20.0} if n == 16 else {})
        assert {name: one["us"] for name, one in rows.items()} == wanted
        assert all((one["dense_us"], one["cusparselt_us"]) == (15.0, 30.0) for one in rows.values())
        assert ("dense_sm_mhz" in rows["auto"]) == ("sm_mhz" in rows["auto"]) == (n == 2048)
        assert sources == {"gemm/mma_sp.cu"}


@pytest.mark.parametrize("n", [16, MANY_TOKENS])
@pytest.mark.parametrize("part", additions.ADDITIONS)
def test_additions_are_recorded_beside_the_plain_product(monkeypatch, part, n):
    field, plain_us, names = additions.ADDITIONS[part]
    made = {}

    def contender(matrix, n, name, sources, **fields):
        made[name] = fields
        return Contender(name, [])

    def alone(contenders):
        times = {one.name: Steady(3.0, 1400.0, 700.0) for one in contenders}
        return times | {"plain": Steady(2.0, 1500.0, 600.0)}

    monkeypatch.setattr(additions, "_contender", contender)
    monkeypatch.setattr(additions, "time_alone", alone)
    matrix = SimpleNamespace(m=64, k=32, element=ElementKind.BF16)
    rows = additions.measured(part, matrix, n, set())
    assert made == {"plain": {}, **names}
    expected = {"m": 64, "k": 32, "n": n, "element": "bf16", "us": 3.0, plain_us: 2.0}
    if n >= MANY_TOKENS:
        peer = plain_us.removesuffix("us")
        expected |= {"sm_mhz": 1400, "watts": 700, f"{peer}sm_mhz": 1500, f"{peer}watts": 600}
    assert rows == [{**expected, field: name} for name in names]
