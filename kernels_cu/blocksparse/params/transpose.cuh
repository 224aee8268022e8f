// Written from sparse24_plans.blocksparse.transpose: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct TransposeParams {
  // Matrices [.., rows, columns], contiguous.
  const void* matrices;
  // Their transposes [.., columns, rows], contiguous.
  void* out;
  // Rows of a matrix.
  i64 rows;
  // Columns of a matrix.
  i64 columns;
  // Number of tiles that cover the rows.
  u32 row_tiles;
  // Number of tiles that cover the columns.
  u32 column_tiles;
  // 1 if every row of the matrices begins at a multiple of 16 bytes, else 0.
  u32 rows_aligned;
  // 1 if every row of the transposes begins at a multiple of 16 bytes, else 0.
  u32 columns_aligned;
};
static_assert(sizeof(TransposeParams) == 48);
static_assert(S24_OFFSET(TransposeParams, matrices) == 0);
static_assert(S24_OFFSET(TransposeParams, out) == 8);
static_assert(S24_OFFSET(TransposeParams, rows) == 16);
static_assert(S24_OFFSET(TransposeParams, columns) == 24);
static_assert(S24_OFFSET(TransposeParams, row_tiles) == 32);
static_assert(S24_OFFSET(TransposeParams, column_tiles) == 36);
static_assert(S24_OFFSET(TransposeParams, rows_aligned) == 40);
static_assert(S24_OFFSET(TransposeParams, columns_aligned) == 44);
