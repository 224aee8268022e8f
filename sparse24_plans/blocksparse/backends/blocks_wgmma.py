"""Launches ``blocksparse/blocks_wgmma.cu``: kept blocks and the rows that they meet, multiplied by wgmma."""

from __future__ import annotations

import ctypes

from ..._vendor import cuda_driver_abi
from ..._vendor.library_error import LibraryError
from ...device.jit.launcher import load
from ...device.streams import Launch, driver_error
from ...plan.kernel import Choice, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ..descriptor import BlockSparseMatmulDescriptor
from ..schedule import best_schedule
from ..tables import groups
from ..wgmma import (
    K_MAJOR,
    LINE_BYTES,
    SOURCE,
    STEP,
    Form,
    Parameters,
    defines,
    dense_map,
    matrices,
    values_map,
)


class Kernel(BaseKernel[BlockSparseMatmulDescriptor]):
    default_alignment = Alignment(16)
    sources = (SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._form = form = Form(desc)
        self._schedule = schedule = best_schedule(desc, device.multiprocessors)
        items = schedule.items(desc)
        self._blocks = min(items, schedule.resident_clusters(device.multiprocessors)) * schedule.share
        self.details = (
            f"{items * schedule.share} tiles of {schedule.rows} rows x {schedule.tokens} tokens on "
            f"{self._blocks} blocks, clusters of {schedule.share}, {schedule.stages} stages"
        )
        self._function = load(
            SOURCE,
            "blocks_wgmma",
            schedule.threads,
            device,
            defines(desc, schedule),
            Parameters,
            shared_bytes=schedule.shared_bytes(),
        )
        self._parameters = Parameters(
            blocks=desc.layout.blocks,
            alpha=desc.alpha,
            strips=form.strips,
            head_strips=form.head_strips,
            head_lines=form.head_lines,
            words=form.words,
            heads=desc.layout.heads,
            batch=desc.batch,
            tokens=desc.n,
            token_clusters=schedule.token_clusters(desc),
            band=schedule.band(desc),
            groups=groups(desc.layout),
            steps=-(-desc.n // STEP),
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, form = self.descriptor, self._form
        if self._blocks == 0:
            return nothing
        parameters = Parameters.from_buffer_copy(self._parameters)
        for field, at in form.tables(views["layout"].address, desc.layout).items():
            setattr(parameters, field, at)
        try:
            maps = self._maps(views)
        except LibraryError as error:
            raise driver_error(error) from error
        ctypes.memmove(ctypes.addressof(parameters), maps, len(maps))  # the maps come first
        if "bias" in views:
            parameters.bias = views["bias"].address
        return self._function.bind(self._blocks, parameters, overlapping=True)

    def _maps(self, views: Views) -> bytes:
        """Of the left and the right operand and the result."""
        desc, form, one = self.descriptor, self._form, self._schedule
        found = bytes(2 * cuda_driver_abi.TENSOR_MAP_BYTES)
        if desc.layout.blocks and desc.reduction:  # else nothing is read
            block = desc.layout.block
            if form.sampled:
                found = dense_map(views["a"], form.left_major, block)
                found += dense_map(views["b"], form.right_major, min(block, one.tokens))
            else:
                step = min(block, STEP)
                lines = block if form.left_major == K_MAJOR else step
                found = values_map(views[form.left], (lines // one.share, step))
                found += dense_map(views[form.right], form.right_major, one.tokens, step)
        out = views["c"]
        wide = LINE_BYTES // out.element.itemsize  # the kernel's staging area has 64 lines of 128 bytes
        if form.sampled:
            return found + values_map(out, (STEP, wide))
        box = (STEP if form.tokens_contiguous else wide), wide
        return found + cuda_driver_abi.swizzled_matrices_map(
            out.address, matrices(out.shape), out.element.itemsize, box
        )
