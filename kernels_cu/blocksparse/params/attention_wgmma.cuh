// Written from sparse24_plans.blocksparse.backends.attention_wgmma: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "blocksparse/params/attention_tables.cuh"
#include "common/types.cuh"

struct AttentionWgmmaParams {
  // Q [Z * H, queries, head_size] in boxes of 64 rows x 128 bytes.
  TensorMap q_map;
  // K [matrices, keys, head_size] in boxes of a block's rows x 128 bytes.
  TensorMap k_map;
  // V [matrices, keys, head_size] in boxes of a block's rows x 128 bytes.
  TensorMap v_map;
  // Result [Z * H, queries, head_size].
  void* o;
  // Logarithm of each row's sum of exponentials: [Z * H, queries].
  float* lse;
  // Tables of block rows.
  AttentionTables tables;
  // |scale| * log2(e).
  float scale;
  // Number of matrices Q: Z * H.
  u32 matrices;
  // Number of heads of Q, H.
  u32 heads;
  // Number of heads of Q that share one head of K and V.
  u32 heads_per_kv;
  // Number of rows of Q in a head.
  u32 queries;
  // Number of rows of K in a head.
  u32 keys;
  // Number of work tiles of a matrix: its block rows.
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
static_assert(sizeof(AttentionWgmmaParams) == 512);
static_assert(S24_OFFSET(AttentionWgmmaParams, q_map) == 0);
static_assert(S24_OFFSET(AttentionWgmmaParams, k_map) == 128);
static_assert(S24_OFFSET(AttentionWgmmaParams, v_map) == 256);
static_assert(S24_OFFSET(AttentionWgmmaParams, o) == 384);
static_assert(S24_OFFSET(AttentionWgmmaParams, lse) == 392);
static_assert(S24_OFFSET(AttentionWgmmaParams, tables) == 400);
static_assert(S24_OFFSET(AttentionWgmmaParams, scale) == 448);
static_assert(S24_OFFSET(AttentionWgmmaParams, matrices) == 452);
static_assert(S24_OFFSET(AttentionWgmmaParams, heads) == 456);
static_assert(S24_OFFSET(AttentionWgmmaParams, heads_per_kv) == 460);
static_assert(S24_OFFSET(AttentionWgmmaParams, queries) == 464);
static_assert(S24_OFFSET(AttentionWgmmaParams, keys) == 468);
static_assert(S24_OFFSET(AttentionWgmmaParams, matrix_tiles) == 472);
static_assert(S24_OFFSET(AttentionWgmmaParams, raster_matrices) == 476);
static_assert(S24_OFFSET(AttentionWgmmaParams, seed_offset) == 480);
static_assert(S24_OFFSET(AttentionWgmmaParams, drop_below) == 488);
static_assert(S24_OFFSET(AttentionWgmmaParams, keep_scale) == 492);
