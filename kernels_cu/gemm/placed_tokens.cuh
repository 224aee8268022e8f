// Which places of groups of tokens have a result.
#pragma once
#include "common/types.cuh"

// Whether a place is one of the first `group_tokens[g]` of its group's places. Offsets, with places == 0, count all.
__device__ __forceinline__ bool is_counted(const int* group_tokens, u32 places, u32 place) {
  return places == 0 || (i64)(place % places) < group_tokens[place / places];
}

// Whether a place, which may be any number, has a result: it is counted, or lies between the first and the last offset.
// Somewhere between these two an offset at or below the place is followed by one above it, whatever the others are.
__device__ __forceinline__ bool is_placed(const int* group_tokens, u32 groups, u32 places, i64 n, i64 place) {
  if (place < 0 || place >= n) return false;
  return places ? is_counted(group_tokens, places, (u32)place)
                : group_tokens[0] <= place && place < group_tokens[groups];
}
