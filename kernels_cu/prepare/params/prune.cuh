// Written from sparse24_plans.prepare.backends.prune: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct PruneParams {
  // Dense matrix to read.
  const void* dense;
  // Scores that rank the cells in place of their magnitudes.
  const void* scores;
  // Mask to apply: one bit a cell.
  const void* mask_in;
  // Pruned dense matrix.
  void* pruned;
  // Mask of the kept cells: one bit a cell.
  void* mask_out;
  // Kept values.
  void* values;
  // Positions of the kept values.
  void* metadata;
  // First group that is not 2:4 and the number of its non-zeros.
  u64* status;
  // Number of cells of the matrix.
  u64 cells;
  // Number of cells of a row.
  u64 row_cells;
};
static_assert(sizeof(PruneParams) == 80);
static_assert(S24_OFFSET(PruneParams, dense) == 0);
static_assert(S24_OFFSET(PruneParams, scores) == 8);
static_assert(S24_OFFSET(PruneParams, mask_in) == 16);
static_assert(S24_OFFSET(PruneParams, pruned) == 24);
static_assert(S24_OFFSET(PruneParams, mask_out) == 32);
static_assert(S24_OFFSET(PruneParams, values) == 40);
static_assert(S24_OFFSET(PruneParams, metadata) == 48);
static_assert(S24_OFFSET(PruneParams, status) == 56);
static_assert(S24_OFFSET(PruneParams, cells) == 64);
static_assert(S24_OFFSET(PruneParams, row_cells) == 72);
