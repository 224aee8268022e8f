"""Launches ``blocksparse/blocks_strict.cu``: kept blocks, multiplied in the order of the oracle."""

from __future__ import annotations

from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Views, address_of
from ...vocab import ElementKind
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import K_MAJOR, KernelProblem
from ..schedules.blocks_strict import BlocksStrictSchedule

_SOURCE = "blocksparse/blocks_strict.cu"


@kernel_params("blocksparse/params/blocks_strict.cuh")
class BlocksStrictParams(KernelParams):
    """Parameters of ``blocksparse/blocks_strict.cu``."""

    left = field("const void*", "Values [Z, blocks, b, b]; A [Z, H, ..] for sdd.")
    right = field("const void*", "Dense operand [Z, H, ..].")
    bias = field("const void*", "Bias [H, rows], or null.")
    out = field("void*", "C [Z, H, ..]; the values for sdd.")
    pointers = field("const int*", "Index where the entries of each block row begin.")
    columns = field("const int*", "Block column of each entry in op(S): [entries].")
    value_index = field("const int*", "Index of each entry in the values, or null if they are in order.")
    group_rows = field("const int*", "sdd: block row of each group, negative if there is no such group.")
    group_firsts = field("const int*", "sdd: first entry of each group.")
    left_matrix = field("i64", "Elements from one matrix of left to the next.")
    left_k = field("i64", "Elements from one k of left to the next.")
    left_row = field("i64", "Elements from one row of left to the next.")
    right_matrix = field("i64", "Elements from one matrix of right to the next.")
    right_k = field("i64", "Elements from one k of right to the next.")
    right_token = field("i64", "Elements from one token of right to the next.")
    out_matrix = field("i64", "Elements from one matrix of out to the next.")
    out_row = field("i64", "Elements from one row of out to the next.")
    out_token = field("i64", "Elements from one token of out to the next.")
    blocks = field("i64", "Number of kept blocks of a batch element.")
    tokens = field("i64", "Number of columns of X.")
    depth = field("i64", "sdd: length of the sums.")
    heads = field("u32", "Number of heads, H.")
    head_block_rows = field("u32", "Number of block rows of a head.")
    work_rows = field("u32", "Number of block rows of all heads; of groups, for sdd.")
    n_tiles = field("u32", "Number of token tiles of a block row; of a group, for sdd.")
    alpha = field("float", "Factor of the product.")


class Kernel(BaseKernel[BlockSparseMatmulDescriptor]):
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        self._problem = problem = KernelProblem(desc)
        self._tiles = tiles = BlocksStrictSchedule.of(desc, choice.device.multiprocessors)
        self._ctas = tiles.ctas(desc)
        self.details = f"{self._ctas} tiles of {tiles.rows} rows x {tiles.tokens} tokens"
        self._function = load(_SOURCE, "blocks_strict", tiles.threads, choice.device, defines(desc, tiles))
        one, n, k = desc.layout, desc.n, desc.reduction
        # Elements to the next k, and to the next row or token.
        width = one.block if not problem.sampled else one.rows if desc.trans_a else n
        left = (1, width) if problem.left_major == K_MAJOR else (width, 1)
        across = one.cols if problem.sampled else n
        right = (1, k) if problem.right_major == K_MAJOR else (across, 1)
        rows = problem.head_block_rows * one.block
        self._parameters = BlocksStrictParams(
            left_matrix=one.rows * n,
            left_k=left[0],
            left_row=left[1],
            right_matrix=k * across,
            right_k=right[0],
            right_token=right[1],
            out_matrix=rows * n,
            out_row=n if problem.tokens_contiguous else 1,
            out_token=1 if problem.tokens_contiguous else rows,
            blocks=one.blocks,
            tokens=n,
            depth=n,
            heads=one.heads,
            head_block_rows=max(problem.head_block_rows, 1),
            work_rows=tiles.work_rows(desc),
            n_tiles=tiles.n_tiles(desc),
            alpha=desc.alpha,
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        problem = self._problem
        if self._ctas == 0:
            return nothing
        parameters = self._parameters.with_values(
            **problem.entries(views["layout"].address),
            left=views[problem.left].address,
            right=views[problem.right].address,
            bias=address_of(views, "bias"),
            out=views["c"].address,
        )
        return self._function.bind(self._ctas, parameters)


def defines(desc: BlockSparseMatmulDescriptor, tiles: BlocksStrictSchedule) -> dict[str, int]:
    """Macros of the kernel."""
    problem = KernelProblem(desc)
    return {
        **type_defines(desc),
        "BLOCK": desc.layout.block,
        "TILE_N": tiles.tokens,
        "SAMPLED": int(problem.sampled),
        "LEFT_ALONG_K": int(problem.left_major == K_MAJOR),
        "RIGHT_ALONG_K": int(problem.right_major == K_MAJOR),
        "RAW": int(desc.out_element is ElementKind.I32 and desc.is_plain),
    }
