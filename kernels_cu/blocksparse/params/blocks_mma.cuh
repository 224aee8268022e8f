// Written from sparse24_plans.blocksparse.backends.blocks_mma: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct BlocksMmaParams {
  // Values [Z, blocks, b, b].
  const void* values;
  // X [Z, H, ..].
  const void* x;
  // Bias [H, rows], or null.
  const void* bias;
  // C [Z, H, ..].
  void* out;
  // Block rows in the order in which CTAs take them, or null for 0, 1, 2 ...
  const int* order;
  // Index where the entries of each block row begin.
  const int* pointers;
  // Block column of each entry in op(S): [entries].
  const int* columns;
  // Index of each entry in the values, if S enters transposed.
  const int* value_index;
  // Elements from one matrix of X to the next.
  i64 x_matrix;
  // Elements from one row of X to the next.
  i64 x_stride;
  // Elements from one matrix of C to the next.
  i64 out_matrix;
  // Elements from one row of op(S) in C to the next.
  i64 out_row;
  // Elements from one token in C to the next.
  i64 out_token;
  // Number of kept blocks of a batch element.
  i64 blocks;
  // Number of columns of X.
  u32 tokens;
  // Number of token tiles of a block row.
  u32 n_tiles;
  // Number of block rows of all heads.
  u32 block_rows;
  // Number of block rows of a head.
  u32 head_block_rows;
  // Number of heads, H.
  u32 heads;
  // Number of batch elements, Z.
  u32 batch;
  // Number of block rows, the first in their order, that may have several slices.
  u32 long_rows;
  // Factor of the product.
  float alpha;
};
static_assert(sizeof(BlocksMmaParams) == 144);
static_assert(S24_OFFSET(BlocksMmaParams, values) == 0);
static_assert(S24_OFFSET(BlocksMmaParams, x) == 8);
static_assert(S24_OFFSET(BlocksMmaParams, bias) == 16);
static_assert(S24_OFFSET(BlocksMmaParams, out) == 24);
static_assert(S24_OFFSET(BlocksMmaParams, order) == 32);
static_assert(S24_OFFSET(BlocksMmaParams, pointers) == 40);
static_assert(S24_OFFSET(BlocksMmaParams, columns) == 48);
static_assert(S24_OFFSET(BlocksMmaParams, value_index) == 56);
static_assert(S24_OFFSET(BlocksMmaParams, x_matrix) == 64);
static_assert(S24_OFFSET(BlocksMmaParams, x_stride) == 72);
static_assert(S24_OFFSET(BlocksMmaParams, out_matrix) == 80);
static_assert(S24_OFFSET(BlocksMmaParams, out_row) == 88);
static_assert(S24_OFFSET(BlocksMmaParams, out_token) == 96);
static_assert(S24_OFFSET(BlocksMmaParams, blocks) == 104);
static_assert(S24_OFFSET(BlocksMmaParams, tokens) == 112);
static_assert(S24_OFFSET(BlocksMmaParams, n_tiles) == 116);
static_assert(S24_OFFSET(BlocksMmaParams, block_rows) == 120);
static_assert(S24_OFFSET(BlocksMmaParams, head_block_rows) == 124);
static_assert(S24_OFFSET(BlocksMmaParams, heads) == 128);
static_assert(S24_OFFSET(BlocksMmaParams, batch) == 132);
static_assert(S24_OFFSET(BlocksMmaParams, long_rows) == 136);
static_assert(S24_OFFSET(BlocksMmaParams, alpha) == 140);
