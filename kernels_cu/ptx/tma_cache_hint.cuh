// Wrappers of PTX instructions of sm_90: TMA with L2 policies, and a predicated cp.async.
#pragma once
#include "ptx/tma.cuh"

// L2 policies, in the encoding of createpolicy for a whole access.
constexpr u64 kEvictFirst = 0x12f0000000000000, kEvictLast = 0x14f0000000000000;

// cp_async_16 where `copies` is true.
__device__ __forceinline__ void cp_async_16_if(bool copies, u32 to, const void* from, bool keep) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\t"
               "@p cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;\n\t}" ::"r"(to),
               "l"(from), "r"(keep ? 16 : 0), "r"((int)copies));
}

// `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
               "%4;"
               :
               : "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
}
// Loads a box of a 3-D tensor. Elements outside of the tensor are zero.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 column, u32 row, u32 matrix, u32 barrier,
                                         u64 policy) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
               "[%1, {%2, %3, %4}], [%5], %6;"
               :
               : "r"(to), "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier), "l"(policy)
               : "memory");
}
// Loads a box of a 4-D tensor. Elements outside of the tensor are zero.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 column, u32 row, u32 group, u32 matrix,
                                         u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
               "[%1, {%2, %3, %4, %5}], [%6], %7;"
               :
               : "r"(to), "l"(map), "r"(column), "r"(row), "r"(group), "r"(matrix), "r"(barrier), "l"(policy)
               : "memory");
}
// Stores a box of a 3-D tensor. Elements outside of the tensor are not written.
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 column, u32 row, u32 matrix, u32 from, u64 policy) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], %5;"
               :
               : "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(from), "l"(policy)
               : "memory");
}
