// Written from sparse24_plans.prepare.backends.quantize: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct QuantizeParams {
  // Matrix [m, k] to quantize.
  const void* x;
  // Quantized matrix [m, k].
  void* quantized;
  // Scales of the rows [m], written; or the scale of all, read.
  float* scale;
  // Number of rows.
  i64 m;
  // Number of columns.
  i64 k;
  // Elements from one row of x to the next.
  i64 x_stride;
  // Elements from one row of the quantized matrix to the next.
  i64 quantized_stride;
};
static_assert(sizeof(QuantizeParams) == 56);
static_assert(S24_OFFSET(QuantizeParams, x) == 0);
static_assert(S24_OFFSET(QuantizeParams, quantized) == 8);
static_assert(S24_OFFSET(QuantizeParams, scale) == 16);
static_assert(S24_OFFSET(QuantizeParams, m) == 24);
static_assert(S24_OFFSET(QuantizeParams, k) == 32);
static_assert(S24_OFFSET(QuantizeParams, x_stride) == 40);
static_assert(S24_OFFSET(QuantizeParams, quantized_stride) == 48);
