// Sums of gemm/wgmma_sp.cu, and what becomes of them: scaled, activated, rounded, and where in Y.
#pragma once
#include "gemm/wgmma_sp/pipeline.cuh"

template <bool kInteger> struct SumOf {
  using Type = float;
};
template <> struct SumOf<true> {
  using Type = int;
};
using Sum = SumOf<Config::kIntegers>::Type;
using Sums = Sum[Config::kSums];  // a thread's share of 64 rows x kTokens

__device__ __forceinline__ u32 bits_of(float sum) { return __float_as_uint(sum); }
__device__ __forceinline__ u32 bits_of(int sum) { return (u32)sum; }
__device__ __forceinline__ Sum sum_of(u32 bits) {
  if constexpr (Config::kIntegers) return (int)bits;
  else return __uint_as_float(bits);
}

// Where the workspace has a thread's first four sums; the next four lie 512 on.
__device__ __forceinline__ i64 place_of_sums(u32 block, u32 warpgroup, int r) {
  const i64 row_tile = (i64)block * Config::kRowTiles + warpgroup * Config::kRowBlocks + r;
  return (row_tile * (Config::kSums / 4) * 128 + threadIdx.x % 128) * 4;
}

// Whose place there is that of the item's groups or parts: one that is handed over has its own, which goes with it.
__device__ __forceinline__ u32 block_of_groups(const Turns& turn) {
  const u32 block = turn.takes() ? blockIdx.x - Config::kCluster : blockIdx.x;
  return turn.gives() || turn.takes() ? gridDim.x + block : block;
}

// A scale of kind kScaleX or kScaleW.
template <int kKind> __device__ __forceinline__ float scale_at(const float* scales, i64 index) {
  return kKind == 0 ? 1.0f : scales[kKind == 1 ? 0 : index];
}

// The result before it is rounded to its type; of a gated one, with FastMath the gate, with NoMath the other factor.
template <class Math = FastMath>
__device__ __forceinline__ float finished(Sum sum, const WgmmaSpParams& p, float scale_x, float scale_w, float bias) {
  float v = Config::kIntegers ? __int2float_rn((int)sum) : (float)sum;
  if (Config::kScaleX) v = __fmul_rn(v, scale_x);
  if (Config::kScaleW) v = __fmul_rn(v, scale_w);
  return activated<Config, Math>(v, p.alpha, bias);
}
template <class Result> __device__ __forceinline__ typename Result::Bits rounded(float v) {
  if constexpr (Config::kOut == ElementKind::F32) return Result::from_float(canonical_nan(v));
  else return Result::from_float(v);
}
template <class Result> __device__ __forceinline__ typename Result::Bits rounded(Sum sum, float v) {
  if constexpr (Config::kRaw) return (typename Result::Bits)sum;
  else return rounded<Result>(v);
}

// Where y has a result.
__device__ __forceinline__ i64 place(const WgmmaSpParams& p, i64 token, i64 output) {
  return Config::kColumnsY ? output * p.y_stride + token : token * p.y_stride + output;
}
// Results of a token.
__device__ __forceinline__ i64 outputs_of(const WgmmaSpParams& p) { return p.m / Config::kRowsPerOutput; }
