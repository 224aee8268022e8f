// Written from sparse24_plans.device.transpose: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct TransposeParams {
  // Matrices [batch, rows, columns], one behind the other.
  const void* matrices;
  // Transposed matrices [batch, columns, rows], contiguous.
  void* out;
  // Rows of a matrix.
  i64 rows;
  // Columns of a matrix.
  i64 columns;
  // Elements from one row of a matrix to the next.
  i64 row_stride;
  // Number of tiles that cover the rows.
  u32 row_tiles;
  // Number of tiles that cover the columns.
  u32 column_tiles;
  // 1 if every row of the matrices begins at a multiple of 16 bytes.
  u32 rows_aligned;
  // 1 if every row of the transposes begins at a multiple of 16 bytes.
  u32 columns_aligned;
};
static_assert(sizeof(TransposeParams) == 56);
static_assert(S24_OFFSET(TransposeParams, matrices) == 0);
static_assert(S24_OFFSET(TransposeParams, out) == 8);
static_assert(S24_OFFSET(TransposeParams, rows) == 16);
static_assert(S24_OFFSET(TransposeParams, columns) == 24);
static_assert(S24_OFFSET(TransposeParams, row_stride) == 32);
static_assert(S24_OFFSET(TransposeParams, row_tiles) == 40);
static_assert(S24_OFFSET(TransposeParams, column_tiles) == 44);
static_assert(S24_OFFSET(TransposeParams, rows_aligned) == 48);
static_assert(S24_OFFSET(TransposeParams, columns_aligned) == 52);
