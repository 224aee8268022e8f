// Parts of float32 in bf16: what the pass over X and the product share.
#pragma once
#include "common/element.cuh"

// The next parts of two values, `low`'s in the lower half; leaves what they lack.
__device__ __forceinline__ u32 take_term(float& low, float& high) {
  const u32 part = Element<ElementKind::BF16>::pair(low, high);
  low = __fadd_rn(low, -__uint_as_float(part << 16));
  high = __fadd_rn(high, -__uint_as_float(part & 0xffff0000));
  return part;
}
