"""Compile times of the kernels: ``python -m benchmarks.compile_times OUT.json``.

Every kernel entry that has kernels of ours is compiled for GPU 0, each kernel into an empty cache, once
for each of its elements, for few and for many tokens, with the lightest and the heaviest epilogue, and for
a column-major X that is transposed first. The compiler is loaded before the clock starts. ``cached_ms`` is
what finding and checking the kernel in the cache takes. One process, one kernel at a time; a minute or two.
Needs a GPU, whose architecture is compiled for.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, product
from pathlib import Path
from typing import Any

from sparse24_plans.bench.record import SCHEMA, Record, files_of, machine, save, stamp
from sparse24_plans.blocksparse import kernel_table as blocks_table
from sparse24_plans.blocksparse.convolution import BlockSparseConv2dDescriptor
from sparse24_plans.blocksparse.descriptor import (
    BlockSparseAttentionDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseSoftmaxDescriptor,
)
from sparse24_plans.blocksparse.shape import BlockSparseShape
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.device.jit.cache import cache_folder
from sparse24_plans.errors import Sparse24Error
from sparse24_plans.gemm import kernel_table as gemm_table
from sparse24_plans.gemm.descriptor import GemmSparse24Descriptor
from sparse24_plans.gemm.kernel_table import GemmEntry
from sparse24_plans.plan.descriptor import Descriptor
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.plan.kernel_table import KernelEntry, consider
from sparse24_plans.plan.preference import PlanPreference
from sparse24_plans.prepare import descriptor as prepare
from sparse24_plans.prepare import kernel_table as prepare_table
from sparse24_plans.vocab import (
    BlockSparseConvOp,
    BlockSparseOp,
    DeviceProperties,
    ElementKind,
    EpilogueKind,
    GroupTokens,
    MatrixOrder,
    TileRule,
)

_M, _K = 4096, 4096
_TOKENS, _TURNED, _PADDED = (16, 4096), 17, 63
_EPILOGUES = (EpilogueKind.IDENTITY, EpilogueKind.BIAS_GELU)
_BLOCKS = (64, 16)
_KEPT = 8
"""Reciprocal of the density, at which kernels multiply kept blocks, and cut long rows of them."""
_BLOCK_ENTRIES: tuple[KernelEntry, ...] = (
    *blocks_table.MATMUL_ENTRIES,
    *blocks_table.SOFTMAX_ENTRIES,
    *blocks_table.ATTENTION_ENTRIES,
    *blocks_table.CONVOLUTION_ENTRIES,
)
_PREPARED: tuple[tuple[Any, dict[str, Any]], ...] = (
    (prepare.PruneSparse24Descriptor, {}),
    (prepare.PruneCompressSparse24Descriptor, {}),
    (prepare.CompressSparse24Descriptor, {}),
    (prepare.DecompressSparse24Descriptor, {}),
    (prepare.PackSparse24Descriptor, {}),
    (prepare.QuantizeSparse24Descriptor, {}),
    (prepare.QuantizeSparse24Descriptor, {"out_element": ElementKind.S8}),
    (prepare.TilePruneSparse24Descriptor, {"rule": TileRule.GREEDY_MAGNITUDE}),
    (prepare.TilePruneSparse24Descriptor, {"rule": TileRule.OPTIMAL}),
)


def problems(entry: KernelEntry) -> Iterator[Descriptor]:
    """Problems that a kernel entry is compiled for here, whether it serves them or not."""
    if isinstance(entry, prepare_table.PrepareEntry):
        for element, (descriptor, options) in product(entry.elements, _PREPARED):
            try:
                yield descriptor(m=_M, k=_K, element=element, **options)
            except Sparse24Error:  # the op doesn't take the element
                continue
        return
    if entry in _BLOCK_ENTRIES:
        yield from block_problems(entry)
        return
    for element, n, epilogue in product(entry.elements, _TOKENS, _EPILOGUES):
        groups = entry.least_groups if isinstance(entry, GemmEntry) else 0
        yield GemmSparse24Descriptor(n=n, m=_M, k=_K, element=element, epilogue=epilogue, groups=groups)
        if groups:
            rows: dict[str, Any] = {"x_rows": n, "y_rows": n, "top_k": 1, "group_tokens": GroupTokens.EXPERTS}
            yield GemmSparse24Descriptor(
                n=n, m=_M, k=_K, element=element, out_element=ElementKind.F32, groups=groups, **rows
            )
    if isinstance(entry, GemmEntry) and entry.column_order:
        for element in entry.elements:
            yield GemmSparse24Descriptor(n=_TURNED, m=_M, k=_K, element=element, x_order=MatrixOrder.COLUMN)


def block_problems(entry: KernelEntry) -> Iterator[Descriptor]:
    """Problems of a kernel entry for block-sparse matrices."""
    if isinstance(entry, blocks_table.MatmulEntry):
        blocks = [block for block in _BLOCKS if block in entry.blocks]
        product_op = BlockSparseOp.DSD if BlockSparseOp.DSD in entry.ops else entry.ops[0]
        epilogues = _EPILOGUES[:1] if product_op is BlockSparseOp.SDD else _EPILOGUES
        for block, element, n, epilogue in product(blocks, entry.elements, (*_TOKENS, _PADDED), epilogues):
            layout = _layout(block, (_M // block) * (_K // block) // _KEPT)
            yield BlockSparseMatmulDescriptor(
                op=product_op, layout=layout, n=n, element=element, epilogue=epilogue, inner=entry.inners[0]
            )
    elif entry in blocks_table.ATTENTION_ENTRIES:
        for block, element, op, causal in product(
            (64, 128), entry.elements, ("forward", "backward"), (False, True)
        ):
            layout = _layout(block, _M // block)
            yield BlockSparseAttentionDescriptor(
                layout=layout, head_size=128, element=element, op=op, causal=causal
            )
    elif entry in blocks_table.CONVOLUTION_ENTRIES:
        yield from _convolutions(entry)
    else:
        for block, element, op in product(_BLOCKS, entry.elements, ("forward", "backward")):
            yield BlockSparseSoftmaxDescriptor(
                layout=_layout(block, _M // block * 16), element=element, op=op
            )


def _convolutions(entry: KernelEntry) -> Iterator[Descriptor]:
    for block, element, op in product(_BLOCKS, entry.elements, BlockSparseConvOp):
        filter = BlockSparseShape(heads=1, rows=256, cols=9 * 256, block=block, blocks=_K // block)
        yield BlockSparseConv2dDescriptor(
            layout=filter, element=element, op=op, batch=64, height=56, width=56, kernel=3, padding=1
        )


def _layout(block: int, blocks: int) -> BlockSparseShape:
    return BlockSparseShape(heads=1, rows=_M, cols=_K, block=block, blocks=blocks)


def choices(device: DeviceProperties) -> Iterator[Choice]:
    """A choice for every kernel entry and every problem that it serves."""
    entries: Iterable[KernelEntry] = chain(gemm_table.ENTRIES, prepare_table.ENTRIES, _BLOCK_ENTRIES)
    for entry in entries:
        if entry.on_host or not entry.kernel.sources:
            continue
        same_bits = isinstance(entry, blocks_table.MatmulEntry) and entry.invariant
        wanted = {"batch_invariant": True} if same_bits else {}
        preference = PlanPreference(prefer_backend=entry.backend, require=wanted)
        for problem in problems(entry):
            (judged,) = consider((entry,), problem, preference, device)
            if judged.reason is None:
                yield Choice(problem, device, entry, preference, {})


def measured(device: DeviceProperties) -> list[Record]:
    """A row for every kernel that is compiled."""
    found: dict[str, Record] = {}
    with _empty_cache():
        _load_compiler(device)
    with _empty_cache():
        for choice in choices(device):
            for kernel in choice.entry.kernel_for(choice.descriptor).compile(choice):
                if kernel.seconds is not None:
                    found[kernel.path.name] = {
                        "kernel": choice.entry.name,
                        "source": kernel.source,
                        "arch": kernel.arch,
                        **_about(choice.descriptor),
                        "seconds": round(kernel.seconds, 3),
                        "nbytes": kernel.nbytes,
                    }
            begin = time.perf_counter()
            again = choice.entry.kernel_for(choice.descriptor).compile(choice)
            milliseconds = round(1e3 * (time.perf_counter() - begin), 3)
            for kernel in again:
                found[kernel.path.name].setdefault("cached_ms", milliseconds)
    return list(found.values())


def _about(problem: Descriptor) -> Mapping[str, Any]:
    """The fields that tell the problems of an entry apart."""
    names = ("m", "k", "n", "element", "epilogue", "rule")
    fields = problem.model_dump(mode="json")
    return {"op": problem.op_name, **{name: fields[name] for name in names if name in fields}}


def _load_compiler(device: DeviceProperties) -> None:
    entry = next(one for one in prepare_table.ENTRIES if not one.on_host)
    problem = prepare.PruneSparse24Descriptor(m=8, k=8, element=ElementKind.BF16)
    entry.kernel.compile(Choice(problem, device, entry, PlanPreference(), {}))


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Kernels are kept in a folder of their own, gone afterwards."""
    before = os.environ.get("SPARSE24_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPARSE24_CACHE_DIR"] = folder
        try:
            assert cache_folder() == Path(folder)
            yield
        finally:
            del os.environ["SPARSE24_CACHE_DIR"]
            if before is not None:
                os.environ["SPARSE24_CACHE_DIR"] = before


def main(out: str) -> None:
    about, rows = machine(), measured(cuda_properties(0))
    kernels = stamp(files_of({row["source"] for row in rows}))
    save({"schema": SCHEMA, **about, **kernels, "compile": rows}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
