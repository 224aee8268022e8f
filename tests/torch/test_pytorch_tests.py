"""The command that runs PyTorch's own tests, on a file like theirs: what is replaced, what is whole."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks import pytorch_tests

SAMPLE = '''
import unittest

import torch
from torch.sparse import SparseSemiStructuredTensorCUTLASS, to_sparse_semi_structured

_IS_SM8X = torch.version.cuda is not None and (
    torch.cuda.get_device_capability(0)[0] == 8
) or torch.cuda.get_device_capability(0)[0] == 9


class Tests(unittest.TestCase):
    @unittest.skipIf(not _IS_SM8X, "for other devices")
    def test_values(self, case):
        sparse = to_sparse_semi_structured(torch.eye(64, dtype=torch.float16))
        assert type(sparse).__module__ == "sparse24_plans.torch.tensor", type(sparse)
        assert type(sparse) in SparseSemiStructuredTensorCUTLASS.__mro__
        assert torch._sparse_semi_structured_tile.__module__ == "sparse24_plans.torch.semi_structured"

    def test_values_differ(self, case):
        assert case == "half"

    def test_not_here(self, case):
        self.skipTest("never")

    def test_cut(self, case):
        assert to_sparse_semi_structured(torch.ones(64, 64)).to_dense().sum() == 2048


class Made(unittest.TestCase):
    """Cases are made of tests as PyTorch makes them."""


for name in [name for name in dir(Tests) if name.startswith("test_")]:
    for case in ("half", "bfloat16"):
        test = getattr(Tests, name)
        setattr(Made, f"{name}_{case}", lambda self, test=test, case=case: test(self, case))
del Tests
'''


@pytest.fixture
def sample(tmp_path):
    file = tmp_path / "test_sample_of_pytorch.py"
    file.write_text(SAMPLE)
    return file


def test_cases_are_counted_by_test_with_ours_in_pytorchs_place(sample):
    before = torch.sparse.SparseSemiStructuredTensorCUTLASS
    assert pytorch_tests.run(sample) == {
        "test_values": Counter(passed=2),
        "test_values_differ": Counter(passed=1, failed=1),
        "test_not_here": Counter(skipped=2),
        "test_cut": Counter(passed=2),
    }
    assert torch.sparse.SparseSemiStructuredTensorCUTLASS is before


@pytest.mark.parametrize(("least", "status"), [(2, 0), (3, 1)])
def test_each_test_is_named_and_the_status_tells_of_fewer(sample, monkeypatch, capsys, least, status):
    monkeypatch.setattr(pytorch_tests, "WHOLE", least)
    assert pytorch_tests.main([str(sample)]) == status
    shown, errors = capsys.readouterr()
    assert shown.splitlines() == [
        "whole   test_values: 2 passed",
        "differs test_values_differ: 1 passed, 1 failed",
        "skipped test_not_here: 2 skipped",
        "whole   test_cut: 2 passed",
        f"2 of 4 tests pass whole; expected {least} of 42",
    ]
    assert "AssertionError" in errors
    assert "test_values_differ_bfloat16" in errors
