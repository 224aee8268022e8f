// Written from sparse24_plans.gemm.wgmma: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"
#include "gemm/params/batches.cuh"

struct WgmmaSpParams {
  // X in boxes of 128 bytes of each row that a CTA loads, swizzled. Column-major X: the whole groups of tokens of a
  // token tile, as [group, column, token].
  TensorMap x_map;
  // Like x_map, in boxes for the last token tile.
  TensorMap x_tail_map;
  // Column-major X: the partial group of tokens that ends a tile.
  TensorMap x_remainder_map;
  // Column-major X: the partial group that ends the last tile.
  TensorMap x_tail_remainder_map;
  // Y in boxes of one step of the staged store. Used if TMA stores Y.
  TensorMap y_map;
  // X[n, k]. For float32 the original X: x_map reads its bf16 terms.
  const void* x;
  // Packed W: [row_tiles][k_tiles][Tile::kBytes].
  const u8* packed;
  // Bias [m], or null.
  const void* bias;
  // Scales of X: [1], or [n] with one for each token.
  const float* scale_x;
  // Scales of W: [1], or [m] with one for each row.
  const float* scale_w;
  // Y[n, m], or Y[n, m / 2] if the epilogue is gated.
  void* y;
  // Stream-K: [CTAs][warpgroups], set to launch_id once the partial sums are stored.
  u64* flags;
  // Workspace [CTAs][row tiles][accumulators / 4][128][4]. Holds partial sums for stream-K, or accumulators that wait
  // while another K chunk is multiplied.
  float* partials;
  // Workspace for sums over earlier groups of K tiles, or over earlier K chunks. It has the shape of partials twice:
  // for work tiles that are not split, and for one that is.
  float* blocked_sums;
  // Value of flags that no other launch uses.
  u64 launch_id;
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
  // Number of work tiles; each is one cluster's tile of Y.
  u32 work_tiles;
  // 1 if rows (columns) of Y begin, and for TMA also end, at 16-byte multiples.
  u32 y_aligned;
  // Number of tokens of X that a CTA loads for the last token tile.
  u32 x_tail_tokens;
  // Number of work tiles that no cluster shares; they come first.
  u32 data_parallel_tiles;
  // Stream-K: number of units of K tiles that each cluster takes.
  u32 units_per_cluster;
  // Stream-K: number of clusters that take one unit more; they come first.
  u32 big_units;
  // Always 0, unknown to the compiler: see opaque_zero() for its uses.
  u32 opaque_zero;
  // Factor of C.
  float beta;
  // C, which lies as Y does, or null.
  const void* c;
  // Elements from one row of C to the next, or column if Y is column-major.
  i64 c_stride;
  // C in the boxes of y_map. Used if TMA loads C.
  TensorMap c_map;
  // 1 if rows (columns) of C begin at 16-byte multiples.
  u32 c_aligned;
  // Grouped: the groups' offsets [groups + 1] in X and Y, or if group_places > 0 their counts [groups].
  const int* group_tokens;
  // Grouped: number of groups of tokens. Sizes of W are those of one group.
  u32 groups;
  // Grouped: rows of X and Y that every group has; 0 where offsets are given.
  u32 group_places;
  // Scale of fp8 results [1], or null.
  const float* scale_y;
  // Bits of the largest magnitude [1] of fp8 results before their scale, or null.
  int* amax;
  // Batched: where each batch lies. All else is of one batch, but for work_tiles.
  BatchParams batches;
};
static_assert(sizeof(WgmmaSpParams) == 1088);
static_assert(S24_OFFSET(WgmmaSpParams, x_map) == 0);
static_assert(S24_OFFSET(WgmmaSpParams, x_tail_map) == 128);
static_assert(S24_OFFSET(WgmmaSpParams, x_remainder_map) == 256);
static_assert(S24_OFFSET(WgmmaSpParams, x_tail_remainder_map) == 384);
static_assert(S24_OFFSET(WgmmaSpParams, y_map) == 512);
static_assert(S24_OFFSET(WgmmaSpParams, x) == 640);
static_assert(S24_OFFSET(WgmmaSpParams, packed) == 648);
static_assert(S24_OFFSET(WgmmaSpParams, bias) == 656);
static_assert(S24_OFFSET(WgmmaSpParams, scale_x) == 664);
static_assert(S24_OFFSET(WgmmaSpParams, scale_w) == 672);
static_assert(S24_OFFSET(WgmmaSpParams, y) == 680);
static_assert(S24_OFFSET(WgmmaSpParams, flags) == 688);
static_assert(S24_OFFSET(WgmmaSpParams, partials) == 696);
static_assert(S24_OFFSET(WgmmaSpParams, blocked_sums) == 704);
static_assert(S24_OFFSET(WgmmaSpParams, launch_id) == 712);
static_assert(S24_OFFSET(WgmmaSpParams, n) == 720);
static_assert(S24_OFFSET(WgmmaSpParams, m) == 728);
static_assert(S24_OFFSET(WgmmaSpParams, k) == 736);
static_assert(S24_OFFSET(WgmmaSpParams, x_stride) == 744);
static_assert(S24_OFFSET(WgmmaSpParams, y_stride) == 752);
static_assert(S24_OFFSET(WgmmaSpParams, row_tiles) == 760);
static_assert(S24_OFFSET(WgmmaSpParams, k_tiles) == 768);
static_assert(S24_OFFSET(WgmmaSpParams, alpha) == 776);
static_assert(S24_OFFSET(WgmmaSpParams, n_tiles) == 780);
static_assert(S24_OFFSET(WgmmaSpParams, work_tiles) == 784);
static_assert(S24_OFFSET(WgmmaSpParams, y_aligned) == 788);
static_assert(S24_OFFSET(WgmmaSpParams, x_tail_tokens) == 792);
static_assert(S24_OFFSET(WgmmaSpParams, data_parallel_tiles) == 796);
static_assert(S24_OFFSET(WgmmaSpParams, units_per_cluster) == 800);
static_assert(S24_OFFSET(WgmmaSpParams, big_units) == 804);
static_assert(S24_OFFSET(WgmmaSpParams, opaque_zero) == 808);
static_assert(S24_OFFSET(WgmmaSpParams, beta) == 812);
static_assert(S24_OFFSET(WgmmaSpParams, c) == 816);
static_assert(S24_OFFSET(WgmmaSpParams, c_stride) == 824);
static_assert(S24_OFFSET(WgmmaSpParams, c_map) == 832);
static_assert(S24_OFFSET(WgmmaSpParams, c_aligned) == 960);
static_assert(S24_OFFSET(WgmmaSpParams, group_tokens) == 968);
static_assert(S24_OFFSET(WgmmaSpParams, groups) == 976);
static_assert(S24_OFFSET(WgmmaSpParams, group_places) == 980);
static_assert(S24_OFFSET(WgmmaSpParams, scale_y) == 984);
static_assert(S24_OFFSET(WgmmaSpParams, amax) == 992);
static_assert(S24_OFFSET(WgmmaSpParams, batches) == 1000);
