// Written from sparse24_plans.gemm.backends.routed: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct GatherRowsParams {
  // X[x_rows, columns].
  const void* x;
  // Row of X of each place [n], clamped to the rows that there are.
  const int* index;
  // Scales of X's rows [x_rows], or null.
  const float* scale_x;
  // The places' rows, with zeros behind each: [n, row_vectors * 16 bytes].
  void* out;
  // The places' scales [n].
  float* scales_out;
  // Grouped: the groups' offsets [groups + 1] in X and Y, or if group_places > 0 their counts [groups].
  const int* group_tokens;
  // Grouped: number of groups of tokens. Sizes of W are those of one group.
  u32 groups;
  // Grouped: rows of X and Y that every group has; 0 where offsets are given.
  u32 group_places;
  // Number of places.
  i64 n;
  // Number of rows of X.
  i64 x_rows;
  // Number of columns of X.
  i64 columns;
  // Elements from one row of X to the next.
  i64 x_stride;
  // Number of 16-byte vectors of a place's row.
  i64 row_vectors;
};
static_assert(sizeof(GatherRowsParams) == 96);
static_assert(S24_OFFSET(GatherRowsParams, x) == 0);
static_assert(S24_OFFSET(GatherRowsParams, index) == 8);
static_assert(S24_OFFSET(GatherRowsParams, scale_x) == 16);
static_assert(S24_OFFSET(GatherRowsParams, out) == 24);
static_assert(S24_OFFSET(GatherRowsParams, scales_out) == 32);
static_assert(S24_OFFSET(GatherRowsParams, group_tokens) == 40);
static_assert(S24_OFFSET(GatherRowsParams, groups) == 48);
static_assert(S24_OFFSET(GatherRowsParams, group_places) == 52);
static_assert(S24_OFFSET(GatherRowsParams, n) == 56);
static_assert(S24_OFFSET(GatherRowsParams, x_rows) == 64);
static_assert(S24_OFFSET(GatherRowsParams, columns) == 72);
static_assert(S24_OFFSET(GatherRowsParams, x_stride) == 80);
static_assert(S24_OFFSET(GatherRowsParams, row_vectors) == 88);
