// float32 as a sum of bf16 terms: x = high + middle + low, each the bf16 nearest to what the terms before it leave.
#pragma once
#include "common/element.cuh"

// Returns the next terms of two values, `low`'s in the lower half, and subtracts them from the values.
__device__ __forceinline__ u32 take_term(float& low, float& high) {
  const u32 terms = Element<ElementKind::BF16>::pair(low, high);
  low = __fadd_rn(low, -__uint_as_float(terms << 16));
  high = __fadd_rn(high, -__uint_as_float(terms & 0xffff0000));
  return terms;
}
