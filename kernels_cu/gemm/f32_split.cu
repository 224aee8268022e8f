// float32 as a sum of bf16: x = high + middle + low, each the one nearest to what those before it leave. X[n, k] comes
// out as kParts matrices [n, k], one after the other: gemm/wgmma_sp.cu multiplies them.
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
#include "gemm/params/f32_split.cuh"
#include "ptx/async.cuh"

// Everything that is compiled in.
struct Config {
  static constexpr int kParts = S24_SPLIT_TERMS;
  static constexpr int kThreads = 256, kAtOnce = 8;  // elements of a thread
};

extern "C" __global__ void __launch_bounds__(Config::kThreads) f32_split(const F32SplitParams p) {
  // The product may begin once all before this pass is done, so it may read its weight without waiting.
  grid_dependency_wait();
  launch_dependent_grids();
  const i64 across = p.k / Config::kAtOnce, count = p.n * across,
            index = (i64)blockIdx.x * Config::kThreads + threadIdx.x;
  if (index >= count) return;
  const i64 row = count <= 0xffffffff ? (i64)((u32)index / (u32)across) : index / across;
  const float4* from = (const float4*)(p.x + row * p.x_stride + (index - row * across) * Config::kAtOnce);
  float4 low = from[0], high = from[1];
#pragma unroll
  for (int part = 0; part < Config::kParts; ++part) {
    const u32 a = take_part(low.x, low.y), b = take_part(low.z, low.w);
    const u32 c = take_part(high.x, high.y), d = take_part(high.z, high.w);
    *(uint4*)(p.terms + part * p.n * p.k + index * Config::kAtOnce) = make_uint4(a, b, c, d);
  }
}
