"""The descriptor of a gemm, and its operands."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, SupportsFloat, SupportsIndex

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from ..arithmetic.elements import addends_of, sources_of
from ..arithmetic.epilogue import NO_BOUNDS
from ..errors import shown
from ..plan.descriptor import AS_ELEMENT, BIAS_ELEMENT, C_ELEMENT, OUT_ELEMENT, Factor, ProductDescriptor
from ..plan.operands import Operand, Role
from ..plan.weight_operand import weight_operand
from ..vocab import (
    FP8,
    INT64_MAX,
    Eights,
    ElementKind,
    ElementLike,
    EpilogueKind,
    Flag,
    GemmOp,
    GroupTokens,
    MatrixOrder,
    OpCategory,
    ScaleKind,
    Size,
)
from ..weights import quantized_weight
from ..weights.gates import GATE_GROUP
from ..weights.packed_layouts import Quantization
from .group_checks import check_groups

_NO_WEIGHT = (ElementKind.I32, ElementKind.U16, ElementKind.U8, ElementKind.S4)
"""Elements of results, metadata and stored values. No kernel multiplies them, so no message offers them."""


def _of_weights(value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
    try:
        return parse(value)
    except ValidationError:
        kinds = ", ".join(kind for kind in ElementKind if kind not in _NO_WEIGHT)
        raise ValueError(f"expected one of {kinds}, got {shown(value)}") from None


class GemmSparse24Descriptor(ProductDescriptor):
    """The problem: sizes, types and epilogue. It is frozen and hashable, and survives JSON unchanged.

    Parameters
    ----------
    n, m, k : int
        Tokens, out features, in features; k is a multiple of 8. Any of them may be 0.
    element : ElementKind
        Type of W's values and of X: ``f32``, ``f16``, ``bf16``, ``s8``, ``fp8_e4m3`` or ``fp8_e5m2``.
    weight_element : ElementKind, optional
        Type of W's stored values: ``element`` (default), or for ``f16`` and ``bf16`` also ``s4``, ``s8`` or
        ``fp8_e4m3``. W is quantized then: its elements are element(f32(value) * f32(scale)), as
        Sparse24QuantizedWeight says, and all else is as for a weight that holds these.
    weight_group : int
        Adjacent columns of a row of a quantized W that share a scale: 32, 64 or 128, or 0 (default) for the
        whole row.
    weight_scale_element : ElementKind, optional
        Type of a quantized W's scales: ``element`` (default) or ``f32``.
    op : GemmOp
        ``forward``: Y[N,M] = epilogue(alpha * X[N,K] @ W[M,K]^T + beta * C[N,M]). ``dgrad``: dX[N,K] =
        alpha * dY[N,M] @ W.
    epilogue : EpilogueKind
        An activation of t = alpha * (acc * scale_x * scale_w) + beta * C + bias, or of the same without a
        bias: relu(t); relu2(t) = relu(t)^2; gelu(t) = t * Phi(t), the exact one; silu(t) = t / (1 + exp(-t));
        gelu_tanh(t) = t/2 * (1 + tanh(sqrt(2/pi) * (t + 0.044715 t^3))). ``dgrad`` takes only ``identity``.
        Gated kinds make one result of two rows of W: swiglu is silu(t_gate) * t_up, geglu is gelu(t_gate) *
        t_up, geglu_tanh is gelu_tanh(t_gate) * t_up. M is then a multiple of 16, W, bias and scale_w are in
        the order of ``gated_rows``, and Y is [N, M/2].
    alpha : float
        Finite in float32.
    out_element : ElementKind, optional
        Type of the result: ``element`` (default) or ``f32``. For ``s8``: ``i32`` (default), ``s8``, ``f16``,
        ``bf16`` or ``f32``. For fp8 elements: ``bf16`` (default), ``f16`` or ``f32``. For 16-bit and fp8
        elements also ``fp8_e4m3`` and ``fp8_e5m2``, if op is ``forward``. Integers and fp8 are rounded to
        nearest even and saturate, Inf in fp8 too; NaN becomes 0 as an integer and 0x7f in fp8.
    bias_element : ElementKind, optional
        Type of bias[M]: ``element`` (default) or ``f32``. For 8-bit elements: ``out_element`` (default) or
        ``f32``, and only ``f32`` if the result is an integer. For fp8 results: ``bf16`` (default), ``f16`` or
        ``f32``.
    x_order, y_order : MatrixOrder
        ``row``: rows of X (of Y) are contiguous. ``column``: columns are contiguous. With both in column
        order the product is W @ X^T on row-major [K, N] and [M, N] matrices, with the sparse operand on the
        left. ``forward`` only.
    scale_x, scale_w : ScaleKind
        Factors in float32 that X and W were divided by: ``none``, one per ``tensor``, or one per ``row``,
        which is a token of X or an out feature of W. ``forward`` only.
    beta : float
        Factor of C, finite in float32. With 0 (default) there is no C. ``forward`` without gates only.
        C[N, M] lies in ``y_order``. C is converted to float32; then alpha * acc, beta * C, their sum, and its
        sum with the bias are each rounded to float32.
    c_element : ElementKind, optional
        Type of C: ``out_element`` (default) or ``f32``. For fp8 results: ``bf16`` (default), ``f16`` or
        ``f32``.
    relu_threshold, relu_upper_bound : float, optional
        For ``relu`` and ``bias_relu`` alone: the result is min(t, upper bound) where t exceeds the threshold,
        else 0. By default 0 and no bound. The upper bound exceeds the threshold.
    groups : int
        Number of groups of tokens, each multiplied by a weight of its own (experts); 0: one weight for all.
        With G groups the weight is the G weights [M, K] stacked to [G*M, K], bias is [G*M], and scale_w of
        rows is [G*M]. n is the number of rows of X and Y (dY and dX) that groups can have in total. x_order
        and y_order are ``row``.
    group_tokens : GroupTokens
        ``offsets`` (default): the operand ``offsets`` i32[G+1] says that group g has the rows from offsets[g]
        to below offsets[g+1]. ``counts``: group g has the first counts[g] (the operand ``counts``, i32[G]) of
        n/G rows from g*n/G on. ``experts``: the operand ``experts`` i32[n/top_k, top_k] names the groups that
        each row chose. The choices are sorted by group, those of a group stay in order, and get the n places;
        rows of X (``x_rows``) and sums (``y_rows``) then need no index. A choice that names no group has a
        place in none. The operand lies on the plan's device and is read by the kernel, so it may change
        between launches, in a CUDA graph too. Values are clamped to the rows that there are. Rows in no group
        are not written. A row of two groups has either's result, unless C lies in Y. If there is such a row,
        rows of any group may be left as they are.
    x_rows : int, optional
        With groups: rows of X (of dY), of which the operand ``x_index`` i32[N] names one for each of the n
        places, that is, rows of groups. An index is clamped to the rows that there are. With ``experts`` it
        is n/top_k, and the index follows. None: X has the places' rows.
    y_rows : int, optional
        With groups: rows of Y (of dX). Each is a sum of the results of ``top_k`` places, which the operand
        ``y_index`` i32[y_rows, top_k] names, times the router's weights, the operand ``y_weights``
        f32[y_rows, top_k], if it is given. Results are rounded to ``out_element``, which is f32, f16 or bf16.
        Then each product with a weight and each sum, from 0 on in the index's order, is rounded to float32,
        and the last one to ``out_element``. A place outside of 0 to n-1 adds nothing, nor does one below
        offsets[0], from offsets[G] on, or beyond its group's count. With ``experts`` it is n/top_k, and the
        index follows: the places of a row's choices. None: Y has the places' rows.
    top_k : int
        Places of each row of Y, and choices of ``experts``; at least 1 with either, else 0.
    x_element : ElementKind, optional
        Type of X, or of dY: ``element`` (default); if that is fp8, either fp8 type.
    scale_y : ScaleKind
        Factor in float32 that an fp8 result is multiplied by before its rounding: ``none`` (default) or one
        per ``tensor``. The product is rounded to float32 first.
    amax : bool
        Whether the operand ``amax`` f32[1] receives the largest magnitude of an fp8 product's results before
        ``scale_y``. It becomes the maximum of itself and theirs, so the caller zeroes it when a new history
        begins. It is at least 0, or NaN, and becomes NaN if a result is NaN.
    batches : int, optional
        Number of products of these sizes in one run; each has the bits that the kernel gives it alone. X,
        Y and C then have a first dimension of B batches, as bias [B, M] and scales have: [B, N] and [B, M] of
        rows, [B, 1] of tensors. Batches may lie anywhere; those of Y lie apart. A batch stride of 0 gives all
        batches the same X, C, bias or scales. The weight is the B weights [M, K] stacked to [B*M, K].
    shared_weight : bool
        All batches are multiplied by one weight [M, K].

    Raises
    ------
    InvalidProblemError
        The message names the field.
    """

    category: ClassVar[OpCategory] = OpCategory.GEMM

    element: Annotated[ElementKind, WrapValidator(_of_weights)]
    n: Size
    m: Size
    k: Eights
    weight_element: ElementKind = AS_ELEMENT
    weight_group: Size = 0
    weight_scale_element: ElementKind = AS_ELEMENT
    op: GemmOp = GemmOp.FORWARD
    epilogue: EpilogueKind = EpilogueKind.IDENTITY
    alpha: Factor = 1.0
    out_element: ElementKind = OUT_ELEMENT
    bias_element: ElementKind = BIAS_ELEMENT
    x_order: MatrixOrder = MatrixOrder.ROW
    y_order: MatrixOrder = MatrixOrder.ROW
    scale_x: ScaleKind = ScaleKind.NONE
    scale_w: ScaleKind = ScaleKind.NONE
    beta: Factor = 0.0
    c_element: ElementKind = C_ELEMENT
    relu_threshold: Factor = 0.0
    relu_upper_bound: Factor | None = None
    groups: Size = 0
    group_tokens: GroupTokens = GroupTokens.OFFSETS
    x_rows: Size | None = None
    y_rows: Size | None = None
    top_k: Size = 0
    x_element: ElementKind = AS_ELEMENT
    scale_y: ScaleKind = ScaleKind.NONE
    amax: Flag = False
    batches: Size | None = None
    shared_weight: Flag = False

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            n: SupportsIndex,
            m: SupportsIndex,
            k: SupportsIndex,
            element: ElementLike,
            weight_element: ElementLike = ...,
            weight_group: SupportsIndex = ...,
            weight_scale_element: ElementLike = ...,
            op: GemmOp | str = ...,
            epilogue: EpilogueKind | str = ...,
            alpha: SupportsFloat = ...,
            out_element: ElementLike = ...,
            bias_element: ElementLike = ...,
            x_order: MatrixOrder | str = ...,
            y_order: MatrixOrder | str = ...,
            scale_x: ScaleKind | str = ...,
            scale_w: ScaleKind | str = ...,
            beta: SupportsFloat = ...,
            c_element: ElementLike = ...,
            relu_threshold: SupportsFloat = ...,
            relu_upper_bound: SupportsFloat | None = ...,
            groups: SupportsIndex = ...,
            group_tokens: GroupTokens | str = ...,
            x_rows: SupportsIndex | None = ...,
            y_rows: SupportsIndex | None = ...,
            top_k: SupportsIndex = ...,
            x_element: ElementLike = ...,
            scale_y: ScaleKind | str = ...,
            amax: bool = ...,
            batches: SupportsIndex | None = ...,
            shared_weight: bool = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _consistent(self) -> GemmSparse24Descriptor:
        self._expect_quantization()
        self._expect("x_element", sources_of(self.element))
        self._expect_result_types(gates=True, fp8=self.op is GemmOp.FORWARD)
        self._expect("scale_y", (ScaleKind.NONE, ScaleKind.TENSOR))
        for name in ("scale_y", "amax") if not self.is_fp8 else ():
            if getattr(self, name) not in (ScaleKind.NONE, False):
                raise ValueError(
                    f"{name}: expected none for out_element {self.out_element}, got {getattr(self, name)}"
                )
        self._expect("c_element", addends_of(self.out_element))
        if self.has_c and (self.epilogue.is_gated or self.op is GemmOp.DGRAD):
            place = f"epilogue {self.epilogue}" if self.epilogue.is_gated else f"op {self.op}"
            raise ValueError(f"beta: expected 0 for {place}, got {self.beta}")
        if self.epilogue.is_gated:
            self._expect_gates()
        if self.op is GemmOp.DGRAD:
            if self.epilogue is not EpilogueKind.IDENTITY:
                raise ValueError(f"epilogue: expected identity for op dgrad, got {self.epilogue}")
            for name in ("x_order", "y_order", "scale_x", "scale_w"):
                if getattr(self, name) not in (MatrixOrder.ROW, ScaleKind.NONE):
                    raise ValueError(f"{name}: expected none for op dgrad, got {getattr(self, name)}")
        check_groups(self)
        self._expect_relu_bounds()
        rows = max(self.tokens, self.x_rows or 0, self.y_rows or 0)
        if self.weight_rows * self.k > INT64_MAX or rows * max(self.m, self.k) > INT64_MAX:
            names = ("n", "m", "k", "x_rows", "y_rows")[: 5 if self.is_routed else 3]
            came = ", ".join(str(getattr(self, name)) for name in names)
            raise ValueError(f"{', '.join(names)}: expected operands of fewer than 2^63 elements, got {came}")
        return self

    def _expect_quantization(self) -> None:
        if self.weight_element is self.element:
            for name, plain in (("weight_group", 0), ("weight_scale_element", self.element)):
                if getattr(self, name) != plain:
                    raise ValueError(
                        f"{name}: expected {plain} for weight_element {self.element}, "
                        f"got {getattr(self, name)}"
                    )
            return
        quantizable = self.element in quantized_weight.ELEMENTS
        self._expect("weight_element", (self.element, *(quantized_weight.STORED if quantizable else ())))
        self._expect("weight_group", quantized_weight.GROUPS)
        self._expect("weight_scale_element", (self.element, ElementKind.F32))

    def _expect_gates(self) -> None:
        if self.m % GATE_GROUP:
            raise ValueError(
                f"m: expected a multiple of {GATE_GROUP} for epilogue {self.epilogue}, got {self.m}"
            )
        if self.out_element is ElementKind.I32:
            raise ValueError(f"out_element: expected s8 or a float for epilogue {self.epilogue}, got i32")

    def _expect_relu_bounds(self) -> None:
        if self.relu_bounds != NO_BOUNDS and self.epilogue.activation is not EpilogueKind.RELU:
            name = "relu_threshold" if self.relu_threshold else "relu_upper_bound"
            raise ValueError(f"{name}: expected none for epilogue {self.epilogue}, got {getattr(self, name)}")
        if self.relu_upper_bound is not None and self.relu_upper_bound <= self.relu_threshold:
            raise ValueError(
                f"relu_upper_bound: expected more than relu_threshold, {self.relu_threshold}, "
                f"got {self.relu_upper_bound}"
            )

    @property
    def weight_rows(self) -> int:
        """Rows of the weight: M, or those of all groups' or batches' weights."""
        return self.m * (1 if self.shared_weight else self.groups or self.batch_count)

    @property
    def batch_count(self) -> int:
        """Number of batches; 1 without them."""
        return 1 if self.batches is None else self.batches

    @property
    def is_batched(self) -> bool:
        """Return whether a kernel must tell batches apart. A single batch is a product as any other."""
        return self.batch_count != 1

    @property
    def one_batch(self) -> GemmSparse24Descriptor:
        """The product of one batch."""
        if self.batches is None:
            return self
        return self.model_copy(update={"batches": None, "shared_weight": False})

    @property
    def tokens(self) -> int:
        """Rows of X, of all batches."""
        return self.n * self.batch_count

    @property
    def is_routed(self) -> bool:
        """Return whether rows are sorted by group, rows of X gathered, or results added up to rows of Y."""
        by_experts = self.group_tokens is GroupTokens.EXPERTS
        return by_experts or self.x_rows is not None or self.y_rows is not None

    @property
    def indexed(self) -> GemmSparse24Descriptor:
        """The product with explicit offsets and indices in place of ``experts``."""
        if self.group_tokens is not GroupTokens.EXPERTS:
            return self
        kept = 0 if self.y_rows is None else self.top_k
        return self.model_copy(update={"group_tokens": GroupTokens.OFFSETS, "top_k": kept})

    @property
    def placed(self) -> GemmSparse24Descriptor:
        """The product whose X and Y have the places' rows."""
        if not self.is_routed:
            return self
        return self.indexed.model_copy(update={"x_rows": None, "y_rows": None, "top_k": 0})

    @property
    def step(self) -> int:
        """The number that n is a multiple of."""
        steps = {GroupTokens.COUNTS: self.groups, GroupTokens.EXPERTS: self.top_k}
        return steps.get(self.group_tokens, 1)

    @property
    def result_rows(self) -> int:
        """Rows of Y, of all batches."""
        return self.tokens if self.y_rows is None else self.y_rows

    @property
    def is_empty(self) -> bool:
        """Return whether tokens, or the places of groups, have no results, so that no product is launched."""
        return 0 in (self.tokens, self.outputs)

    @property
    def quantization(self) -> Quantization | None:
        """How W stores its values; None: as they are."""
        if self.weight_element is self.element:
            return None
        return Quantization(self.weight_element, self.weight_group, self.weight_scale_element)

    @property
    def op_name(self) -> str:
        return f"gemm_sparse24_{self.op}"

    @property
    def is_plain(self) -> bool:
        """Return whether the result is the sum itself, rounded to its type."""
        none = ScaleKind.NONE
        return super().is_plain and not self.has_c and self.scale_x is none and self.scale_w is none

    @property
    def is_fp8(self) -> bool:
        """Return whether the result is fp8, which may have a scale and an ``amax``."""
        return self.out_element in FP8

    @property
    def relu_bounds(self) -> tuple[float, float]:
        most = self.relu_upper_bound
        return self.relu_threshold, float("inf") if most is None else most

    @property
    def has_c(self) -> bool:
        """Return whether beta * C is added."""
        return self.beta != 0

    @property
    def reduction(self) -> int:
        """Length of the sum behind one result: K for ``forward``, M for ``dgrad``."""
        return self.k if self.op is GemmOp.FORWARD else self.m

    @property
    def sums(self) -> int:
        """Sums per token: M for ``forward``, K for ``dgrad``."""
        return self.m if self.op is GemmOp.FORWARD else self.k

    @property
    def outputs(self) -> int:
        """Results per token: as many as sums, or half as many for a gated epilogue."""
        return self.sums // 2 if self.epilogue.is_gated else self.sums

    def operands(self) -> tuple[Operand, ...]:
        """The weight, ``source`` (x or dy), ``result`` (y or dx), and the optional operands."""
        source, result = ("x", "y") if self.op is GemmOp.FORWARD else ("dy", "dx")
        f32, i32 = ElementKind.F32, ElementKind.I32
        n = self.n if self.x_rows is None else self.x_rows
        n_out = self.n if self.y_rows is None else self.y_rows
        rows = self.m if self.batches is not None else self.weight_rows
        found = [
            Operand("source", Role.IN, (n, self.reduction), self.x_element, source, self.x_order),
            Operand(
                "result", Role.OUT, (n_out, self.outputs), self.out_element, result, self.y_order, may_be="c"
            ),
        ]
        if self.epilogue.has_bias:
            found.append(Operand("bias", Role.IN, (rows,), self.bias_element))
        for name, kind, count in (("scale_x", self.scale_x, n), ("scale_w", self.scale_w, rows)):
            if kind is not ScaleKind.NONE:
                found.append(Operand(name, Role.IN, (1 if kind is ScaleKind.TENSOR else count,), f32))
        if self.has_c:
            found.append(Operand("c", Role.IN, (self.n, self.outputs), self.c_element, lines=self.y_order))
        if self.batches is not None:
            found = [replace(one, shape=(self.batches, *one.shape), batches=True) for one in found]
        if self.scale_y is not ScaleKind.NONE:
            found.append(Operand("scale_y", Role.IN, (1,), f32))
        if self.amax:
            found.append(Operand("amax", Role.OUT, (1,), f32))
        if self.groups:
            shapes = {
                GroupTokens.OFFSETS: (self.groups + 1,),
                GroupTokens.COUNTS: (self.groups,),
                GroupTokens.EXPERTS: (self.n // max(self.top_k, 1), self.top_k),
            }
            found.append(Operand(str(self.group_tokens), Role.IN, shapes[self.group_tokens], i32))
        by_index = self.group_tokens is not GroupTokens.EXPERTS
        if self.x_rows is not None and by_index:
            found.append(Operand("x_index", Role.IN, (self.n,), i32))
        if self.y_rows is not None:
            chosen = self.y_rows, self.top_k
            if by_index:
                found.append(Operand("y_index", Role.IN, chosen, i32))
            found.append(Operand("y_weights", Role.IN, chosen, f32, optional=True))
        sizes = self.weight_rows, self.k
        return (weight_operand("weight", *sizes, self.element, quantization=self.quantization), *found)


def of_places(descriptor: GemmSparse24Descriptor, n: int) -> GemmSparse24Descriptor:
    """Return the descriptor for ``n`` tokens, or places of groups; ``n`` is a multiple of ``step``."""
    rows = ("x_rows", "y_rows") if descriptor.group_tokens is GroupTokens.EXPERTS else ()
    follow = {name: n // descriptor.step for name in rows if getattr(descriptor, name) is not None}
    return descriptor.model_copy(update={"n": n, **follow})
