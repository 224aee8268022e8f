// Written from sparse24_plans.gemm.backends.inflate_cublas: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct EpilogueParams {
  // Sums [outer, inner], contiguous; null if all of them are 0.
  const float* accumulators;
  // Bias [m], or null.
  const void* bias;
  // Y[outer, inner].
  void* out;
  // Number of rows of Y, or columns if Y is column-major.
  i64 outer;
  // Number of contiguous elements in each of them.
  i64 inner;
  // Elements from one row of Y to the next, or column if Y is column-major.
  i64 out_stride;
  // Factor of C.
  float beta;
  // C, which lies as Y does, or null.
  const void* c;
  // Elements from one row of C to the next, or column if Y is column-major.
  i64 c_stride;
};
static_assert(sizeof(EpilogueParams) == 72);
static_assert(S24_OFFSET(EpilogueParams, accumulators) == 0);
static_assert(S24_OFFSET(EpilogueParams, bias) == 8);
static_assert(S24_OFFSET(EpilogueParams, out) == 16);
static_assert(S24_OFFSET(EpilogueParams, outer) == 24);
static_assert(S24_OFFSET(EpilogueParams, inner) == 32);
static_assert(S24_OFFSET(EpilogueParams, out_stride) == 40);
static_assert(S24_OFFSET(EpilogueParams, beta) == 48);
static_assert(S24_OFFSET(EpilogueParams, c) == 56);
static_assert(S24_OFFSET(EpilogueParams, c_stride) == 64);
