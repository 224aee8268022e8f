// Written from sparse24_plans.blocksparse.backends.conv_wgmma: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct AxisParams {
  // Pixel that result 0 of a phase reads at offset 0.
  int lower;
  // Pixels from one result's pixel to the next.
  int stride;
  // Numerator of the offset of phase 0 and tap 0.
  int start;
  // Growth of the numerator from one tap to the next.
  int step;
  // Denominator of the offset, and the number of phases.
  int divide;
  // Number of results of a phase.
  u32 results;
  // Pixels of X along the axis.
  u32 size;
  // Factor of the division by results.
  u32 multiplier;
  // Bits by which the division by results shifts the product.
  u32 shift;
};
static_assert(sizeof(AxisParams) == 36);
static_assert(S24_OFFSET(AxisParams, lower) == 0);
static_assert(S24_OFFSET(AxisParams, stride) == 4);
static_assert(S24_OFFSET(AxisParams, start) == 8);
static_assert(S24_OFFSET(AxisParams, step) == 12);
static_assert(S24_OFFSET(AxisParams, divide) == 16);
static_assert(S24_OFFSET(AxisParams, results) == 20);
static_assert(S24_OFFSET(AxisParams, size) == 24);
static_assert(S24_OFFSET(AxisParams, multiplier) == 28);
static_assert(S24_OFFSET(AxisParams, shift) == 32);

struct ConvWgmmaParams {
  // Values of the filter [blocks * b, b], or dY [pixels, K] for wgrad.
  TensorMap left_map;
  // Pixels of X, or of dY for dgrad.
  TensorMap right_map;
  // Results [pixels, rows], or [split_k * blocks * b, b] for wgrad.
  TensorMap out_map;
  // Row panels, longest first. For wgrad: block row of each group, or -1.
  const int* work_rows;
  // Block columns of each panel. For wgrad: first block of each group.
  const int* work_blocks;
  // Bit c % 32 of word c / 32 is set where the block row keeps column c.
  const u32* kept;
  // Index where the blocks of each block row begin; of each tap, for dgrad.
  const int* pointers;
  // Block column of each block: [blocks], for wgrad.
  const int* columns;
  // Index of each block in the values: [blocks], for dgrad.
  const int* value_index;
  // Bias [rows], or null.
  const void* bias;
  // Results [images, h, w, rows] of phases, or the reduced gradient of the filter.
  void* out;
  // Partial sums of split-K: [split_k, elements].
  const float* partials;
  // Number of elements of the filter's gradient.
  i64 elements;
  // Vertical axis.
  AxisParams h;
  // Horizontal axis.
  AxisParams w;
  // Factor of the product.
  float alpha;
  // Number of kept blocks.
  int blocks;
  // Number of block rows.
  u32 block_rows;
  // Number of row panels of a phase.
  u32 panels;
  // Number of words of a block row in kept.
  u32 bit_words;
  // Number of words of one tap of a block row, for dgrad.
  u32 tap_words;
  // Number of taps of the filter.
  u32 taps;
  // Number of taps in one row of the filter.
  u32 taps_w;
  // Number of phases.
  u32 phases;
  // Number of images.
  u32 images;
  // Number of pixels of a phase in all images.
  u32 pixels;
  // Number of clusters' tiles that cover the pixels; of a group, for wgrad.
  u32 cluster_tiles;
  // Number of pixel tiles of a raster group, which L2 holds.
  u32 raster_tiles;
  // Number of groups of blocks, for wgrad.
  u32 groups;
  // Number of slices of the pixels that are summed apart, for wgrad.
  u32 split_k;
  // Number of steps of a slice, for wgrad.
  u32 k_steps;
};
static_assert(sizeof(ConvWgmmaParams) == 640);
static_assert(S24_OFFSET(ConvWgmmaParams, left_map) == 0);
static_assert(S24_OFFSET(ConvWgmmaParams, right_map) == 128);
static_assert(S24_OFFSET(ConvWgmmaParams, out_map) == 256);
static_assert(S24_OFFSET(ConvWgmmaParams, work_rows) == 384);
static_assert(S24_OFFSET(ConvWgmmaParams, work_blocks) == 392);
static_assert(S24_OFFSET(ConvWgmmaParams, kept) == 400);
static_assert(S24_OFFSET(ConvWgmmaParams, pointers) == 408);
static_assert(S24_OFFSET(ConvWgmmaParams, columns) == 416);
static_assert(S24_OFFSET(ConvWgmmaParams, value_index) == 424);
static_assert(S24_OFFSET(ConvWgmmaParams, bias) == 432);
static_assert(S24_OFFSET(ConvWgmmaParams, out) == 440);
static_assert(S24_OFFSET(ConvWgmmaParams, partials) == 448);
static_assert(S24_OFFSET(ConvWgmmaParams, elements) == 456);
static_assert(S24_OFFSET(ConvWgmmaParams, h) == 464);
static_assert(S24_OFFSET(ConvWgmmaParams, w) == 500);
static_assert(S24_OFFSET(ConvWgmmaParams, alpha) == 536);
static_assert(S24_OFFSET(ConvWgmmaParams, blocks) == 540);
static_assert(S24_OFFSET(ConvWgmmaParams, block_rows) == 544);
static_assert(S24_OFFSET(ConvWgmmaParams, panels) == 548);
static_assert(S24_OFFSET(ConvWgmmaParams, bit_words) == 552);
static_assert(S24_OFFSET(ConvWgmmaParams, tap_words) == 556);
static_assert(S24_OFFSET(ConvWgmmaParams, taps) == 560);
static_assert(S24_OFFSET(ConvWgmmaParams, taps_w) == 564);
static_assert(S24_OFFSET(ConvWgmmaParams, phases) == 568);
static_assert(S24_OFFSET(ConvWgmmaParams, images) == 572);
static_assert(S24_OFFSET(ConvWgmmaParams, pixels) == 576);
static_assert(S24_OFFSET(ConvWgmmaParams, cluster_tiles) == 580);
static_assert(S24_OFFSET(ConvWgmmaParams, raster_tiles) == 584);
static_assert(S24_OFFSET(ConvWgmmaParams, groups) == 588);
static_assert(S24_OFFSET(ConvWgmmaParams, split_k) == 592);
static_assert(S24_OFFSET(ConvWgmmaParams, k_steps) == 596);
