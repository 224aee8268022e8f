// Wrappers of PTX instructions of sm_90: copies of boxes of 3-D tensors, and what else dense tiles take.
#pragma once
#include "ptx/tma.cuh"

// What L2 is to think of what is copied: createpolicy's codes of whole accesses.
constexpr u64 kEvictFirst = 0x12f0000000000000, kEvictLast = 0x14f0000000000000;

// cp_async_16, or nothing at all.
__device__ __forceinline__ void cp_async_16_if(bool copies, u32 to, const void* from, bool keep) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\t"
               "@p cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;\n\t}" ::"r"(to),
               "l"(from), "r"(keep ? 16 : 0), "r"((int)copies));
}

// A box of a 3-D tensor; what lies outside of the tensor is zero.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 column, u32 row, u32 matrix, u32 barrier,
                                         u64 policy) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
               "[%1, {%2, %3, %4}], [%5], %6;"
               :
               : "r"(to), "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier), "l"(policy)
               : "memory");
}
// The same of a 4-D tensor.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 column, u32 row, u32 group, u32 matrix,
                                         u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
               "[%1, {%2, %3, %4, %5}], [%6], %7;"
               :
               : "r"(to), "l"(map), "r"(column), "r"(row), "r"(group), "r"(matrix), "r"(barrier), "l"(policy)
               : "memory");
}
// A box of a 3-D tensor, shared to global; what lies outside of the tensor is not written.
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 column, u32 row, u32 matrix, u32 from, u64 policy) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], %5;"
               :
               : "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(from), "l"(policy)
               : "memory");
}
