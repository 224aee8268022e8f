// Written from sparse24_plans.blocksparse.backends.blocks_wgmma: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct BlocksWgmmaParams {
  // Values of S [Z * blocks * b, b], or op(A) for sdd: boxes of 128 bytes.
  TensorMap left_map;
  // X [Z * H, ..], or op(B) for sdd, in boxes of 128 bytes.
  TensorMap right_map;
  // Like right_map, in boxes for the last token tile; unused for sdd.
  TensorMap right_tail_map;
  // C [Z * H, ..], or the values for sdd, in boxes of 128 bytes.
  TensorMap out_map;
  // Row panels, longest first: [panels].
  const int* panel_order;
  // Number of block columns that each panel keeps: [panels].
  const int* panel_columns;
  // Bit c % 32 of word c / 32 is set where the block row keeps column c.
  const u32* kept;
  // Index where each block row, or panel for small blocks and sdd, begins.
  const int* pointers;
  // Block columns: of each block for sdd, of each panel for small blocks.
  const int* columns;
  // Index of each block in the values, or null if they are in order. Small blocks: for each column of a panel one index
  // for every block row, negative where no block is kept.
  const int* value_index;
  // Values of S, read or written without a tensor map for small blocks.
  void* values;
  // C [Z * H, rows, tokens], stored without a tensor map if its rows are not aligned.
  void* out;
  // Bias [H, rows], or null.
  const void* bias;
  // Number of kept blocks of a batch element.
  int blocks;
  // Slices of row panels, the longest first, five integers each: the panel; its first kept column; how many; the
  // slice's index + (the panel's slices << 16); the index of the panel's first slice in partials. Not for sdd.
  const int* slices;
  // Number of slices of all panels.
  const int* slice_count;
  // Number of panels that are long enough to be cut; the first of panel_order.
  const int* long_panels;
  // Number of work tiles that clusters have claimed beyond each one's first.
  u64* claimed;
  // Number of slices of each panel.
  const int* panel_slices;
  // Sums of slices: [slice][64 rows][batch][8 tokens], 128 threads x four.
  float* partials;
  // Arrivals of a panel's slices: [slice][64 rows][batch][64 tokens].
  u64* arrivals;
  // Value of the high 48 bits of arrivals that no other launch uses.
  u64 launch_id;
  // Factor of the product.
  float alpha;
  // Number of row panels of all heads.
  u32 panels;
  // Number of row panels of a head.
  u32 head_panels;
  // Number of block rows of a head.
  u32 head_block_rows;
  // Number of words of a block row in kept.
  u32 bit_words;
  // Number of heads, H.
  u32 heads;
  // Number of batch elements, Z.
  u32 batch;
  // Number of columns of X.
  u32 tokens;
  // Number of clusters' token tiles that cover the tokens; unused for sdd.
  u32 cluster_tiles;
  // Number of token tiles of a raster group, which L2 holds.
  u32 raster_tiles;
  // Work tiles of a panel at most, for sdd.
  u32 panel_groups;
  // Number of steps along the tokens, for sdd.
  u32 k_steps;
  // Small blocks: 1 if a box of right_map holds a whole token tile, else 0.
  u32 full_boxes;
};
static_assert(sizeof(BlocksWgmmaParams) == 768);
static_assert(S24_OFFSET(BlocksWgmmaParams, left_map) == 0);
static_assert(S24_OFFSET(BlocksWgmmaParams, right_map) == 128);
static_assert(S24_OFFSET(BlocksWgmmaParams, right_tail_map) == 256);
static_assert(S24_OFFSET(BlocksWgmmaParams, out_map) == 384);
static_assert(S24_OFFSET(BlocksWgmmaParams, panel_order) == 512);
static_assert(S24_OFFSET(BlocksWgmmaParams, panel_columns) == 520);
static_assert(S24_OFFSET(BlocksWgmmaParams, kept) == 528);
static_assert(S24_OFFSET(BlocksWgmmaParams, pointers) == 536);
static_assert(S24_OFFSET(BlocksWgmmaParams, columns) == 544);
static_assert(S24_OFFSET(BlocksWgmmaParams, value_index) == 552);
static_assert(S24_OFFSET(BlocksWgmmaParams, values) == 560);
static_assert(S24_OFFSET(BlocksWgmmaParams, out) == 568);
static_assert(S24_OFFSET(BlocksWgmmaParams, bias) == 576);
static_assert(S24_OFFSET(BlocksWgmmaParams, blocks) == 584);
static_assert(S24_OFFSET(BlocksWgmmaParams, slices) == 592);
static_assert(S24_OFFSET(BlocksWgmmaParams, slice_count) == 600);
static_assert(S24_OFFSET(BlocksWgmmaParams, long_panels) == 608);
static_assert(S24_OFFSET(BlocksWgmmaParams, claimed) == 616);
static_assert(S24_OFFSET(BlocksWgmmaParams, panel_slices) == 624);
static_assert(S24_OFFSET(BlocksWgmmaParams, partials) == 632);
static_assert(S24_OFFSET(BlocksWgmmaParams, arrivals) == 640);
static_assert(S24_OFFSET(BlocksWgmmaParams, launch_id) == 648);
static_assert(S24_OFFSET(BlocksWgmmaParams, alpha) == 656);
static_assert(S24_OFFSET(BlocksWgmmaParams, panels) == 660);
static_assert(S24_OFFSET(BlocksWgmmaParams, head_panels) == 664);
static_assert(S24_OFFSET(BlocksWgmmaParams, head_block_rows) == 668);
static_assert(S24_OFFSET(BlocksWgmmaParams, bit_words) == 672);
static_assert(S24_OFFSET(BlocksWgmmaParams, heads) == 676);
static_assert(S24_OFFSET(BlocksWgmmaParams, batch) == 680);
static_assert(S24_OFFSET(BlocksWgmmaParams, tokens) == 684);
static_assert(S24_OFFSET(BlocksWgmmaParams, cluster_tiles) == 688);
static_assert(S24_OFFSET(BlocksWgmmaParams, raster_tiles) == 692);
static_assert(S24_OFFSET(BlocksWgmmaParams, panel_groups) == 696);
static_assert(S24_OFFSET(BlocksWgmmaParams, k_steps) == 700);
static_assert(S24_OFFSET(BlocksWgmmaParams, full_boxes) == 704);
