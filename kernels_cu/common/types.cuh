// Integers by their bits, and the check of a kernel's parameters. No CUDA headers: NVRTC needs none.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Whether a struct of parameters is as long as the one that the host launches with.
template <class Params> constexpr bool matches_host() {
#ifdef S24_PARAMETER_BYTES
  return sizeof(Params) == S24_PARAMETER_BYTES;
#else
  return true;
#endif
}
