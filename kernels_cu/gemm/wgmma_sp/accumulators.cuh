// The accumulators of gemm/wgmma_sp.cu: their types, their place in the workspace, and how they become results.
#pragma once
#include "gemm/wgmma_sp/pipeline.cuh"
#include "gemm/wgmma_sp/tile_scheduler.cuh"

template <bool kInteger> struct AccumulatorOf {
  using Type = float;
};
template <> struct AccumulatorOf<true> {
  using Type = int;
};
using Accumulator = AccumulatorOf<Config::kIntegers>::Type;
using AccumulatorTile = Accumulator[Config::kAccumulators];  // a thread's accumulators of 64 rows x kTileN tokens
using Accumulators = AccumulatorTile[Config::kMTilesPerWarpgroup];  // all accumulators of a thread

__device__ __forceinline__ u32 bits_of(float sum) { return __float_as_uint(sum); }
__device__ __forceinline__ u32 bits_of(int sum) { return (u32)sum; }
__device__ __forceinline__ Accumulator accumulator_of(u32 bits) {
  if constexpr (Config::kIntegers) return (int)bits;
  else return __uint_as_float(bits);
}

// Workspace -----------------------------------------------------------------------------------------

constexpr int kQuads = Config::kAccumulators / 4;  // groups of four accumulators that one instruction moves

// The index of a thread's first four accumulators in a workspace area. Its next four lie 512 elements further.
__device__ __forceinline__ i64 workspace_offset(u32 cta, u32 warpgroup, int r) {
  const i64 row_tile = (i64)cta * Config::kMTiles + warpgroup * Config::kMTilesPerWarpgroup + r;
  return (row_tile * kQuads * 128 + threadIdx.x % 128) * 4;
}

// The CTA under whose index the workspace holds blocked sums or sums of K chunks. A split tile has a place of its own,
// which its second cluster finds under the index of the first.
__device__ __forceinline__ u32 workspace_cta(const TileScheduler& scheduler) {
  const u32 cta = scheduler.loads_partials() ? blockIdx.x - Config::kClusterSize : blockIdx.x;
  return scheduler.stores_partials() || scheduler.loads_partials() ? gridDim.x + cta : cta;
}

// Stores a thread's accumulators from number kFrom on. `saved` is the place of its first four.
template <int kFrom = 0>
__device__ __forceinline__ void save_accumulators(const Accumulators& accumulators, float* saved) {
#pragma unroll
  for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
    float* to = saved + r * kQuads * 512;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const Accumulator* v = accumulators[r] + 4 * q;
      if (r * Config::kAccumulators + 4 * q >= kFrom)
        store_global(to + q * 512, bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
    }
  }
}

// Adds what save_accumulators stored. A mask of 0 stands for saved zeros, whatever the workspace holds.
template <int kFrom = 0>
__device__ __forceinline__ void add_saved(Accumulators& accumulators, const float* saved, u32 mask = ~0u) {
  constexpr int kLoads = Config::kReallocRegisters && Config::kStreamK ? 12 : 8;
#pragma unroll
  for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
    const float* from = saved + r * kQuads * 512;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (r * Config::kAccumulators + 4 * q < kFrom) continue;
      if (q % kLoads == 0) __syncwarp();  // keeps the compiler from loading all values at once, which spills registers
      const uint4 v = __ldcg((const uint4*)(from + q * 512));
      Accumulator* to = accumulators[r] + 4 * q;
      to[0] += accumulator_of(v.x & mask), to[1] += accumulator_of(v.y & mask), to[2] += accumulator_of(v.z & mask);
      to[3] += accumulator_of(v.w & mask);
    }
  }
}

// Results -------------------------------------------------------------------------------------------

// The result before its activation.
__device__ __forceinline__ float unactivated(Accumulator sum, const WgmmaSpParams& p, float scale_x, float scale_w,
                                             float bias, float c = 0.0f) {
  float v = Config::kIntegers ? __int2float_rn((int)sum) : (float)sum;
  if (Config::kScaleX) v = __fmul_rn(v, scale_x);
  if (Config::kScaleW) v = __fmul_rn(v, scale_w);
  return before_activation<Config>(v, p.alpha, bias, Config::kHasC ? __fmul_rn(p.beta, c) : 0.0f);
}
template <class Result> __device__ __forceinline__ typename Result::Bits rounded(float v) {
  if constexpr (Config::kOut == ElementKind::F32) return Result::from_float(canonical_nan(v));
  else return Result::from_float(v);
}
template <class Result> __device__ __forceinline__ typename Result::Bits rounded(Accumulator sum, float v) {
  if constexpr (Config::kRaw) return (typename Result::Bits)sum;
  else return rounded<Result>(v);
}

// The index of a result in Y, or in a batch of it.
__device__ __forceinline__ i64 y_offset(const WgmmaSpParams& p, i64 token, i64 output) {
  return Config::kYColumnMajor ? output * p.y_stride + token : token * p.y_stride + output;
}
__device__ __forceinline__ i64 outputs_per_token(const WgmmaSpParams& p) { return p.m / Config::kRowsPerOutput; }
// The bits of C's element for a result; 0 outside of Y.
__device__ __forceinline__ u32 c_bits_of(const WgmmaSpParams& p, const WorkTile& work, i64 token, i64 output) {
  if (token >= p.n || output >= p.m) return 0;
  const i64 at = Config::kYColumnMajor ? output * p.c_stride + token : token * p.c_stride + output;
  return work.of_batch<&BatchParams::c>(p, (const Config::C::Bits*)p.c)[at];
}
// The element of C for a result; 0 without C, and outside of Y.
__device__ __forceinline__ float c_of(const WgmmaSpParams& p, const WorkTile& work, i64 token, i64 output) {
  if constexpr (!Config::kHasC) return 0.0f;
  return Config::C::to_float((Config::C::Bits)c_bits_of(p, work, token, output));
}
