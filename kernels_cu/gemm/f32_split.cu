// float32 as a sum of bf16: x = high + middle + low, each the one nearest to what those before it leave. X[n, k] comes
// out as kSplitTerms matrices [n, k], one after the other: gemm/wgmma_sp.cu multiplies them.
//
// Three parts hold every float32 of at least 2^-110 exactly, for bf16 reaches down to 2^-133; so much at most is lost
// of a smaller one. What has no finite parts (Inf, NaN, and what lies so near 2^128 that it rounds to Inf) has a NaN
// among them, or infinities that cancel: its products give NaN, and whoever multiplies sees that.
//
//   role        who            what
//   every warp  256 threads    8 adjacent elements a thread: 32 bytes in, 16 bytes of each part out
//
//   no barriers, no shared memory; few registers
//
//   thread   | load 8 | round to bf16, subtract | store | .. for the next part
#include "gemm/bf16_terms.cuh"
#include "ptx/async.cuh"

// Everything that is compiled in.
struct Config {
  static constexpr int kSplitTerms = S24_SPLIT_TERMS;
  static constexpr int kThreads = 256, kElementsPerThread = 8;  // elements of a thread
};

struct F32SplitParams {
  const float* x;  // [n, k], row stride x_stride
  u16* parts;      // [kParts][n][k]
  i64 n, k, x_stride;
};
static_assert(matches_host<F32SplitParams>(), "the host has another F32SplitParams");

extern "C" __global__ void __launch_bounds__(Config::kThreads) f32_split(const F32SplitParams p) {
  // The product may begin once all before this pass is done, so it may read its weight without waiting.
  grid_dependency_wait();
  launch_dependent_grids();
  const i64 across = p.k / Config::kElementsPerThread, count = p.n * across,
            index = (i64)blockIdx.x * Config::kThreads + threadIdx.x;
  if (index >= count) return;
  const i64 row = count <= 0xffffffff ? (i64)((u32)index / (u32)across) : index / across;
  const float4* from = (const float4*)(p.x + row * p.x_stride + (index - row * across) * Config::kElementsPerThread);
  float4 low = from[0], high = from[1];
#pragma unroll
  for (int part = 0; part < Config::kSplitTerms; ++part) {
    const u32 a = take_term(low.x, low.y), b = take_term(low.z, low.w);
    const u32 c = take_term(high.x, high.y), d = take_term(high.z, high.w);
    *(uint4*)(p.parts + part * p.n * p.k + index * Config::kElementsPerThread) = make_uint4(a, b, c, d);
  }
}
