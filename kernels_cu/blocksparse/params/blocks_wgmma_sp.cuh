// Written from sparse24_plans.blocksparse.backends.blocks_wgmma_sp: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct BlocksWgmmaSpParams {
  // Values [Z * blocks * b, b / 2] in boxes of each CTA's share of a block.
  TensorMap values_map;
  // X [Z * H, ..] in boxes of 128 bytes.
  TensorMap right_map;
  // Like right_map, in boxes for the last token tile.
  TensorMap right_tail_map;
  // C [Z * H, ..] in boxes of 128 bytes.
  TensorMap out_map;
  // Metadata of the kept blocks: [Z * blocks, b * b / 8] bytes.
  const u8* metadata;
  // Row panels, longest first: [panels].
  const int* panel_order;
  // Number of block columns that each panel keeps: [panels].
  const int* panel_columns;
  // Bit c % 32 of word c / 32 is set where the block row keeps column c.
  const u32* kept;
  // Index where the blocks of each block row begin.
  const int* pointers;
  // Index of each block in the values, or null if they are in order.
  const int* value_index;
  // Bias [H, rows], or null.
  const void* bias;
  // C [Z * H, rows, tokens], stored without a tensor map if its rows are not aligned.
  void* out;
  // Number of kept blocks of a batch element.
  int blocks;
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
  // Number of clusters' token tiles that cover the tokens.
  u32 cluster_tiles;
  // Number of token tiles of a raster group, which L2 holds.
  u32 raster_tiles;
  // Number of raster groups.
  u32 raster_groups;
};
static_assert(sizeof(BlocksWgmmaSpParams) == 640);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, values_map) == 0);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, right_map) == 128);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, right_tail_map) == 256);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, out_map) == 384);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, metadata) == 512);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, panel_order) == 520);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, panel_columns) == 528);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, kept) == 536);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, pointers) == 544);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, value_index) == 552);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, bias) == 560);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, out) == 568);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, blocks) == 576);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, alpha) == 580);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, panels) == 584);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, head_panels) == 588);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, head_block_rows) == 592);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, bit_words) == 596);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, heads) == 600);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, batch) == 604);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, tokens) == 608);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, cluster_tiles) == 612);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, raster_tiles) == 616);
static_assert(S24_OFFSET(BlocksWgmmaSpParams, raster_groups) == 620);
