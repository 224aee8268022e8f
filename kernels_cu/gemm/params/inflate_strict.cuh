// Written from sparse24_plans.gemm.backends.inflate_strict: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"
#include "gemm/params/batches.cuh"

struct StrictParams {
  // Kept values of W: [m, k / 2].
  const void* values;
  // Positions of the kept values: [m, k / 8].
  const u16* metadata;
  // X[n, k]; dY[n, m] for dgrad.
  const void* x;
  // Bias of the outputs, or null.
  const void* bias;
  // Y[n, m], or Y[n, m / 2] if the epilogue is gated; dX[n, k] for dgrad.
  void* y;
  // Number of tokens.
  i64 n;
  // Number of rows of W.
  i64 m;
  // Number of columns of W.
  i64 k;
  // Elements from one row of x to the next.
  i64 x_stride;
  // Elements from one row of y to the next.
  i64 y_stride;
  // Factor of the product.
  float alpha;
  // Factor of C.
  float beta;
  // C, which lies as y does, or null.
  const void* c;
  // Elements from one row of C to the next.
  i64 c_stride;
  // Scales of X: [1], or [n] with one for each token.
  const float* scale_x;
  // Scales of W: [1], or [m] with one for each row.
  const float* scale_w;
  // Scale of fp8 results [1], or null.
  const float* scale_y;
  // Bits of the largest magnitude [1] of fp8 results before their scale, or null.
  int* amax;
  // Grouped: the groups' offsets [groups + 1] in X and Y, or if group_places > 0 their counts [groups].
  const int* group_tokens;
  // Grouped: number of groups of tokens. Sizes of W are those of one group.
  u32 groups;
  // Grouped: rows of X and Y that every group has; 0 where offsets are given.
  u32 group_places;
  // Batched: where each batch lies. All else is of one batch.
  BatchParams batches;
};
static_assert(sizeof(StrictParams) == 216);
static_assert(S24_OFFSET(StrictParams, values) == 0);
static_assert(S24_OFFSET(StrictParams, metadata) == 8);
static_assert(S24_OFFSET(StrictParams, x) == 16);
static_assert(S24_OFFSET(StrictParams, bias) == 24);
static_assert(S24_OFFSET(StrictParams, y) == 32);
static_assert(S24_OFFSET(StrictParams, n) == 40);
static_assert(S24_OFFSET(StrictParams, m) == 48);
static_assert(S24_OFFSET(StrictParams, k) == 56);
static_assert(S24_OFFSET(StrictParams, x_stride) == 64);
static_assert(S24_OFFSET(StrictParams, y_stride) == 72);
static_assert(S24_OFFSET(StrictParams, alpha) == 80);
static_assert(S24_OFFSET(StrictParams, beta) == 84);
static_assert(S24_OFFSET(StrictParams, c) == 88);
static_assert(S24_OFFSET(StrictParams, c_stride) == 96);
static_assert(S24_OFFSET(StrictParams, scale_x) == 104);
static_assert(S24_OFFSET(StrictParams, scale_w) == 112);
static_assert(S24_OFFSET(StrictParams, scale_y) == 120);
static_assert(S24_OFFSET(StrictParams, amax) == 128);
static_assert(S24_OFFSET(StrictParams, group_tokens) == 136);
static_assert(S24_OFFSET(StrictParams, groups) == 144);
static_assert(S24_OFFSET(StrictParams, group_places) == 148);
static_assert(S24_OFFSET(StrictParams, batches) == 152);
