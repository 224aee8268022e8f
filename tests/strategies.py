"""Hypothesis strategies for the package's models."""

from __future__ import annotations

from hypothesis import strategies as st

from sparse24_plans import (
    AttentionMask,
    BlockSparseAttentionDescriptor,
    BlockSparseConv2dDescriptor,
    BlockSparseConvOp,
    BlockSparseMatmulDescriptor,
    BlockSparseOp,
    BlockSparsePass,
    BlockSparseShape,
    BlockSparseSoftmaxDescriptor,
    CompressSparse24Descriptor,
    DecompressSparse24Descriptor,
    DequantizeSparse24Descriptor,
    DeviceProperties,
    ElementKind,
    EpilogueKind,
    GemmOp,
    GemmSparse24Descriptor,
    GuaranteeRequirement,
    InnerPattern,
    MaskLayout,
    MaskSparse24Descriptor,
    MathPrecision,
    MatrixOrder,
    PackSparse24Descriptor,
    PlanPreference,
    PruneCompressSparse24Descriptor,
    PruneQuantizeSparse24Descriptor,
    PruneSparse24Descriptor,
    QuantizeSparse24Descriptor,
    ScaleKind,
    ScaleRule,
    Tier,
    TilePruneSparse24Descriptor,
    TileRule,
)
from sparse24_plans.plan.families import backends, kernels

UNGATED = st.sampled_from([kind for kind in EpilogueKind if not kind.is_gated])
FP8 = ["fp8_e4m3", "fp8_e5m2"]
RESULTS = {"s8": ["i32", "s8", "f16", "bf16", "f32"], **{one: ["bf16", "f16", "f32"] for one in FP8}}
"""Results of 8-bit elements, the default first. Other elements have themselves and f32."""


def results_of(element: str) -> list[str]:
    return RESULTS.get(element, list(dict.fromkeys([str(element), "f32"])))


@st.composite
def gemm_descriptors(
    draw: st.DrawFn,
    sizes: st.SearchStrategy[int] | None = None,
    depths: st.SearchStrategy[int] | None = None,
) -> GemmSparse24Descriptor:
    """Every valid combination of fields; ``sizes`` of n and m, ``depths`` of k."""
    sizes = st.integers(0, 2**31) if sizes is None else sizes
    depths = st.integers(0, 2**28).map(lambda units: 8 * units) if depths is None else depths
    element = draw(st.sampled_from(ElementKind))
    op = draw(st.sampled_from(GemmOp))
    of_fp8 = FP8 if op is GemmOp.FORWARD and element in ("f16", "bf16", *FP8) else []
    out = draw(st.sampled_from(results_of(element) + of_fp8))
    choices = {"out_element": st.just(out)}
    if op is GemmOp.FORWARD:
        choices |= {
            "epilogue": st.sampled_from(EpilogueKind),
            "x_order": st.sampled_from(MatrixOrder),
            "y_order": st.sampled_from(MatrixOrder),
            "scale_x": st.sampled_from(ScaleKind),
            "scale_w": st.sampled_from(ScaleKind),
        }
    optional = draw(st.fixed_dictionaries({}, optional=choices))
    if "out_element" in optional:
        integer = element in RESULTS and out in ("s8", "i32")
        own = ["bf16", "f16"] if out in FP8 else [] if integer else [out if element in RESULTS else element]
        optional["bias_element"] = draw(st.sampled_from([*own, "f32"]))
        if out in FP8:
            optional["scale_y"] = draw(st.sampled_from(["none", "tensor"]))
            optional["amax"] = draw(st.booleans())
    if element in FP8:
        optional["x_element"] = draw(st.sampled_from(FP8))
    alpha = draw(st.just(1.0) | st.floats(-(2.0**127), 2.0**127))
    n, m = draw(sizes), draw(sizes)
    if optional.get("epilogue", EpilogueKind.IDENTITY).is_gated:
        m = m // 16 * 16
        if optional.get("out_element", results_of(element)[0]) == "i32":
            optional["out_element"] = "f32"
    elif op is GemmOp.FORWARD and draw(st.booleans()):
        optional["beta"] = draw(st.floats(-(2.0**127), 2.0**127))
        result = optional.get("out_element", results_of(element)[0])
        own = ["bf16", "f16"] if result in FP8 else [result]
        optional["c_element"] = draw(st.sampled_from([*own, "f32"]))
    if optional.get("epilogue", EpilogueKind.IDENTITY).activation is EpilogueKind.RELU and draw(
        st.booleans()
    ):
        optional["relu_threshold"] = draw(st.floats(-100, 100))
        optional["relu_upper_bound"] = draw(st.none() | st.floats(101, 2.0**127))
    if element in ("f16", "bf16") and draw(st.booleans()):
        optional |= {
            "weight_element": draw(st.sampled_from(["s4", "s8", "fp8_e4m3"])),
            "weight_group": draw(st.sampled_from([0, 32, 64, 128])),
            "weight_scale_element": draw(st.sampled_from([element, "f32"])),
        }
    return GemmSparse24Descriptor(n=n, m=m, k=draw(depths), element=element, op=op, alpha=alpha, **optional)


