"""The fuzzer itself: cases follow from their numbers, and what is wrong, dies or hangs is found."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from sparse24_plans.arithmetic import epilogue
from sparse24_plans.blocksparse.backends import host as blocksparse_host
from sparse24_plans.gemm.backends import host
from sparse24_plans.prepare.backends import host as prepare_host

from . import __main__ as fuzz
from . import worker
from .batches import BatchedProduct
from .block_problems import BlockProblem
from .problems import GroupedProduct, Preparation, Product, draw


def test_a_case_follows_from_seed_and_number():
    for case in range(200):
        first, again = draw(7, case, "host"), draw(7, case, "host")
        assert first == again
        if isinstance(first, Product):
            assert np.array_equal(first.data().x, again.data().x)
    assert draw(7, 0, "host") != draw(8, 0, "host")
    assert draw(7, 0, "host") != draw(7, 0, 0)


def test_every_family_element_epilogue_and_op_is_drawn():
    problems = [draw(1, case, "host") for case in range(3000)]
    products = [one.desc for one in problems if isinstance(one, Product)]
    prepared = [one.desc for one in problems if isinstance(one, Preparation)]
    blocks = [one.desc for one in problems if isinstance(one, BlockProblem)]
    assert {one.op.value for one in blocks} >= {"sdd", "dsd", "dds", "forward", "backward", "wgrad"}
    assert len({type(one) for one in blocks}) == 4
    assert {one.layout.block for one in blocks} == {16, 32, 64, 128}
    assert len({(one.element, one.out_element, one.epilogue) for one in products}) > 60
    assert {one.op.value for one in products} == {"forward", "dgrad"}
    assert len({(type(one), one.element) for one in prepared}) == 6 * 7 + 6 + 3 + 2 * 2
    assert any(one.n == 0 for one in products)
    assert any(one.n % 2 for one in products)
    assert {(one.x_order.value, one.y_order.value) for one in products} > {
        ("column", "row"),
        ("row", "column"),
    }


def test_every_field_of_a_product_is_drawn_in_each_form():
    problems = [draw(1, case, "host") for case in range(8000)]
    of_groups = {"groups", "group_tokens", "x_rows", "y_rows", "top_k"}
    of_batches = {"batches", "shared_weight"}
    for kind, fixed in (
        (Product, of_groups | of_batches),
        (GroupedProduct, of_batches | {"x_order", "y_order"}),
        (BatchedProduct, of_groups),
    ):
        found = [one for one in problems if isinstance(one, kind)]
        assert any(one.in_place for one in found)
        fields = type(found[0].desc).model_fields
        alike = {name for name in fields if len({getattr(one.desc, name) for one in found}) == 1}
        assert alike == fixed


@pytest.mark.parametrize("case", range(40))
def test_random_problems(case):
    found = worker.outcome(20_000, case, "host")
    assert "error" not in found, found["trace"]


def outcomes(cases: int) -> Iterator[str]:
    found = (worker.outcome(1, case, "host").get("error") for case in range(cases))
    return (error for error in found if error is not None)


def test_a_wrong_product_is_found(monkeypatch):
    right = epilogue.apply_epilogue
    monkeypatch.setattr(epilogue, "apply_epilogue", lambda *given: right(*given) * np.float32(1.01))
    assert sum("results are wrong" in error for error in outcomes(60)) > 5


def test_a_write_outside_of_the_result_is_found(monkeypatch):
    right = host.Kernel._finish_rows

    def beyond(kernel, product, tokens, views, fp8):
        right(kernel, product, tokens, views, fp8)
        ctypes.c_uint8.from_address(views["result"].end).value ^= 1

    monkeypatch.setattr(host.Kernel, "_finish_rows", beyond)
    assert any("guard bytes" in error for error in outcomes(60))


def test_bits_that_change_are_found(monkeypatch):
    right, calls = epilogue.apply_epilogue, []

    def drifting(*given):
        calls.append(1)
        return right(*given) * np.float32(1 + 2.0**-23 * (len(calls) % 2))

    monkeypatch.setattr(epilogue, "apply_epilogue", drifting)
    assert any("other bits in a second run" in error for error in outcomes(300))


def test_a_wrong_block_product_is_found(monkeypatch):
    right = blocksparse_host.finished
    monkeypatch.setattr(
        blocksparse_host, "finished", lambda *given, **more: right(*given, **more) ^ np.uint8(8)
    )
    found = [worker.outcome(1, case, "host").get("error") for case in range(5, 400, 8)]
    assert sum("results are wrong" in str(error) for error in found) > 5


def test_a_wrong_preparation_is_found(monkeypatch):
    monkeypatch.setattr(
        prepare_host.canonical,
        "magnitude_codes",
        lambda bits, element: np.full(bits.size // 4, 4, np.uint8),
    )
    assert any(outcomes(200))


WORKER = """
import json, sys, time
case, step = int(sys.argv[1]), int(sys.argv[2])
while True:
    print(json.dumps({"case": case}), flush=True)
    if case == 5:
        sys.exit(139)
    if case == 8:
        time.sleep(60)
    print(json.dumps({"case": case, "served": case != 2}), flush=True)
    case += step
    time.sleep(0.01)
"""


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Workers that a script plays: case 5 dies, case 8 hangs, case 2 is refused."""
    script, popen = tmp_path / "worker.py", subprocess.Popen
    script.write_text(WORKER)

    def start(command, **options):
        first, step = command[2].split("main(")[1].split(", ")[1:3]
        return popen([sys.executable, str(script), first, step], **options)

    monkeypatch.setattr(fuzz.subprocess, "Popen", start)
    monkeypatch.setattr(fuzz, "_SILENCE_S", 1.0)


def test_cases_that_die_or_hang_fail_and_others_go_on(played, capsys):
    assert fuzz.main(["--seconds", "3", "--seed", "3", "--processes", "2", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["case"] for one in found["failures"]] == [5, 8]
    dies, hangs = found["failures"]
    assert "ended with code 139" in dies["error"]
    assert "hangs" in hangs["error"]
    assert dies["repeat"] == "python -m tests.fuzz --seed 3 --device host --case 5"
    assert (found["seed"], found["refused"]) == (3, 1)
    assert found["cases"] > 20


def test_one_case_alone(capsys):
    assert fuzz.main(["--seed", "20000", "--case", "3"]) == 0
    assert capsys.readouterr().out.strip() in ("served", "refused")
