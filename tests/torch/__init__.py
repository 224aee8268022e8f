"""Skipped as a whole where PyTorch is missing, or is a build for CUDA without CUDA's libraries."""

import pytest

pytest.importorskip("torch", reason="PyTorch can't be imported", exc_type=ImportError)
