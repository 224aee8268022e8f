// The cells that a lane of blocksparse/blocks_mma.cu and sdd_mma.cu holds. mma assigns rows, tokens and k to each lane.
// Permuting k alike in op(S) and X changes no sum, and permuting rows or tokens only permutes results. Here each lane
// gets neighbours in memory, which it loads together. For sdd, op(S) is op(A), and X is op(B).
//
// Lane 4 * group + quad. kAlongK: k is contiguous in the operand; otherwise its rows, or tokens, are.
#pragma once

// Row of a lane's row `half` of m16 tile `m16_tile`, among the kM16Tiles * 16 rows of a CTA.
template <bool kAlongK, int kM16Tiles> __device__ constexpr int fragment_row(int group, int m16_tile, int half) {
  return kAlongK ? 16 * m16_tile + 8 * half + group : 2 * kM16Tiles * group + 2 * m16_tile + half;
}

// Token of column `column` of n8 tile `tile`, among the kN8Tiles * 8 tokens of a CTA.
template <bool kAlongK, int kN8Tiles> __device__ constexpr int fragment_token(int column, int tile) {
  return kAlongK ? 8 * tile + column : kN8Tiles * column + tile;
}

// k of a lane's value `i` of four in mma `step`, among the kDepth of a unit. The first two are its lower k of the
// fragment.
template <int kDepth> __device__ constexpr int fragment_k(int quad, int step, int i) {
  return kDepth / 4 * quad + 4 * step + i;
}

// The word of a lane's loaded cells of op(S) that has value `i` of row `half` of an m16 tile. A word has two values:
// two k of a row, or two rows at one k.
template <bool kAlongK, int kM16Tiles, int kDepth>
__device__ constexpr int left_word(int m16_tile, int half, int step, int i) {
  return kAlongK ? (2 * m16_tile + half) * (kDepth / 8) + 2 * step + i / 2 : (4 * step + i) * kM16Tiles + m16_tile;
}

// The word of a lane's loaded cells of X that has value `i` of a tile. A word has two k of a token, or two tokens at
// one k; with one tile of tokens that are contiguous it has one token.
template <bool kAlongK, int kN8Tiles, int kDepth> __device__ constexpr int right_word(int tile, int step, int i) {
  return kAlongK ? tile * (kDepth / 8) + 2 * step + i / 2 : (4 * step + i) * ((kN8Tiles + 1) / 2) + tile / 2;
}

// sdd_mma: column of a lane's column `column` of n8 tile `tile`, among the kTiles * 8 columns of a piece. The sums of a
// lane in one row are 2 * kTiles neighbours, and so are the columns of B that two groups of lanes read together.
template <int kTiles> __device__ constexpr int sampled_column(int column, int tile) {
  return 2 * kTiles * (column / 2) + 2 * tile + column % 2;
}
