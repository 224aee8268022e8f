// Written from sparse24_plans.weights.inflate: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct InflateParams {
  // Kept values: 8 bytes for each vector of the dense matrix.
  const uint2* values;
  // Positions of the kept values: one byte for each group of four.
  const void* metadata;
  // Dense matrix, in vectors of 16 bytes.
  uint4* dense;
  // Size of the dense matrix in bytes.
  u64 bytes;
};
static_assert(sizeof(InflateParams) == 32);
static_assert(S24_OFFSET(InflateParams, values) == 0);
static_assert(S24_OFFSET(InflateParams, metadata) == 8);
static_assert(S24_OFFSET(InflateParams, dense) == 16);
static_assert(S24_OFFSET(InflateParams, bytes) == 24);
