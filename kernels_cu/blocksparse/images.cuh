// X of a product that is a convolution: its rows are pixels of images [N, H, W, C], read by the copy engine's im2col
// mode, so no matrix of patches is ever in memory. A column of blocks is some channels of one tap of the filter.
#pragma once
#include "ptx/tensors.cuh"

// How the results' pixels meet those of X along one axis. Result i of phase f meets the pixel `lower + stride * i +
// (start + f + step * t) / divide` at tap t, if the quotient has no rest; phases are the results at f + divide * i.
struct ImageAxis {
  int lower, stride, start, step, divide;
  u32 count;  // results of a phase
  u32 size;   // all results, of a gradient

  __device__ __forceinline__ int numerator(u32 phase, u32 tap) const { return start + (int)phase + step * (int)tap; }
};

// Where a tile of pixels begins.
struct Pixel {
  int w, h;
  u32 image;
};

// kKind: 1; 2 where there are several phases, of a gradient of strided X; 0 of products.
template <int kKind> struct Images {
  static constexpr bool kPhases = kKind > 1;
  void* results;     // of a gradient [N, H, W, rows]
  ImageAxis h, w;
  u32 taps, taps_w;  // of the filter, and of a row of it
  u32 tap_words;     // of a gradient: words of a tap's bits
  u32 images;

  __device__ __forceinline__ Pixel pixel(u32 index) const {
    const u32 row = index / w.count;
    return {w.lower + w.stride * (int)(index % w.count), h.lower + h.stride * (int)(row % h.count), row / h.count};
  }
  // Whether a phase's results meet any pixels at the tap.
  __device__ __forceinline__ bool meets(u32 phase, u32 tap) const {
    if constexpr (!kPhases) return true;
    return h.numerator(phase / w.divide, tap / taps_w) % h.divide == 0 &&
           w.numerator(phase % w.divide, tap % taps_w) % w.divide == 0;
  }
  // A box of the map's channels and pixels from `at` on, in the order of results; what lies outside of images is zero.
  __device__ __forceinline__ void copy(u32 to, const TensorMap* map, u32 channel, Pixel at, u32 phase, u32 tap,
                                       u32 barrier, u64 policy) const {
    u32 below = h.numerator(kPhases ? phase / w.divide : 0, tap / taps_w);
    u32 beside = w.numerator(kPhases ? phase % w.divide : 0, tap % taps_w);
    if constexpr (kPhases) below /= h.divide, beside /= w.divide;
    copy_pixels(to, map, channel, at.w, at.h, at.image, (u16)beside, (u16)below, barrier, policy);
  }
  // Cell 0 of a phase's result; null where there is none.
  __device__ __forceinline__ void* result(u32 phase, u32 index, u32 channels, u32 bytes) const {
    const u32 row = index / w.count, image = row / h.count;
    const u32 y = row % h.count * h.divide + phase / w.divide, x = index % w.count * w.divide + phase % w.divide;
    if (image >= images || y >= h.size || x >= w.size) return nullptr;
    return (u8*)results + (((i64)image * h.size + y) * w.size + x) * channels * bytes;
  }
};

template <> struct Images<0> {};
