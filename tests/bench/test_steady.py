"""Contenders alone in a steady state, on a device that only counts."""

from __future__ import annotations

import pytest

from sparse24_plans.bench import power, steady
from sparse24_plans.bench.steady import BLOCK_US, SHORT_BLOCK_US, Steady, Work


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


def test_a_product_longer_than_a_block_runs_once_for_each_half():
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
