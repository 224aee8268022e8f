// Written from sparse24_plans.prepare.backends.tile_prune: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct TilePruneParams {
  // Dense W[m, k].
  const u8* dense;
  // Kept values of W: [m, k / 2].
  u8* values;
  // Positions of the kept values of W: [m, k / 8].
  u16* metadata;
  // Kept values of W^T: [k, m / 2].
  u8* values_t;
  // Positions of the kept values of W^T: [k, m / 8].
  u16* metadata_t;
  // Mask of the kept cells: 64 bits for each 8 x 8 tile, [m / 8, k / 8].
  uint2* mask;
  // Number of rows.
  i64 m;
  // Number of columns.
  i64 k;
};
static_assert(sizeof(TilePruneParams) == 64);
static_assert(S24_OFFSET(TilePruneParams, dense) == 0);
static_assert(S24_OFFSET(TilePruneParams, values) == 8);
static_assert(S24_OFFSET(TilePruneParams, metadata) == 16);
static_assert(S24_OFFSET(TilePruneParams, values_t) == 24);
static_assert(S24_OFFSET(TilePruneParams, metadata_t) == 32);
static_assert(S24_OFFSET(TilePruneParams, mask) == 40);
static_assert(S24_OFFSET(TilePruneParams, m) == 48);
static_assert(S24_OFFSET(TilePruneParams, k) == 56);
