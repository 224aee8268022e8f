// Written from sparse24_plans.device.pad_rows: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct PadRowsParams {
  // Matrix [rows, columns], contiguous.
  const void* matrix;
  // The matrix with zeros behind each row: [rows, row_vectors * 16 bytes].
  void* out;
  // Rows of the matrix.
  i64 rows;
  // Columns of the matrix.
  i64 columns;
  // Number of 16-byte vectors of a padded row.
  i64 row_vectors;
};
static_assert(sizeof(PadRowsParams) == 40);
static_assert(S24_OFFSET(PadRowsParams, matrix) == 0);
static_assert(S24_OFFSET(PadRowsParams, out) == 8);
static_assert(S24_OFFSET(PadRowsParams, rows) == 16);
static_assert(S24_OFFSET(PadRowsParams, columns) == 24);
static_assert(S24_OFFSET(PadRowsParams, row_vectors) == 32);
