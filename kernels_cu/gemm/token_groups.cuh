// The rows of X and Y that a group of tokens has. The host cannot check values in device memory, so both ends are
// clamped to [0, n], and an end before its begin is an empty group: whatever the values are, no access leaves X and Y.
#pragma once
#include "common/types.cuh"

struct TokenRange {
  i64 begin, end;
};

// Group g has the rows between its offset and the next one, or if places > 0 the first `group_tokens[g]` of so many.
__device__ __forceinline__ TokenRange token_range(const int* group_tokens, u32 places, i64 n, u32 g) {
  const auto clamped = [](i64 v, i64 low, i64 high) { return v < low ? low : v > high ? high : v; };
  const i64 place = (i64)g * places;
  const i64 given = places ? place + group_tokens[g] : group_tokens[g + 1];
  const i64 begin = clamped(places ? place : group_tokens[g], 0, n);
  return {begin, clamped(given, begin, places ? place + places : n)};
}

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
