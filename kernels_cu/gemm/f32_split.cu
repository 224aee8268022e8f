// Splits X into bf16 terms (gemm/bf16_terms.cuh). X[n, k] becomes kSplitTerms matrices [n, k], one after the other,
// which gemm/wgmma_sp.cu multiplies.
//
// Three terms hold every float32 of at least 2^-110 exactly, because bf16 reaches down to 2^-133, which also bounds the
// error of smaller values. Inf, NaN and values so near 2^128 that they round to Inf have no finite terms: their terms
// include a NaN, or infinities that cancel. Their products sum to NaN, which gemm/wgmma_sp.cu recomputes.
//
//   role        threads        what it does
//   every warp  256 threads    splits 8 adjacent elements per thread: 32 bytes in, 16 bytes of each term out
//
//   no barriers, no shared memory; few registers
//
//   thread   | load 8 | round to bf16, subtract | store | .. for the next term
#include "gemm/bf16_terms.cuh"
#include "gemm/params/f32_split.cuh"
#include "ptx/async.cuh"

struct Config {
  static constexpr int kSplitTerms = S24_SPLIT_TERMS;
  static constexpr int kThreads = 256, kElementsPerThread = 8;
};

extern "C" __global__ void __launch_bounds__(Config::kThreads) f32_split(const F32SplitParams p) {
  // The product is launched once all kernels before this one are done, so it may read its weight without waiting.
  grid_dependency_wait();
  launch_dependent_grids();
  const i64 across = p.k / Config::kElementsPerThread, count = p.n * across,
            index = (i64)blockIdx.x * Config::kThreads + threadIdx.x;
  if (index >= count) return;
  const i64 row = count <= 0xffffffff ? (i64)((u32)index / (u32)across) : index / across;
  const float4* from = (const float4*)(p.x + row * p.x_stride + (index - row * across) * Config::kElementsPerThread);
  float4 low = from[0], high = from[1];
#pragma unroll
  for (int term = 0; term < Config::kSplitTerms; ++term) {
    const u32 a = take_term(low.x, low.y), b = take_term(low.z, low.w);
    const u32 c = take_term(high.x, high.y), d = take_term(high.z, high.w);
    *(uint4*)(p.terms + term * p.n * p.k + index * Config::kElementsPerThread) = make_uint4(a, b, c, d);
  }
}
