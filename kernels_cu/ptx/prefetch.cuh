// Prefetches into L2.
#pragma once
#include "common/types.cuh"

// Prefetches the first `bytes` bytes of an array into L2, up to 4 MB: each CTA an equal part, by 32 of its threads. A
// kernel does so before it waits for those that came before, whose last CTAs leave memory idle.
__device__ __forceinline__ void prefetch_part_l2(const void* array, i64 bytes) {
  const i64 end = min(bytes, 4ll << 20);
  for (i64 at = ((i64)blockIdx.x * 32 + threadIdx.x % 32) * 128; at < end; at += (i64)gridDim.x * 32 * 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8*)array + at));
}
