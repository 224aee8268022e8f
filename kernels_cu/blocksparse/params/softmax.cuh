// Written from sparse24_plans.blocksparse.backends.softmax: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct SoftmaxParams {
  // Index where the blocks of each block row begin.
  const int* pointers;
  // Block column of each block: [blocks].
  const int* columns;
  // Values [Z, blocks, b, b] of the input; of the result y, for the backward pass.
  const void* x;
  // Gradient of the result, backward pass only: [Z, blocks, b, b].
  const void* dy;
  // Values of the result, or of the gradient: [Z, blocks, b, b].
  void* out;
  // Relative position bias [H, rows, row_cells].
  const void* rpe;
  // Key padding mask [Z, row_cells].
  const void* key_mask;
  // Attention mask [rows, row_cells].
  const void* attn_mask;
  // Number of kept blocks of a batch element.
  i64 blocks;
  // Number of cells of a row of the dense matrix.
  i64 row_cells;
  // Number of teams' pieces of rows: block rows * Z * teams of a block row.
  u32 work_items;
  // Number of batch elements, Z.
  u32 batch;
  // Number of block rows of a head.
  u32 head_block_rows;
  // Factor of the input.
  float scale;
};
static_assert(sizeof(SoftmaxParams) == 96);
static_assert(S24_OFFSET(SoftmaxParams, pointers) == 0);
static_assert(S24_OFFSET(SoftmaxParams, columns) == 8);
static_assert(S24_OFFSET(SoftmaxParams, x) == 16);
static_assert(S24_OFFSET(SoftmaxParams, dy) == 24);
static_assert(S24_OFFSET(SoftmaxParams, out) == 32);
static_assert(S24_OFFSET(SoftmaxParams, rpe) == 40);
static_assert(S24_OFFSET(SoftmaxParams, key_mask) == 48);
static_assert(S24_OFFSET(SoftmaxParams, attn_mask) == 56);
static_assert(S24_OFFSET(SoftmaxParams, blocks) == 64);
static_assert(S24_OFFSET(SoftmaxParams, row_cells) == 72);
static_assert(S24_OFFSET(SoftmaxParams, work_items) == 80);
static_assert(S24_OFFSET(SoftmaxParams, batch) == 84);
static_assert(S24_OFFSET(SoftmaxParams, head_block_rows) == 88);
static_assert(S24_OFFSET(SoftmaxParams, scale) == 92);
