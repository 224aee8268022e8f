"""Numbers of enum members in kernels."""

from __future__ import annotations

from typing import Protocol

from ...vocab import AttentionMask, ElementKind, EpilogueKind

# common/element.cuh, common/epilogue.cuh and blocksparse/softmax.cu define the same numbers.
ELEMENT_CODES = {
    ElementKind.F32: 0,
    ElementKind.F16: 1,
    ElementKind.BF16: 2,
    ElementKind.S8: 3,
    ElementKind.FP8_E4M3: 4,
    ElementKind.I32: 5,
    ElementKind.S4: 6,
    ElementKind.FP8_E5M2: 7,
}
EPILOGUE_CODES = {
    EpilogueKind.IDENTITY: 0,
    EpilogueKind.BIAS: 1,
    EpilogueKind.BIAS_RELU: 2,
    EpilogueKind.BIAS_GELU: 3,
    EpilogueKind.BIAS_SILU: 4,
    EpilogueKind.BIAS_SWIGLU: 5,
    EpilogueKind.BIAS_GEGLU: 6,
    EpilogueKind.BIAS_GELU_TANH: 7,
    EpilogueKind.BIAS_GEGLU_TANH: 8,
    EpilogueKind.BIAS_RELU2: 9,
}
EPILOGUE_CODES |= {kind.activation: code for kind, code in EPILOGUE_CODES.items() if code > 1}
"""An activation without a bias is the same kernel with a null pointer for the bias."""
MASK_CODES = {AttentionMask.NONE: 0, AttentionMask.ADD: 1, AttentionMask.MUL: 2}


class TypedProblem(Protocol):
    """Problem with the types that a kernel is compiled for."""

    element: ElementKind
    out_element: ElementKind
    bias_element: ElementKind
    epilogue: EpilogueKind


def type_defines(problem: TypedProblem) -> dict[str, int]:
    """Return the macros that common/epilogue.cuh requires of every kernel with an epilogue."""
    return {
        "ELEMENT": ELEMENT_CODES[problem.element],
        "OUT": ELEMENT_CODES[problem.out_element],
        "BIAS": ELEMENT_CODES[problem.bias_element],
        "EPILOGUE": EPILOGUE_CODES[problem.epilogue],
    }
