// Written from sparse24_plans.gemm.backends.f32_split: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct F32SplitParams {
  // X[n, k].
  const float* x;
  // The bf16 terms of X: [terms][n][k].
  u16* terms;
  // Number of tokens.
  i64 n;
  // Number of columns of X.
  i64 k;
  // Elements from one row of X to the next.
  i64 x_stride;
};
static_assert(sizeof(F32SplitParams) == 40);
static_assert(S24_OFFSET(F32SplitParams, x) == 0);
static_assert(S24_OFFSET(F32SplitParams, terms) == 8);
static_assert(S24_OFFSET(F32SplitParams, n) == 16);
static_assert(S24_OFFSET(F32SplitParams, k) == 24);
static_assert(S24_OFFSET(F32SplitParams, x_stride) == 32);
