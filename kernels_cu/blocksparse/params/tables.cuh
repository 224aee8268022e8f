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
};
static_assert(sizeof(BlockTablesParams) == 208);
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
static_assert(S24_OFFSET(BlockTablesParams, heads) == 168);
static_assert(S24_OFFSET(BlockTablesParams, block_rows) == 172);
static_assert(S24_OFFSET(BlockTablesParams, block_cols) == 176);
static_assert(S24_OFFSET(BlockTablesParams, blocks) == 180);
static_assert(S24_OFFSET(BlockTablesParams, row_words) == 184);
static_assert(S24_OFFSET(BlockTablesParams, column_words) == 188);
static_assert(S24_OFFSET(BlockTablesParams, row_panels_of_head) == 192);
static_assert(S24_OFFSET(BlockTablesParams, column_panels_of_head) == 196);
static_assert(S24_OFFSET(BlockTablesParams, groups) == 200);
static_assert(S24_OFFSET(BlockTablesParams, group_size) == 204);
