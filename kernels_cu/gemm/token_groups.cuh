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
