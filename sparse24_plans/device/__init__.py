"""Devices, memory and compiled kernels."""

from . import adapters as adapters  # they tell TensorView.of how to read tensors
