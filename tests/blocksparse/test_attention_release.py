"""When attention's kernel releases the tile of Q: read from the compiler's PTX, without a GPU."""

from __future__ import annotations

import pytest

from sparse24_plans import BlockSparseAttentionDescriptor, BlockSparseShape
from sparse24_plans.blocksparse.backends import attention_wgmma

from ..kernels.index_functions import ptx_of


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("head_size", [104, 128])
def test_q_is_released_after_a_product_of_its_fragments(head_size, block):
    """An arrival at a barrier does not wait for loads in flight, and TMA then fills their memory anew."""
    shape = BlockSparseShape(heads=1, rows=1024, cols=1024, block=block, blocks=10)
    desc = BlockSparseAttentionDescriptor(layout=shape, head_size=head_size, element="bf16", scale=0.1)
    text = ptx_of("blocksparse/attention_wgmma.cu", attention_wgmma.defines(desc))
    _, *loads = text.split("ldmatrix")
    assert len(loads) == -(-head_size // 16)
    product, *_ = loads[-1].split("wgmma.wait_group")
    assert "wgmma.mma_async" in product
    assert "mbarrier.arrive" not in "".join(loads[:-1]) + product
