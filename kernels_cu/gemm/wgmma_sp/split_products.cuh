// float32 out of bf16: products of parts, for gemm/wgmma_sp.cu with kSplitTerms > 0.
//
// A tile of W is 64 rows x 64 columns, and X comes in as many boxes of 64 columns as it has parts, the low part first.
// Of the products of part i of W and part j of X those with i + j < kSplitTerms are added: a tile's small ones first, where
// the tensor cores cut little off, high * high last.
//
// Three parts, six products: a tile is float32; each thread splits what it multiplies in its registers, and the tile is
// free again. Each tile's sums then move to float32 outside of the tensor cores; with one slice, those of kTilesPerBlockedSum
// tiles are added up by themselves (groups.cuh).
//
// Two parts, three products (kWPresplit): a tile holds both parts, side by side in each row of 128 bytes, and wgmma reads
// them there. AccumulatorTile move to float32 every kTilesPerPromotion tiles. What limits it is shared memory: wgmma.sp reads X at its
// full rate of 128 bytes a cycle, and what else is read or copied in comes on top.
#pragma once
#include "gemm/bf16_terms.cuh"
#include "gemm/wgmma_sp/config.cuh"

#ifndef S24_W_PRESPLIT
// A thread's values and metadata of a row tile: two steps of 16 kept columns. In shared memory they lie in fragment
// order: [step][columns 0-7, 8-15][warp][lane][row, row + 8][pair].
struct WeightFragment {
  float values[4][4];
  u32 metadata[1];

  __device__ __forceinline__ void read(u32 at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_shared_x4(values[i], at + (i * 128 + threadIdx.x % 128) * 16);
    load_shared_words(metadata, at + Tile::kValueBytes + threadIdx.x % 128 * 4);
  }
  // Known once all has come.
  __device__ __forceinline__ u32 fold_of_loads() const {
    return bits_of(values[0][0]) ^ bits_of(values[1][0]) ^ bits_of(values[2][0]) ^ bits_of(values[3][0]) ^ metadata[0];
  }
};

// The same in parts, as wgmma loads_partials them.
struct WeightTerms {
  u32 words[2][Config::kSplitTerms][4], metadata[1];

  __device__ __forceinline__ void load_partials(WeightFragment& tile) {
    metadata[0] = tile.metadata[0];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int part = 0; part < Config::kSplitTerms; ++part) {
        words[i / 2][part][i % 2 * 2] = take_term(tile.values[i][0], tile.values[i][1]);
        words[i / 2][part][i % 2 * 2 + 1] = take_term(tile.values[i][2], tile.values[i][3]);
      }
  }
};

// A kept value of a tile.
__device__ __forceinline__ float weight_at(const u8* tile, int row, int kept) {
  const u32 at = ((kept / 8 * 4 + row / 16) * 32 + row % 8 * 4 + kept % 8 / 2) * 4 + row / 8 % 2 * 2 + kept % 2;
  return ((const float*)tile)[at];
}
#else
// A kept value of a tile: 64 rows of 32 high parts and as many low ones, swizzled. Their sum is a double.
__device__ __forceinline__ double weight_at(const u8* tile, int row, int kept) {
  const u16 *high = (const u16*)(tile + row * 128 + (kept / 8 ^ row % 8) * 16) + kept % 8,
            *low = (const u16*)(tile + row * 128 + ((kept / 8 + 4) ^ row % 8) * 16) + kept % 8;
  return (double)Element<ElementKind::BF16>::to_float(*high) + Element<ElementKind::BF16>::to_float(*low);
}
#endif

// The sum behind a result again, term after term in float64: where parts of Inf, NaN or the largest numbers made NaN
// of it. So it is NaN or infinite where it has to be.
__device__ __noinline__ float dot_in_float64(const WgmmaSpParams& p, i64 token, i64 row) {
  const float* x = (const float*)p.x + token * p.x_stride;
  const u8* tile = p.packed + row / Tile::kRows * p.k_tiles * Tile::kBytes;
  const int warp = row % Tile::kRows / 16, half = row % 16 / 8, g = row % 8;
  double sum = 0;
#pragma unroll 1
  for (i64 column = 0; column < p.k; column += 4, tile += column % Tile::kColumns ? 0 : Tile::kBytes) {
    const int group = column % Tile::kColumns / 4, step = group / 8, quad = group % 8 / 4;  // of 16 dense columns
    const u32 word = *(const u32*)(tile + Tile::kValueBytes + (warp * 32 + 4 * g + 2 * step + quad) * 4);
    const u32 nibble = word >> (16 * half + group % 4 * 4) & 15;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      sum = __fma_rn((double)x[column + (nibble >> 2 * i & 3)],
                     (double)weight_at(tile, (int)(row % Tile::kRows), group * 2 + i), sum);
  }
  return __double2float_rn(sum);
}
