// Written from sparse24_plans.gemm.backends.routed: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct RouteRowsParams {
  // Groups that rows chose: [n]. Any other number is no group.
  const int* experts;
  // Places where the groups begin, and the last one's end: [groups + 1].
  int* offsets;
  // The row whose choice has each place: [n].
  int* rows;
  // The place of each choice: [n].
  int* places;
  // Number of choices, and of places.
  i64 n;
  // Number of groups.
  u32 groups;
  // Choices of a row.
  u32 top_k;
};
static_assert(sizeof(RouteRowsParams) == 48);
static_assert(S24_OFFSET(RouteRowsParams, experts) == 0);
static_assert(S24_OFFSET(RouteRowsParams, offsets) == 8);
static_assert(S24_OFFSET(RouteRowsParams, rows) == 16);
static_assert(S24_OFFSET(RouteRowsParams, places) == 24);
static_assert(S24_OFFSET(RouteRowsParams, n) == 32);
static_assert(S24_OFFSET(RouteRowsParams, groups) == 40);
static_assert(S24_OFFSET(RouteRowsParams, top_k) == 44);
