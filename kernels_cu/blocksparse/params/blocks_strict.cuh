// Written from sparse24_plans.blocksparse.backends.blocks_strict: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct BlocksStrictParams {
  // Values [Z, blocks, b, b]; A [Z, H, ..] for sdd.
  const void* left;
  // Dense operand [Z, H, ..].
  const void* right;
  // Bias [H, rows], or null.
  const void* bias;
  // C [Z, H, ..]; the values for sdd.
  void* out;
  // Index where the entries of each block row begin.
  const int* pointers;
  // Block column of each entry in op(S): [entries].
  const int* columns;
  // Index of each entry in the values, or null if they are in order.
  const int* value_index;
  // sdd: block row of each group, negative if there is no such group.
  const int* group_rows;
  // sdd: first entry of each group.
  const int* group_firsts;
  // Elements from one matrix of left to the next.
  i64 left_matrix;
  // Elements from one k of left to the next.
  i64 left_k;
  // Elements from one row of left to the next.
  i64 left_row;
  // Elements from one matrix of right to the next.
  i64 right_matrix;
  // Elements from one k of right to the next.
  i64 right_k;
  // Elements from one token of right to the next.
  i64 right_token;
  // Elements from one matrix of out to the next.
  i64 out_matrix;
  // Elements from one row of out to the next.
  i64 out_row;
  // Elements from one token of out to the next.
  i64 out_token;
  // Number of kept blocks of a batch element.
  i64 blocks;
  // Number of columns of X.
  i64 tokens;
  // sdd: length of the sums.
  i64 depth;
  // Number of heads, H.
  u32 heads;
  // Number of block rows of a head.
  u32 head_block_rows;
  // Number of block rows of all heads; of groups, for sdd.
  u32 work_rows;
  // Number of token tiles of a block row; of a group, for sdd.
  u32 n_tiles;
  // Factor of the product.
  float alpha;
};
static_assert(sizeof(BlocksStrictParams) == 192);
static_assert(S24_OFFSET(BlocksStrictParams, left) == 0);
static_assert(S24_OFFSET(BlocksStrictParams, right) == 8);
static_assert(S24_OFFSET(BlocksStrictParams, bias) == 16);
static_assert(S24_OFFSET(BlocksStrictParams, out) == 24);
static_assert(S24_OFFSET(BlocksStrictParams, pointers) == 32);
static_assert(S24_OFFSET(BlocksStrictParams, columns) == 40);
static_assert(S24_OFFSET(BlocksStrictParams, value_index) == 48);
static_assert(S24_OFFSET(BlocksStrictParams, group_rows) == 56);
static_assert(S24_OFFSET(BlocksStrictParams, group_firsts) == 64);
static_assert(S24_OFFSET(BlocksStrictParams, left_matrix) == 72);
static_assert(S24_OFFSET(BlocksStrictParams, left_k) == 80);
static_assert(S24_OFFSET(BlocksStrictParams, left_row) == 88);
static_assert(S24_OFFSET(BlocksStrictParams, right_matrix) == 96);
static_assert(S24_OFFSET(BlocksStrictParams, right_k) == 104);
static_assert(S24_OFFSET(BlocksStrictParams, right_token) == 112);
static_assert(S24_OFFSET(BlocksStrictParams, out_matrix) == 120);
static_assert(S24_OFFSET(BlocksStrictParams, out_row) == 128);
static_assert(S24_OFFSET(BlocksStrictParams, out_token) == 136);
static_assert(S24_OFFSET(BlocksStrictParams, blocks) == 144);
static_assert(S24_OFFSET(BlocksStrictParams, tokens) == 152);
static_assert(S24_OFFSET(BlocksStrictParams, depth) == 160);
static_assert(S24_OFFSET(BlocksStrictParams, heads) == 168);
static_assert(S24_OFFSET(BlocksStrictParams, head_block_rows) == 172);
static_assert(S24_OFFSET(BlocksStrictParams, work_rows) == 176);
static_assert(S24_OFFSET(BlocksStrictParams, n_tiles) == 180);
static_assert(S24_OFFSET(BlocksStrictParams, alpha) == 184);
