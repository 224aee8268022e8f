// Written from sparse24_plans.gemm.backends.mma_sp: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"
#include "gemm/params/batches.cuh"

struct MmaSpParams {
  // Packed W: [row_tiles][k_tiles][Tile::kBytes].
  const u8* packed;
  // X[n, k]; its rows, or columns, begin at multiples of 16 bytes.
  const void* x;
  // Bias [m], or null.
  const void* bias;
  // Y[n, m], or Y[n, m / 2] if the epilogue is gated.
  void* y;
  // Number of tokens.
  i64 n;
  // Number of rows of W.
  i64 m;
  // Number of columns of X.
  i64 k;
  // Elements from one row of X to the next, or column if X is column-major.
  i64 x_stride;
  // Elements from one row of Y to the next, or column if Y is column-major.
  i64 y_stride;
  // Number of packed tiles along the rows of W.
  i64 row_tiles;
  // Number of packed tiles along K.
  i64 k_tiles;
  // Factor of the product.
  float alpha;
  // Number of token tiles that cover n.
  u32 n_tiles;
  // Factor of C.
  float beta;
  // C, which lies as y does, or null.
  const void* c;
  // Elements from one row of C to the next, or column if Y is column-major.
  i64 c_stride;
  // Scales of X: [1], or [n] with one for each token.
  const float* scale_x;
  // Scales of W: [1], or [m] with one for each row.
  const float* scale_w;
  // Scale of fp8 results [1], or null.
  const float* scale_y;
  // Bits of the largest magnitude [1] of fp8 results before their scale, or null.
  int* amax;
  // Batched: where each batch lies. All else is of one batch.
  BatchParams batches;
};
static_assert(sizeof(MmaSpParams) == 216);
static_assert(S24_OFFSET(MmaSpParams, packed) == 0);
static_assert(S24_OFFSET(MmaSpParams, x) == 8);
static_assert(S24_OFFSET(MmaSpParams, bias) == 16);
static_assert(S24_OFFSET(MmaSpParams, y) == 24);
static_assert(S24_OFFSET(MmaSpParams, n) == 32);
static_assert(S24_OFFSET(MmaSpParams, m) == 40);
static_assert(S24_OFFSET(MmaSpParams, k) == 48);
static_assert(S24_OFFSET(MmaSpParams, x_stride) == 56);
static_assert(S24_OFFSET(MmaSpParams, y_stride) == 64);
static_assert(S24_OFFSET(MmaSpParams, row_tiles) == 72);
static_assert(S24_OFFSET(MmaSpParams, k_tiles) == 80);
static_assert(S24_OFFSET(MmaSpParams, alpha) == 88);
static_assert(S24_OFFSET(MmaSpParams, n_tiles) == 92);
static_assert(S24_OFFSET(MmaSpParams, beta) == 96);
static_assert(S24_OFFSET(MmaSpParams, c) == 104);
static_assert(S24_OFFSET(MmaSpParams, c_stride) == 112);
static_assert(S24_OFFSET(MmaSpParams, scale_x) == 120);
static_assert(S24_OFFSET(MmaSpParams, scale_w) == 128);
static_assert(S24_OFFSET(MmaSpParams, scale_y) == 136);
static_assert(S24_OFFSET(MmaSpParams, amax) == 144);
static_assert(S24_OFFSET(MmaSpParams, batches) == 152);