_PREPARE = {
    PruneSparse24Descriptor: {"scores": st.sampled_from([None, "f32", "f16", "bf16"])},
    CompressSparse24Descriptor: {},
    PruneCompressSparse24Descriptor: {"scores": st.sampled_from([None, "f32", "f16", "bf16"])},
    DecompressSparse24Descriptor: {},
    PackSparse24Descriptor: {"direction": st.sampled_from(["pack", "unpack"])},
    TilePruneSparse24Descriptor: {"rule": st.sampled_from(TileRule)},
    MaskSparse24Descriptor: {"layout": st.sampled_from(MaskLayout)},
    QuantizeSparse24Descriptor: {
        "out_element": st.sampled_from(["fp8_e4m3", "s8"]),
        "static_scale": st.booleans(),
    },
    PruneQuantizeSparse24Descriptor: {
        "dense_element": st.sampled_from(["f32", "f16", "bf16"]),
        "stored": st.sampled_from(["s4", "s8", "fp8_e4m3"]),
        "group": st.sampled_from([0, 32, 64, 128]),
        "rule": st.sampled_from(ScaleRule),
        "sparse": st.booleans(),
    },
    DequantizeSparse24Descriptor: {
        "stored": st.sampled_from(["s4", "s8", "fp8_e4m3"]),
        "group": st.sampled_from([0, 32, 64, 128]),
        "scale_element": st.just("f32"),
    },
}


@st.composite
def prepare_descriptors(draw: st.DrawFn):
    """Every kind, with every combination of its fields."""
    kind = draw(st.sampled_from(list(_PREPARE)))
    more = draw(st.fixed_dictionaries(_PREPARE[kind]))
    eighths = st.sampled_from([0, 1, 7, 512, 2**20, 2**26])
    elements = ("f32", "f16", "bf16", "s8", "u8", "fp8_e4m3", "fp8_e5m2")
    if kind is QuantizeSparse24Descriptor:
        elements = elements[:3]
    if kind in (PruneQuantizeSparse24Descriptor, DequantizeSparse24Descriptor):
        elements = elements[1:3]
    return kind(m=8 * draw(eighths), k=8 * draw(eighths), element=draw(st.sampled_from(elements)), **more)


@st.composite
def block_shapes(draw: st.DrawFn) -> BlockSparseShape:
    block = draw(st.sampled_from([16, 32, 64, 128]))
    heads, rows, cols = draw(st.integers(0, 64)), draw(st.integers(0, 1024)), draw(st.integers(0, 1024))
    blocks = draw(st.integers(0, heads * rows * cols))
    return BlockSparseShape(heads=heads, rows=rows * block, cols=cols * block, block=block, blocks=blocks)


_FLOATS, _SCALES = st.sampled_from(["f32", "f16", "bf16"]), st.floats(-(2.0**127), 2.0**127)


@st.composite
def block_products(draw: st.DrawFn) -> BlockSparseMatmulDescriptor:
    """Every valid combination of fields."""
    element = draw(st.sampled_from(["f32", "f16", "bf16", "s8", "fp8_e4m3"]))
    op = draw(st.sampled_from(BlockSparseOp))
    fields = {"out_element": draw(st.sampled_from(results_of(element))), "alpha": draw(_SCALES)}
    fields |= {name: draw(st.booleans()) for name in ("trans_a", "trans_b")}
    if op is not BlockSparseOp.SDD:
        fields["epilogue"] = draw(UNGATED)
    sizes = {"n": draw(st.integers(0, 2**20)), "batch": draw(st.integers(0, 64))}
    layout = draw(block_shapes())
    if op is not BlockSparseOp.SDD and element in ("f16", "bf16") and layout.block >= 64:
        fields["inner"] = draw(st.sampled_from(InnerPattern))
    return BlockSparseMatmulDescriptor(op=op, layout=layout, element=element, **sizes, **fields)


