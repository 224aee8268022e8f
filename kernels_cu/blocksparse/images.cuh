// X of a product that is a convolution: its rows are pixels of images [N, H, W, C], read by the copy engine's im2col
// mode, so no matrix of patches is ever in memory. A column of blocks is some channels of one tap of the filter.
#pragma once
#include "ptx/tensors.cuh"

// How the results' pixels meet those of X along one axis. Result i of phase f meets the pixel `lower + stride * i +
// (start + f + step * t) / divide` at tap t, if the quotient has no rest; phases are the results at f + divide * i.
struct ImageAxis {
  int lower, stride, start, step, divide;
  u32 count;  // results of a phase

  __device__ __forceinline__ int numerator(u32 phase, u32 tap) const { return start + (int)phase + step * (int)tap; }
};

// Where a tile of pixels begins.
struct Pixel {
  int w, h;
  u32 image;
};

template <bool kServed> struct Images {};
template <> struct Images<true> {
  TensorMap out_maps[4];    // of a gradient of strided X: the pixels of each phase
  ImageAxis h, w;
  u32 taps, taps_w;         // of the filter, and of a row of it
  u32 tap_words;            // of a gradient: words of a tap's bits

  __device__ __forceinline__ Pixel pixel(u32 index) const {
    const u32 row = index / w.count;
    return {w.lower + w.stride * (int)(index % w.count), h.lower + h.stride * (int)(row % h.count), row / h.count};
  }
  // Whether a phase's results meet any pixels at the tap.
  __device__ __forceinline__ bool meets(u32 phase, u32 tap) const {
    return h.numerator(phase / w.divide, tap / taps_w) % h.divide == 0 &&
           w.numerator(phase % w.divide, tap % taps_w) % w.divide == 0;
  }
  // A box of the map's channels and pixels from `at` on, in the order of results; what lies outside of images is zero.
  __device__ __forceinline__ void copy(u32 to, const TensorMap* map, u32 channel, Pixel at, u32 phase, u32 tap,
                                       u32 barrier, u64 policy) const {
    const u16 below = (u16)(h.numerator(phase / w.divide, tap / taps_w) / h.divide);
    const u16 beside = (u16)(w.numerator(phase % w.divide, tap % taps_w) / w.divide);
    copy_pixels(to, map, channel, at.w, at.h, at.image, beside, below, barrier, policy);
  }
  // The same from shared memory to a phase's results; what lies outside of them is not written.
  __device__ __forceinline__ void copy_out(u32 phase, u32 channel, u32 index, u32 from, u64 policy) const {
    const u32 row = index / w.count;
    copy_pixels_out(&out_maps[phase], channel, index % w.count, row % h.count, row / h.count, from, policy);
  }
};
