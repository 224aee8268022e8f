// Written from sparse24_plans.blocksparse.backends.attention_backward_wgmma: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "blocksparse/params/attention_tables.cuh"
#include "common/types.cuh"

struct AttentionBackwardWgmmaParams {
  // K and V, or Q and dO, in boxes of 64 rows x 128 bytes.
  TensorMap stationary_maps[2];
  // Q and dO, or K and V, in boxes of a tile's rows x 128 bytes.
  TensorMap streamed_maps[2];
  // dK and dV, or dQ alone: [.., rows, head_size].
  void* gradients[2];
  // Result of the forward pass: [Z * H, queries, head_size].
  const void* o;
  // Gradient of the result: [Z * H, queries, head_size].
  const void* d_o;
  // Logarithm of each row's sum of exponentials: [Z * H, queries].
  const float* lse;
  // lse * log2(e), and infinity where a row sees no key: [Z * H, queries].
  float* bases;
  // Sum of o * d_o over each row: [Z * H, queries].
  float* deltas;
  // Tables of block columns for dK and dV, of block rows for dQ.
  AttentionTables tables;
  // Place in the values of each block, column by column.
  const int* places;
  // dS of each block, as the kernel stores it: [Z, blocks, block, block]; or null.
  void* score_gradients;
  // Factor of Q K^T.
  float scale;
  // scale * log2(e).
  float exponent_scale;
  // Number of kept blocks of all heads.
  u32 blocks;
  // Number of stationary matrices: Z times the heads of K, or of Q.
  u32 matrices;
  // Number of heads of Q, H.
  u32 heads;
  // Number of heads of K and V.
  u32 kv_heads;
  // Number of heads of Q that share one head of K and V.
  u32 heads_per_kv;
  // Number of rows of Q in a head.
  u32 queries;
  // Number of rows of K in a head.
  u32 keys;
  // Number of work tiles of a matrix: its block columns, or block rows.
  u32 matrix_tiles;
  // Number of matrices whose work tiles are interleaved, for L2.
  u32 raster_matrices;
  // Seed and offset of dropout, two integers of 64 bits; or null.
  const u32* seed_offset;
  // Bound of dropped cells' 16 bits, times 2^16.
  u32 drop_below;
  // Factor of cells that are not dropped.
  float keep_scale;
};
static_assert(sizeof(AttentionBackwardWgmmaParams) == 704);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, stationary_maps) == 0);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, streamed_maps) == 256);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, gradients) == 512);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, o) == 528);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, d_o) == 536);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, lse) == 544);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, bases) == 552);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, deltas) == 560);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, tables) == 568);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, places) == 616);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, score_gradients) == 624);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, scale) == 632);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, exponent_scale) == 636);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, blocks) == 640);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, matrices) == 644);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, heads) == 648);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, kv_heads) == 652);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, heads_per_kv) == 656);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, queries) == 660);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, keys) == 664);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, matrix_tiles) == 668);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, raster_matrices) == 672);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, seed_offset) == 680);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, drop_below) == 688);
static_assert(S24_OFFSET(AttentionBackwardWgmmaParams, keep_scale) == 692);
