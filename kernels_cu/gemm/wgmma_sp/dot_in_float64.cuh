// Recomputation of float32 results that are NaN. Splitting Inf, NaN or the largest numbers into bf16 terms makes NaN,
// so a NaN sum is computed again, term after term in float64: then it is NaN or infinite exactly where it has to be.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"

// A kept value of a K tile of W: float32 in fragment order, or the exact sum of two bf16 terms, of which each swizzled
// row of 128 bytes has 32 high ones and then 32 low ones.
__device__ __forceinline__ double weight_at(const u8* tile, int row, int kept) {
  if constexpr (Config::kWPresplit) {
    const u16 *high = (const u16*)(tile + row * 128 + (kept / 8 ^ row % 8) * 16) + kept % 8,
              *low = (const u16*)(tile + row * 128 + ((kept / 8 + 4) ^ row % 8) * 16) + kept % 8;
    return (double)Element<ElementKind::BF16>::to_float(*high) + Element<ElementKind::BF16>::to_float(*low);
  } else {
    const u32 at = ((kept / 8 * 4 + row / 16) * 32 + row % 8 * 4 + kept % 8 / 2) * 4 + row / 8 % 2 * 2 + kept % 2;
    return ((const float*)tile)[at];
  }
}

// The dot product of a token and a row of W in increasing k, one fma in float64 for each kept value.
__device__ __noinline__ float dot_in_float64(const WgmmaSpParams& p, i64 token, i64 row) {
  const float* x = (const float*)p.x + token * p.x_stride;
  const u8* tile = p.packed + row / Tile::kRows * p.k_tiles * Tile::kBytes;
  const int warp = row % Tile::kRows / 16, half = row % 16 / 8, g = row % 8;
  double sum = 0;
#pragma unroll 1
  for (i64 column = 0; column < p.k; column += 4, tile += column % Tile::kColumns ? 0 : Tile::kBytes) {
    const int group = column % Tile::kColumns / 4, step = group / 8,
              quad = group % 8 / 4;  // quads are 16 dense columns
    const u32 word = *(const u32*)(tile + Tile::kValueBytes + (warp * 32 + 4 * g + 2 * step + quad) * 4);
    const u32 nibble = word >> (16 * half + group % 4 * 4) & 15;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      sum = __fma_rn((double)x[column + (nibble >> 2 * i & 3)],
                     weight_at(tile, (int)(row % Tile::kRows), group * 2 + i), sum);
  }
  return __double2float_rn(sum);
}

// The result whose first row of W is `row`, with all of its sums computed again.
__device__ __forceinline__ float finished_again(const WgmmaSpParams& p, i64 token, i64 row, float c) {
  const auto value = [&](i64 row, float c) {
    return unactivated(dot_in_float64(p, token, row), p, 1.0f, 1.0f, p.bias ? bias_at<Config>(p.bias, row) : 0.0f, c);
  };
  const float first = activation<Config, FastMath>(value(row, c));
  if constexpr (!Config::kGated) return first;
  return __fmul_rn(first, value(row + Config::kGateRows, 0.0f));
}
