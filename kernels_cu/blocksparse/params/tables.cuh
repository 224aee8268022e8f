// Written from sparse24_plans.blocksparse.device_tables: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct BlockTablesParams {
  // Not 0 where a block is kept: [heads, block_rows, block_cols].
  const u8* bitmap;
  // Place in the values where each block row begins.
  int* row_pointers;
  // Column of each block.
  int* columns;
  // Block row of each block.
  int* rows;
  // Index in column_rows where each block column begins.
  int* column_pointers;
  // Row of each block, column by column.
  int* column_rows;
  // Place of each block in the values, column by column.
  int* column_order;
  // One bit for each column, set where a block row keeps it.
  u32* row_bits;
  // One bit for each row, set where a block column keeps it.
  u32* column_bits;
  // Row panels, those with blocks in the most columns first.
  int* row_panels;
  // Column panels, those with blocks in the most rows first.
  int* column_panels;
  // Number of columns in which each row panel keeps a block.
  int* row_panel_columns;
  // Number of rows in which each column panel keeps a block.
  int* column_panel_rows;
  // Block rows, those with the most blocks first.
  int* rows_by_length;
  // Block columns, those with the most blocks first.
  int* columns_by_length;
  // Block row of each group of neighbouring blocks; -1 past the last group.
  int* group_rows;
  // Place in the values of each group's first block.
  int* group_firsts;
  // Narrow row panels, those with blocks in the most columns first.
  int* row_narrow_panels;
  // Narrow column panels, those with blocks in the most rows first.
  int* column_narrow_panels;
  // Number of columns that each narrow row panel keeps a block in.
  int* row_narrow_panel_columns;
  // Number of rows that each narrow column panel keeps a block in.
  int* column_narrow_panel_rows;
  // Slices of row panels, five integers each, the longest first.
  int* row_slices;
  // Slices of column panels.
  int* column_slices;
  // Number of slices of row panels.
  int* row_slice_count;
  // Number of slices of column panels.
  int* column_slice_count;
  // Number of slices of each row panel.
  int* row_panel_slices;
  // Number of slices of each column panel.
  int* column_panel_slices;
  // Number of row panels with several slices.
  int* row_long_panels;
  // Number of column panels with several slices.
  int* column_long_panels;
  // Slices of narrow row panels. Only blocks of 64 have them.
  int* row_narrow_slices;
  // Slices of narrow column panels (blocks of 64).
  int* column_narrow_slices;
  // Number of slices of narrow row panels (blocks of 64).
  int* row_narrow_slice_count;
  // Number of slices of narrow column panels (blocks of 64).
  int* column_narrow_slice_count;
  // Number of narrow row panels with several slices (blocks of 64).
  int* row_narrow_long_panels;
  // Number of narrow column panels with several slices (blocks of 64).
  int* column_narrow_long_panels;
  // Number of heads.
  u32 heads;
  // Number of block rows of a head.
  u32 block_rows;
  // Number of block columns of a head.
  u32 block_cols;
  // Number of kept blocks of all heads that the tables have room for.
  u32 blocks;
  // Number of words of a block row in row_bits.
  u32 row_words;
  // Number of words of a block column in column_bits.
  u32 column_words;
  // Number of row panels of a head.
  u32 row_panels_of_head;
  // Number of column panels of a head.
  u32 column_panels_of_head;
  // Number of groups that the tables have room for.
  u32 groups;
  // Most blocks of a group.
  u32 group_size;
  // Most columns of a slice of a row panel.
  u32 slice_columns;
  // Most rows of a slice of a column panel.
  u32 slice_rows;
  // Most columns of a row panel that has one slice.
  u32 uncut_columns;
  // Most rows of a column panel that has one slice.
  u32 uncut_rows;
  // Number of slices of row panels that the tables have room for.
  u32 row_slice_room;
  // Number of slices of column panels that the tables have room for.
  u32 column_slice_room;
  // Most columns of a slice of a narrow row panel.
  u32 narrow_slice_columns;
  // Most rows of a slice of a narrow column panel.
  u32 narrow_slice_rows;
  // Most columns of a narrow row panel that has one slice.
  u32 narrow_uncut_columns;
  // Most rows of a narrow column panel that has one slice.
  u32 narrow_uncut_rows;
  // Number of slices of narrow row panels that the tables have room for.
  u32 row_narrow_slice_room;
  // Number of slices of narrow column panels that the tables have room for.
  u32 column_narrow_slice_room;
};
static_assert(sizeof(BlockTablesParams) == 368);
static_assert(S24_OFFSET(BlockTablesParams, bitmap) == 0);
static_assert(S24_OFFSET(BlockTablesParams, row_pointers) == 8);
static_assert(S24_OFFSET(BlockTablesParams, columns) == 16);
static_assert(S24_OFFSET(BlockTablesParams, rows) == 24);
static_assert(S24_OFFSET(BlockTablesParams, column_pointers) == 32);
static_assert(S24_OFFSET(BlockTablesParams, column_rows) == 40);
static_assert(S24_OFFSET(BlockTablesParams, column_order) == 48);
static_assert(S24_OFFSET(BlockTablesParams, row_bits) == 56);
static_assert(S24_OFFSET(BlockTablesParams, column_bits) == 64);
static_assert(S24_OFFSET(BlockTablesParams, row_panels) == 72);
static_assert(S24_OFFSET(BlockTablesParams, column_panels) == 80);
static_assert(S24_OFFSET(BlockTablesParams, row_panel_columns) == 88);
static_assert(S24_OFFSET(BlockTablesParams, column_panel_rows) == 96);
static_assert(S24_OFFSET(BlockTablesParams, rows_by_length) == 104);
static_assert(S24_OFFSET(BlockTablesParams, columns_by_length) == 112);
static_assert(S24_OFFSET(BlockTablesParams, group_rows) == 120);
static_assert(S24_OFFSET(BlockTablesParams, group_firsts) == 128);
static_assert(S24_OFFSET(BlockTablesParams, row_narrow_panels) == 136);
static_assert(S24_OFFSET(BlockTablesParams, column_narrow_panels) == 144);
static_assert(S24_OFFSET(BlockTablesParams, row_narrow_panel_columns) == 152);
static_assert(S24_OFFSET(BlockTablesParams, column_narrow_panel_rows) == 160);
static_assert(S24_OFFSET(BlockTablesParams, row_slices) == 168);
static_assert(S24_OFFSET(BlockTablesParams, column_slices) == 176);
static_assert(S24_OFFSET(BlockTablesParams, row_slice_count) == 184);
static_assert(S24_OFFSET(BlockTablesParams, column_slice_count) == 192);
static_assert(S24_OFFSET(BlockTablesParams, row_panel_slices) == 200);
static_assert(S24_OFFSET(BlockTablesParams, column_panel_slices) == 208);
static_assert(S24_OFFSET(BlockTablesParams, row_long_panels) == 216);
static_assert(S24_OFFSET(BlockTablesParams, column_long_panels) == 224);
static_assert(S24_OFFSET(BlockTablesParams, row_narrow_slices) == 232);
static_assert(S24_OFFSET(BlockTablesParams, column_narrow_slices) == 240);
static_assert(S24_OFFSET(BlockTablesParams, row_narrow_slice_count) == 248);
static_assert(S24_OFFSET(BlockTablesParams, column_narrow_slice_count) == 256);
static_assert(S24_OFFSET(BlockTablesParams, row_narrow_long_panels) == 264);
static_assert(S24_OFFSET(BlockTablesParams, column_narrow_long_panels) == 272);
static_assert(S24_OFFSET(BlockTablesParams, heads) == 280);
static_assert(S24_OFFSET(BlockTablesParams, block_rows) == 284);
static_assert(S24_OFFSET(BlockTablesParams, block_cols) == 288);
static_assert(S24_OFFSET(BlockTablesParams, blocks) == 292);
static_assert(S24_OFFSET(BlockTablesParams, row_words) == 296);
static_assert(S24_OFFSET(BlockTablesParams, column_words) == 300);
static_assert(S24_OFFSET(BlockTablesParams, row_panels_of_head) == 304);
static_assert(S24_OFFSET(BlockTablesParams, column_panels_of_head) == 308);
static_assert(S24_OFFSET(BlockTablesParams, groups) == 312);
static_assert(S24_OFFSET(BlockTablesParams, group_size) == 316);
static_assert(S24_OFFSET(BlockTablesParams, slice_columns) == 320);
static_assert(S24_OFFSET(BlockTablesParams, slice_rows) == 324);
static_assert(S24_OFFSET(BlockTablesParams, uncut_columns) == 328);
static_assert(S24_OFFSET(BlockTablesParams, uncut_rows) == 332);
static_assert(S24_OFFSET(BlockTablesParams, row_slice_room) == 336);
static_assert(S24_OFFSET(BlockTablesParams, column_slice_room) == 340);
static_assert(S24_OFFSET(BlockTablesParams, narrow_slice_columns) == 344);
static_assert(S24_OFFSET(BlockTablesParams, narrow_slice_rows) == 348);
static_assert(S24_OFFSET(BlockTablesParams, narrow_uncut_columns) == 352);
static_assert(S24_OFFSET(BlockTablesParams, narrow_uncut_rows) == 356);
static_assert(S24_OFFSET(BlockTablesParams, row_narrow_slice_room) == 360);
static_assert(S24_OFFSET(BlockTablesParams, column_narrow_slice_room) == 364);
