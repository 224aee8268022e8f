// Written from sparse24_plans.gemm.backends.routed: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct CombineRowsParams {
  // The places' results, whose rows begin at multiples of 16 bytes.
  const void* results;
  // Places that are added to each row of Y: [y_rows, top_k].
  const int* index;
  // Factors of the places' results [y_rows, top_k], or null.
  const float* weights;
  // Y[y_rows, columns].
  void* y;
  // Grouped: the groups' offsets [groups + 1] in X and Y, or if group_places > 0 their counts [groups].
  const int* group_tokens;
  // Grouped: number of groups of tokens. Sizes of W are those of one group.
  u32 groups;
  // Grouped: rows of X and Y that every group has; 0 where offsets are given.
  u32 group_places;
  // Number of places of a row of Y.
  u32 top_k;
  // Number of places.
  i64 n;
  // Number of rows of Y.
  i64 y_rows;
  // Number of columns of Y.
  i64 columns;
  // Elements from one row of Y to the next.
  i64 y_stride;
  // Elements from one place's results to the next.
  i64 result_stride;
  // Number of 16-byte vectors that cover a row of Y.
  i64 row_vectors;
};
static_assert(sizeof(CombineRowsParams) == 104);
static_assert(S24_OFFSET(CombineRowsParams, results) == 0);
static_assert(S24_OFFSET(CombineRowsParams, index) == 8);
static_assert(S24_OFFSET(CombineRowsParams, weights) == 16);
static_assert(S24_OFFSET(CombineRowsParams, y) == 24);
static_assert(S24_OFFSET(CombineRowsParams, group_tokens) == 32);
static_assert(S24_OFFSET(CombineRowsParams, groups) == 40);
static_assert(S24_OFFSET(CombineRowsParams, group_places) == 44);
static_assert(S24_OFFSET(CombineRowsParams, top_k) == 48);
static_assert(S24_OFFSET(CombineRowsParams, n) == 56);
static_assert(S24_OFFSET(CombineRowsParams, y_rows) == 64);
static_assert(S24_OFFSET(CombineRowsParams, columns) == 72);
static_assert(S24_OFFSET(CombineRowsParams, y_stride) == 80);
static_assert(S24_OFFSET(CombineRowsParams, result_stride) == 88);
static_assert(S24_OFFSET(CombineRowsParams, row_vectors) == 96);
