// Written from sparse24_plans.blocksparse.backends.inflate_cublas: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct InflateBlocksParams {
  // Bit c % 32 of word c / 32 is set where the block row keeps column c.
  const int* kept;
  // Index where the blocks of each block row begin: [block_rows + 1].
  const int* pointers;
  // Block row of each block: [blocks].
  const int* rows;
  // Block column of each block: [blocks].
  const int* columns;
  // Values [Z, blocks, b, b]; written by gather_blocks.
  void* values;
  // Dense matrices [Z, H, rows, row_cells]; read by gather_blocks.
  void* dense;
  // Product [Z, H, out_rows, product_columns], float32 if an epilogue follows, or null if all is 0.
  const void* product;
  // Number of elements from one row of the product to the next.
  i64 product_columns;
  // Bias [H, out_rows] or [H, out_columns], or null.
  const void* bias;
  // C [Z, H, out_rows, out_columns].
  void* out;
  // Number of block rows of all heads.
  i64 block_rows;
  // Number of kept blocks of a batch element.
  i64 blocks;
  // Number of cells of a row of the dense matrix.
  i64 row_cells;
  // inflate_blocks: Z * block_rows * bit_words * b/16; gather_blocks: Z * blocks.
  i64 work_items;
  // Number of heads, H.
  i64 heads;
  // Number of rows of C.
  i64 out_rows;
  // Number of columns of C.
  i64 out_columns;
  // Number of elements of all of C.
  i64 out_elements;
  // Number of words of a block row in kept.
  u32 bit_words;
  // 1 if each row of C has a bias, 0 if each column has.
  u32 bias_per_row;
};
static_assert(sizeof(InflateBlocksParams) == 152);
static_assert(S24_OFFSET(InflateBlocksParams, kept) == 0);
static_assert(S24_OFFSET(InflateBlocksParams, pointers) == 8);
static_assert(S24_OFFSET(InflateBlocksParams, rows) == 16);
static_assert(S24_OFFSET(InflateBlocksParams, columns) == 24);
static_assert(S24_OFFSET(InflateBlocksParams, values) == 32);
static_assert(S24_OFFSET(InflateBlocksParams, dense) == 40);
static_assert(S24_OFFSET(InflateBlocksParams, product) == 48);
static_assert(S24_OFFSET(InflateBlocksParams, product_columns) == 56);
static_assert(S24_OFFSET(InflateBlocksParams, bias) == 64);
static_assert(S24_OFFSET(InflateBlocksParams, out) == 72);
static_assert(S24_OFFSET(InflateBlocksParams, block_rows) == 80);
static_assert(S24_OFFSET(InflateBlocksParams, blocks) == 88);
static_assert(S24_OFFSET(InflateBlocksParams, row_cells) == 96);
static_assert(S24_OFFSET(InflateBlocksParams, work_items) == 104);
static_assert(S24_OFFSET(InflateBlocksParams, heads) == 112);
static_assert(S24_OFFSET(InflateBlocksParams, out_rows) == 120);
static_assert(S24_OFFSET(InflateBlocksParams, out_columns) == 128);
static_assert(S24_OFFSET(InflateBlocksParams, out_elements) == 136);
static_assert(S24_OFFSET(InflateBlocksParams, bit_words) == 144);
static_assert(S24_OFFSET(InflateBlocksParams, bias_per_row) == 148);
