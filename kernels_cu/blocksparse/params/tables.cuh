// Written from sparse24_plans.blocksparse.device_tables: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct BlockTablesParams {
  // Not 0 where a block is kept: [heads, block_rows, block_cols].
  const u8* bitmap;
  // Table of this name.
  int* row_pointers;
  // Table of this name.
  int* columns;
  // Table of this name.
  int* rows;
  // Table of this name.
  int* column_pointers;
  // Table of this name.
  int* column_rows;
  // Table of this name.
  int* column_order;
  // Table of this name.
  u32* row_bits;
  // Table of this name.
  u32* column_bits;
  // Table of this name.
  int* row_panels;
  // Table of this name.
  int* column_panels;
  // Table of this name.
  int* row_panel_columns;
  // Table of this name.
  int* column_panel_rows;
  // Table of this name.
  int* rows_by_length;
  // Table of this name.
  int* columns_by_length;
  // Table of this name.
  int* group_rows;
  // Table of this name.
  int* group_firsts;
  // Table of this name.
  int* row_narrow_panels;
  // Table of this name.
  int* column_narrow_panels;
  // Table of this name.
  int* row_narrow_panel_columns;
  // Table of this name.
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
