// Integer types named by their bits, and the check of a kernel's parameters. NVRTC needs no CUDA headers for them.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Whether a struct of parameters is as long as the one that the host launches with, which says so in
// S24_PARAMETER_BYTES.
template <class Params> constexpr bool matches_host() { return sizeof(Params) == S24_PARAMETER_BYTES; }