@st.composite
def block_softmaxes(draw: st.DrawFn) -> BlockSparseSoftmaxDescriptor:
    """Every valid combination of fields."""
    fields = {"op": draw(st.sampled_from(BlockSparsePass)), "scale": draw(_SCALES)}
    if fields["op"] is BlockSparsePass.FORWARD:
        fields |= {name: draw(st.booleans()) for name in ("rpe", "causal")}
        fields |= {name: draw(st.sampled_from(AttentionMask)) for name in ("key_padding_mask", "attn_mask")}
    return BlockSparseSoftmaxDescriptor(layout=draw(block_shapes()), element=draw(_FLOATS), **fields)


@st.composite
def block_convolutions(draw: st.DrawFn) -> BlockSparseConv2dDescriptor:
    """Every valid combination of fields."""
    pairs, element = (
        st.tuples(st.integers(1, 5), st.integers(1, 5)),
        draw(st.sampled_from(["f32", "f16", "bf16"])),
    )
    kernel, stride, dilation = draw(pairs), draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    block, rows = draw(st.sampled_from([16, 32, 64, 128])), draw(st.integers(0, 64))
    cols = draw(st.integers(0, 16)) * kernel[0] * kernel[1]
    shape = BlockSparseShape(
        heads=1, rows=rows * block, cols=cols * block, block=block, blocks=draw(st.integers(0, rows * cols))
    )
    fields = {"op": draw(st.sampled_from(BlockSparseConvOp)), "alpha": draw(_SCALES)}
    fields["out_element"] = draw(st.sampled_from(results_of(element)))
    if fields["op"] is BlockSparseConvOp.FORWARD:
        fields["epilogue"] = draw(UNGATED)
    return BlockSparseConv2dDescriptor(
        layout=shape,
        batch=draw(st.integers(0, 64)),
        height=least[0] + draw(st.integers(0, 64)),
        width=least[1] + draw(st.integers(0, 64)),
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        element=element,
        **fields,
    )


block_attentions = st.builds(
    BlockSparseAttentionDescriptor,
    layout=block_shapes(),
    element=_FLOATS,
    head_size=st.integers(1, 1024),
    batch=st.integers(0, 64),
    op=st.sampled_from(BlockSparsePass),
    causal=st.booleans(),
    lengths=st.booleans(),
    dropout=st.just(0.0) | st.floats(0, 0.99),
)


requirements = st.builds(
    GuaranteeRequirement,
    deterministic=st.booleans(),
    bit_stable_on_same_hardware=st.booleans(),
    batch_invariant=st.booleans(),
    bit_stable_across_hardware=st.booleans(),
    subnormals=st.sampled_from([None, "preserved", "flushed"]),
    nonfinite=st.sampled_from([None, "skips_pruned", "propagates"]),
    math_precision=st.none() | st.sampled_from(MathPrecision),
    accumulator=st.none() | st.sampled_from(ElementKind),
    arithmetic=st.none() | st.sampled_from(["fma32_in_order", "exact_sum", "hopper_tc/slices=4"]),
    max_error_bound=st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
)
preferences = st.builds(
    PlanPreference,
    max_workspace_bytes=st.none() | st.integers(0, 2**64),
    allow_sm90a=st.booleans(),
    prefer_backend=st.none() | st.sampled_from(backends()),
    prefer_kernel=st.none() | st.sampled_from(kernels()),
    tier=st.none() | st.sampled_from(Tier),
    require=st.just(GuaranteeRequirement()) | requirements,
    whole_m=st.none() | st.integers(1, 2**63 - 1),
)
devices = st.builds(
    DeviceProperties,
    kind=st.sampled_from(["host", "cuda"]),
    ordinal=st.integers(0, 63),
    name=st.text(),
    compute_capability=st.tuples(st.integers(0, 20), st.integers(0, 9)),
    multiprocessors=st.integers(1, 500),
    cublaslt=st.none() | st.text(),
    cusparselt=st.none() | st.text(),
    driver=st.none() | st.text(),
)
