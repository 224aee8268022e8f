// The first launch of attention's gradients: for every row of Q the base of its exponents, and its delta.
#pragma once
#include "blocksparse/attention_backward_wgmma/config.cuh"

// Returns the dot product of two times 8 elements.
__device__ __forceinline__ float sum_of_products(const uint4& a, const uint4& b) {
  const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = __fmaf_rn(Config::In::to_float((u16)left[i]), Config::In::to_float((u16)right[i]), sum);
    sum = __fmaf_rn(Config::In::to_float((u16)(left[i] >> 16)), Config::In::to_float((u16)(right[i] >> 16)), sum);
  }
  return sum;
}

// Rows without any visible key get the base Inf, so that their exponentials are 0. Invalid rows get it, too; nothing of
// them is read.
extern "C" __global__ void __launch_bounds__(Config::kRowThreads)
    attention_backward_rows(const __grid_constant__ AttentionBackwardWgmmaParams p) {
  launch_dependents_and_wait();
  const i64 place = (i64)blockIdx.x * Config::kRowThreads + threadIdx.x, line = place / Config::kRowLanes;
  const u32 matrix = (u32)(line / p.queries), row = (u32)(line % p.queries);
  bool counts = true;
  if constexpr (Config::kLengths) counts = (int)row < p.tables.q_lengths[matrix / p.heads];
  float delta = 0.0f;
  if constexpr (Config::kRowChunks == Config::kRowLanes) {
    if (counts) delta = sum_of_products(((const uint4*)p.o)[place], ((const uint4*)p.d_o)[place]);
  } else {
    const int chunk = (int)(place % Config::kRowLanes);
    const i64 at = line * Config::kRowChunks + chunk;
    if (counts && chunk < Config::kRowChunks)
      delta = sum_of_products(((const uint4*)p.o)[at], ((const uint4*)p.d_o)[at]);
  }
#pragma unroll
  for (int distance = Config::kRowLanes / 2; distance > 0; distance /= 2)
    delta += __shfl_xor_sync(~0u, delta, distance);
  if (threadIdx.x % Config::kRowLanes == 0) {
    const float lse = counts ? p.lse[line] : -infinity();
    p.bases[line] = lse == -infinity() ? infinity() : lse * 1.4426950408889634f;
    p.deltas[line] = delta;
  }
}
