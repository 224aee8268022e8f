// AccumulatorTile of gemm/wgmma_sp.cu, and what becomes of them: scaled, activated, rounded, and where in Y.
#pragma once
#include "gemm/wgmma_sp/pipeline.cuh"

template <bool kInteger> struct AccumulatorOf {
  using Type = float;
};
template <> struct AccumulatorOf<true> {
  using Type = int;
};
using Accumulator = AccumulatorOf<Config::kIntegers>::Type;
using AccumulatorTile = Accumulator[Config::kAccumulators];  // a thread's m_rank of 64 rows x kTileN

__device__ __forceinline__ u32 bits_of(float sum) { return __float_as_uint(sum); }
__device__ __forceinline__ u32 bits_of(int sum) { return (u32)sum; }
__device__ __forceinline__ Accumulator accumulator_of(u32 bits) {
  if constexpr (Config::kIntegers) return (int)bits;
  else return __uint_as_float(bits);
}

// Where the workspace has a thread's first four sums; the next four lie 512 on.
__device__ __forceinline__ i64 workspace_offset(u32 block, u32 warpgroup, int r) {
  const i64 row_tile = (i64)block * Config::kMTiles + warpgroup * Config::kMTilesPerWarpgroup + r;
  return (row_tile * (Config::kAccumulators / 4) * 128 + threadIdx.x % 128) * 4;
}

// Whose y_offset there is that of the work's groups or parts: one that is handed over has its own, which goes with it.
__device__ __forceinline__ u32 workspace_cta(const TileScheduler& scheduler) {
  const u32 block = scheduler.loads_partials() ? blockIdx.x - Config::kClusterSize : blockIdx.x;
  return scheduler.stores_partials() || scheduler.loads_partials() ? gridDim.x + block : block;
}

// A scale of kind kScaleX or kScaleW.
template <int kKind> __device__ __forceinline__ float scale_at(const float* scales, i64 index) {
  return kKind == 0 ? 1.0f : scales[kKind == 1 ? 0 : index];
}

// The result before it is rounded to its type; of a gated one, with FastMath the gate, with NoMath the other factor.
template <class Math = FastMath> __device__ __forceinline__ float finished(Accumulator sum, const WgmmaSpParams& p,
                                                                           float scale_x, float scale_w, float bias) {
  float v = Config::kIntegers ? __int2float_rn((int)sum) : (float)sum;
  if (Config::kScaleX) v = __fmul_rn(v, scale_x);
  if (Config::kScaleW) v = __fmul_rn(v, scale_w);
  return activated<Config, Math>(v, p.alpha, bias);
}
template <class Result> __device__ __forceinline__ typename Result::Bits rounded(float v) {
  if constexpr (Config::kOut == ElementKind::F32) return Result::from_float(canonical_nan(v));
  else return Result::from_float(v);
}
template <class Result> __device__ __forceinline__ typename Result::Bits rounded(Accumulator sum, float v) {
  if constexpr (Config::kRaw) return (typename Result::Bits)sum;
  else return rounded<Result>(v);
}

// Where y has a result.
__device__ __forceinline__ i64 y_offset(const WgmmaSpParams& p, i64 token, i64 output) {
  return Config::kYColumnMajor ? output * p.y_stride + token : token * p.y_stride + output;
}
// Results of a token.
__device__ __forceinline__ i64 outputs_per_token(const WgmmaSpParams& p) { return p.m / Config::kRowsPerOutput; }
