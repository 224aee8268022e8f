// Written from sparse24_plans.blocksparse.backends.sdd_mma: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct SddMmaParams {
  // A [Z, H, ..].
  const void* a;
  // B [Z, H, ..].
  const void* b;
  // Values of C [Z, blocks, b, b].
  void* out;
  // Block row of each block, among all heads: [blocks].
  const int* rows;
  // Block column of each block: [blocks].
  const int* columns;
  // Elements from one matrix of A to the next.
  i64 a_matrix;
  // Elements from one row of A to the next.
  i64 a_stride;
  // Elements from one matrix of B to the next.
  i64 b_matrix;
  // Elements from one row of B to the next.
  i64 b_stride;
  // Number of products of a sum, n.
  u32 terms;
  // Number of kept blocks of a batch element.
  u32 blocks;
  // Most blocks of a run, at most 32.
  u32 run_blocks;
  // Number of runs of a batch element.
  u32 runs;
  // Number of batch elements, Z.
  u32 batch;
  // Number of heads, H.
  u32 heads;
  // Number of block rows of a head.
  u32 head_block_rows;
  // Factor of the product.
  float alpha;
};
static_assert(sizeof(SddMmaParams) == 104);
static_assert(S24_OFFSET(SddMmaParams, a) == 0);
static_assert(S24_OFFSET(SddMmaParams, b) == 8);
static_assert(S24_OFFSET(SddMmaParams, out) == 16);
static_assert(S24_OFFSET(SddMmaParams, rows) == 24);
static_assert(S24_OFFSET(SddMmaParams, columns) == 32);
static_assert(S24_OFFSET(SddMmaParams, a_matrix) == 40);
static_assert(S24_OFFSET(SddMmaParams, a_stride) == 48);
static_assert(S24_OFFSET(SddMmaParams, b_matrix) == 56);
static_assert(S24_OFFSET(SddMmaParams, b_stride) == 64);
static_assert(S24_OFFSET(SddMmaParams, terms) == 72);
static_assert(S24_OFFSET(SddMmaParams, blocks) == 76);
static_assert(S24_OFFSET(SddMmaParams, run_blocks) == 80);
static_assert(S24_OFFSET(SddMmaParams, runs) == 84);
static_assert(S24_OFFSET(SddMmaParams, batch) == 88);
static_assert(S24_OFFSET(SddMmaParams, heads) == 92);
static_assert(S24_OFFSET(SddMmaParams, head_block_rows) == 96);
static_assert(S24_OFFSET(SddMmaParams, alpha) == 100);
