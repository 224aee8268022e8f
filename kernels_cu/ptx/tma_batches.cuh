// Wrappers of PTX instructions of sm_90: TMA of tensors with one dimension more than in tma.cuh, the batch.
#pragma once
#include "ptx/tma.cuh"

// Prefetches a box of a 3-D tensor to L2.
__device__ __forceinline__ void tma_prefetch(const TensorMap* map, u32 column, u32 row, u32 batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(column), "r"(row),
               "r"(batch)
               : "memory");
}

// Loads a box of a 4-D tensor. Elements outside of the tensor are zero.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 column, u32 row, u32 group, u32 batch,
                                         u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];"
      :
      : "r"(to), "l"(map), "r"(column), "r"(row), "r"(group), "r"(batch), "r"(barrier)
      : "memory");
}
// Loads a box into every CTA of the cluster in `mask`, at the same shared memory address.
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap* map, u32 column, u32 row, u32 group,
                                                   u32 batch, u32 barrier, u16 mask) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
               :
               : "r"(to), "l"(map), "r"(column), "r"(row), "r"(group), "r"(batch), "r"(barrier), "h"(mask)
               : "memory");
}

// Stores a box of a 3-D tensor. Elements outside of the tensor are not written.
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 column, u32 row, u32 batch, u32 from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];"
               :
               : "l"(map), "r"(column), "r"(row), "r"(batch), "r"(from)
               : "memory");
}
