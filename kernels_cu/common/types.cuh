// Integer types named by their bits, and TMA's tensor maps. NVRTC needs no CUDA headers for them.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct alignas(64) TensorMap {
  u8 opaque[128];
};

// Offset of a field in bytes. NVRTC has no <cstddef>, and its __builtin_offsetof takes no type.
#define S24_OFFSET(Struct, field) __INTADDR__(&((Struct*)0)->field)
