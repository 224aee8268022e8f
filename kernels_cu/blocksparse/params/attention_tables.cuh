// Written from sparse24_plans.blocksparse.attention: edit the declaration there,
// then run python -m tests.kernels.parameter_headers. The assertions hold the host's offsets.
#pragma once
#include "common/types.cuh"

struct AttentionTables {
  // Block rows, or columns, of each head: those with the most blocks first.
  const int* order;
  // Index in entries where each block row, or block column, begins.
  const int* pointers;
  // Block column of each kept block, or block row: [blocks].
  const int* entries;
  // Work tiles claimed beyond each pipeline group's first; 0 before the launch.
  u32* claimed;
  // Valid rows of Q in each batch element: [Z], or null.
  const int* q_lengths;
  // Valid rows of K and V in each batch element: [Z], or null.
  const int* kv_lengths;
};
static_assert(sizeof(AttentionTables) == 48);
static_assert(S24_OFFSET(AttentionTables, order) == 0);
static_assert(S24_OFFSET(AttentionTables, pointers) == 8);
static_assert(S24_OFFSET(AttentionTables, entries) == 16);
static_assert(S24_OFFSET(AttentionTables, claimed) == 24);
static_assert(S24_OFFSET(AttentionTables, q_lengths) == 32);
static_assert(S24_OFFSET(AttentionTables, kv_lengths) == 40);
