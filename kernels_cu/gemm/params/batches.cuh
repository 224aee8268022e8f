// Written from sparse24_plans.gemm.kernel: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct BatchParams {
  // Elements from one batch of X to the next; 0 if all batches have the same X.
  i64 x;
  // Elements from one batch of Y to the next.
  i64 y;
  // Elements from one batch of C to the next; 0 if all batches have the same C.
  i64 c;
  // Elements from one batch of the bias to the next.
  i64 bias;
  // Elements from one batch of the scales of X to the next.
  i64 scale_x;
  // Elements from one batch of the scales of W to the next.
  i64 scale_w;
  // Rows of W from one batch's weight to the next; 0 if all batches have one weight.
  i64 weight_rows;
  // Number of batches.
  u32 count;
  // Number of work tiles of one batch.
  u32 work_tiles;
};
static_assert(sizeof(BatchParams) == 64);
static_assert(S24_OFFSET(BatchParams, x) == 0);
static_assert(S24_OFFSET(BatchParams, y) == 8);
static_assert(S24_OFFSET(BatchParams, c) == 16);
static_assert(S24_OFFSET(BatchParams, bias) == 24);
static_assert(S24_OFFSET(BatchParams, scale_x) == 32);
static_assert(S24_OFFSET(BatchParams, scale_w) == 40);
static_assert(S24_OFFSET(BatchParams, weight_rows) == 48);
static_assert(S24_OFFSET(BatchParams, count) == 56);
static_assert(S24_OFFSET(BatchParams, work_tiles) == 60);
