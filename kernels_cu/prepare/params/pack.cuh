// Written from sparse24_plans.prepare.backends.pack: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct PackParams {
  // Kept values [m, k / 2].
  u8* values;
  // Positions of the kept values [m, k / 8].
  u16* metadata;
  // Packed tiles of 64 rows.
  u8* packed;
  // First group with invalid metadata and its code.
  u64* status;
  // Number of rows.
  i64 m;
  // Number of columns of the dense matrix.
  i64 k;
};
static_assert(sizeof(PackParams) == 48);
static_assert(S24_OFFSET(PackParams, values) == 0);
static_assert(S24_OFFSET(PackParams, metadata) == 8);
static_assert(S24_OFFSET(PackParams, packed) == 16);
static_assert(S24_OFFSET(PackParams, status) == 24);
static_assert(S24_OFFSET(PackParams, m) == 32);
static_assert(S24_OFFSET(PackParams, k) == 40);
