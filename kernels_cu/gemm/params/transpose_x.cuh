// Written from sparse24_plans.gemm.transpose_x: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct TransposeXParams {
  // Column-major X[n, k] of 16-bit elements.
  const u16* x;
  // Row-major copy of X[n, k], contiguous; k is a multiple of 8.
  u16* out;
  // Number of tokens.
  i64 n;
  // Number of columns of X.
  i64 k;
  // Elements from one column of X to the next.
  i64 x_stride;
  // Number of tiles of 64 columns that cover k.
  u32 column_tiles;
  // 1 if every column of X begins at a multiple of 16 bytes, else 0.
  u32 x_aligned;
};
static_assert(sizeof(TransposeXParams) == 48);
static_assert(S24_OFFSET(TransposeXParams, x) == 0);
static_assert(S24_OFFSET(TransposeXParams, out) == 8);
static_assert(S24_OFFSET(TransposeXParams, n) == 16);
static_assert(S24_OFFSET(TransposeXParams, k) == 24);
static_assert(S24_OFFSET(TransposeXParams, x_stride) == 32);
static_assert(S24_OFFSET(TransposeXParams, column_tiles) == 40);
static_assert(S24_OFFSET(TransposeXParams, x_aligned) == 44);
