"""Launches ``blocksparse/softmax.cu``: rows of kept cells, held in registers. One kernel, no workspace."""

from __future__ import annotations

from ...device.jit.enum_codes import ELEMENT_CODES, MASK_CODES
from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ...vocab import BlockSparsePass
from ..descriptor import BlockSparseSoftmaxDescriptor
from ..lookup_tables import addresses
from ..schedules.softmax import SoftmaxSchedule, softmax_teams

_SOURCE = "blocksparse/softmax.cu"


@kernel_params("blocksparse/params/softmax.cuh")
class SoftmaxParams(KernelParams):
    """Parameters of ``blocksparse/softmax.cu``."""

    pointers = field("const int*", "Index where the blocks of each block row begin.")
    columns = field("const int*", "Block column of each block: [blocks].")
    x = field("const void*", "Values [Z, blocks, b, b] of the input; of the result y, for the backward pass.")
    dy = field("const void*", "Gradient of the result, backward pass only: [Z, blocks, b, b].")
    out = field("void*", "Values of the result, or of the gradient: [Z, blocks, b, b].")
    rpe = field("const void*", "Relative position bias [H, rows, row_cells].")
    key_mask = field("const void*", "Key padding mask [Z, row_cells].")
    attn_mask = field("const void*", "Attention mask [rows, row_cells].")
    blocks = field("i64", "Number of kept blocks of a batch element.")
    row_cells = field("i64", "Number of cells of a row of the dense matrix.")
    work_items = field("u32", "Number of teams' pieces of rows: block rows * Z * teams of a block row.")
    batch = field("u32", "Number of batch elements, Z.")
    head_block_rows = field("u32", "Number of block rows of a head.")
    scale = field("float", "Factor of the input.")


class Kernel(BaseKernel[BlockSparseSoftmaxDescriptor]):
    default_alignment = Alignment(16)
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        schedule = SoftmaxSchedule.of(desc, choice.device)
        self._blocks = schedule.blocks(desc, choice.device.multiprocessors) if desc.layout.blocks else 0
        self.details = (
            f"{softmax_teams(desc)} pieces of rows on {self._blocks * schedule.teams} teams of "
            f"{schedule.warps} warps, which hold {schedule.warps * schedule.chunks} blocks"
        )
        self._function = load(
            _SOURCE,
            "softmax",
            schedule.threads,
            choice.device,
            _defines(desc, schedule),
            shared_bytes=schedule.shared_bytes(desc),
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        if self._blocks == 0:
            return nothing
        desc, found = self.descriptor, addresses(views["layout"].address, self.descriptor.layout)
        read, written = ("x", "y") if desc.op is BlockSparsePass.FORWARD else ("y", "dx")
        places = {"x": read, "out": written, "dy": "dy", "rpe": "rpe"}
        places |= {"key_mask": "key_padding_mask", "attn_mask": "attn_mask"}
        parameters = SoftmaxParams(
            pointers=found["row_pointers"],
            columns=found["columns"],
            blocks=desc.layout.blocks,
            row_cells=desc.layout.cols,
            work_items=softmax_teams(desc),
            batch=desc.batch,
            head_block_rows=desc.layout.block_rows,
            scale=desc.scale,
            **{parameter: views[name].address for parameter, name in places.items() if name in views},
        )
        return self._function.bind(self._blocks, parameters, overlapping=True)


def _defines(desc: BlockSparseSoftmaxDescriptor, schedule: SoftmaxSchedule) -> dict[str, int]:
    """Macros of the kernel for one problem type and schedule."""
    return {
        "ELEMENT": ELEMENT_CODES[desc.element],
        "BLOCK": desc.layout.block,
        "WARPS": schedule.warps,
        "TEAMS": schedule.teams,
        "CHUNKS": schedule.chunks,
        "BLOCKS_PER_SM": schedule.blocks_per_sm,
        "BACKWARD": int(desc.op is BlockSparsePass.BACKWARD),
        "RPE": int(desc.rpe),
        "CAUSAL": int(desc.causal),
        "KEY_MASK": MASK_CODES[desc.key_padding_mask],
        "ATTN_MASK": MASK_CODES[desc.attn_mask],
    }
