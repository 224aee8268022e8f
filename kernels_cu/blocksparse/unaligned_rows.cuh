// Stores rows of C that begin anywhere, so that TMA cannot: threads store pieces of 16 bytes that are aligned in global
// memory, and only the ends of a tile's rows one by one.
//
// Each warp stages and stores 16 rows of its warpgroup's tile, one step after the other. A step stores whole sectors of
// 32 bytes: what lies behind the last one goes with the next step, for which a staged row begins with a margin. So each
// row of a tile has two ends, however many steps it has.
//
//   staged row   | margin: 32 bytes before the step | bytes of the step | 16 bytes: rows begin in different banks |
#pragma once
#include "ptx/async.cuh"

// kBytes: of a result. kStepBytes: of a row in a step. Positions in a row are counted from the step's first byte.
template <int kBytes, int kStepBytes> struct UnalignedRows {
  static constexpr int kSector = 32, kPiece = 16, kWarpRows = 16;
  static constexpr int kMargin = kSector, kPitch = kMargin + kStepBytes + kPiece;
  static constexpr int kWarpBytes = kWarpRows * kPitch;
  static constexpr int kLanes = kStepBytes / kPiece, kPassRows = 32 / kLanes, kPasses = kWarpRows / kPassRows;
  static constexpr int kEndResults = kPiece / kBytes - 1;  // the most results of an end that is no whole piece
  static_assert(kStepBytes % kSector == 0, "all steps of a row begin at the same place of a sector");

  // Returns where a result of the step is, in its warp's part of the staging area.
  static __device__ __forceinline__ constexpr int staged_at(int row, int column) {
    return row * kPitch + kMargin + column * kBytes;
  }
  // The row of a lane in a pass. If rows have an odd number of results, words of the rows of a pass lie in different
  // banks.
  static __device__ __forceinline__ constexpr int row_of(int pass, int lane) {
    constexpr int kApart = 4 / kBytes;
    const int among = lane / kLanes, other = among / 4 + pass * (kPassRows / 4);
    return among % 4 * kApart + other % kApart + other / kApart * (4 * kApart);
  }
  // Returns where a lane's piece begins. skew: bytes from the beginning of a sector to the step's first byte. The lanes
  // of a row have the sectors that end in the step. In the last step there may be one piece behind them.
  static __device__ __forceinline__ constexpr int piece_at(int lane, int skew) { return lane % kLanes * kPiece - skew; }
  static __device__ __forceinline__ constexpr int last_piece_at(int skew) { return kStepBytes - skew; }
  // Whether a piece is stored: no part of it is before the tile, or behind the `end` of the row's results.
  static __device__ __forceinline__ constexpr bool stores_piece(int at, bool first, int end) {
    return (!first || at >= 0) && at + kPiece <= end;
  }
  // The end of the first results of a row, which are stored one by one in the first step.
  static __device__ __forceinline__ constexpr int head_end(int skew, int end) {
    const int pieces = (kPiece - skew % kPiece) % kPiece;
    return pieces < end ? pieces : end;
  }
  // The beginning of the last results of a row, which are stored one by one in the last step.
  static __device__ __forceinline__ constexpr int tail_begin(int skew, bool first, int end) {
    const int pieces = (int)((u32)(end + skew) / kPiece * kPiece) - skew, head = first ? head_end(skew, end) : -skew;
    return pieces > head ? pieces : head;
  }

  u8* to;                 // the first result of the warp's rows in the tile
  i64 pitch;              // bytes from one row to the next
  u32 staged;             // the warp's part of the staging area
  u8* piece_to[kPasses];  // this lane's pieces of the first step, and where they are staged in every step
  u32 piece_from[kPasses];

  __device__ __forceinline__ UnalignedRows(u8* to, i64 pitch, u32 staged) : to(to), pitch(pitch), staged(staged) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = row_of(pass, lane), at = piece_at(lane, skew(row));
      piece_to[pass] = of_row(row) + at, piece_from[pass] = staged_row(row) + at;
    }
  }
  __device__ __forceinline__ u8* of_row(int row) const { return to + row * pitch; }
  __device__ __forceinline__ u32 staged_row(int row) const { return staged + staged_at(row, 0); }
  __device__ __forceinline__ int skew(int row) const { return (int)((u32)(u64)of_row(row) % kSector); }

  // A piece that begins anywhere in a staged row.
  struct Piece {
    u32 words[5];

    __device__ __forceinline__ void load(u32 from) {
#pragma unroll
      for (int i = 0; i < (kBytes == 4 ? 4 : 5); ++i) words[i] = load_shared_as<u32>((from & ~3u) + 4 * i);
      if constexpr (kBytes < 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], from % 4 * 8);
      }
    }
    __device__ __forceinline__ void store(u8* to) const { store_global(to, words[0], words[1], words[2], words[3]); }
  };

  // Stores the results of a step, of which a row has `end` bytes. before: bytes of a row in the steps before.
  template <class Bits> __device__ __forceinline__ void store(int before, bool last, int end) const {
    const int lane = threadIdx.x % 32;
    const bool first = before == 0;
    Piece pieces[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) pieces[pass].load(piece_from[pass]);
    if (!first && !last) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) pieces[pass].store(piece_to[pass] + before);
      return;
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      if (stores_piece(piece_at(lane, skew(row_of(pass, lane))), first, end))
        pieces[pass].store(piece_to[pass] + before);
    if (first) store_results<Bits>(before, [](int) { return 0; }, [&](int skew) { return head_end(skew, end); });
    if (!last) return;
    const int row = lane % kWarpRows, at = last_piece_at(skew(row));
    if (lane < kWarpRows && stores_piece(at, first, end)) {
      pieces[0].load(staged_row(row) + at);
      pieces[0].store(of_row(row) + before + at);
    }
    store_results<Bits>(before, [&](int skew) { return tail_begin(skew, first, end); }, [&](int) { return end; });
  }
  // The row's lanes store the results of each row from begin(skew) to end(skew), which are fewer than a piece has.
  template <class Bits, class Begin, class End>
  __device__ __forceinline__ void store_results(int before, Begin begin, End end) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = row_of(pass, lane);
#pragma unroll
      for (int i = 0; i < kEndResults; i += kLanes) {
        const int at = begin(skew(row)) + (lane % kLanes + i) * kBytes;
        if (at < end(skew(row))) *(Bits*)(of_row(row) + before + at) = load_shared_as<Bits>(staged_row(row) + at);
      }
    }
  }

  // Moves what a step leaves to the margin. A lane loads its part before the next step is staged, and stores it then.
  static __device__ __forceinline__ u32 margin_at() { return threadIdx.x % 32 / 2 * kPitch + threadIdx.x % 2 * kPiece; }
  __device__ __forceinline__ void load_rest(u32 (&rest)[4]) const {
    load_shared_words(rest, staged + margin_at() + kStepBytes);
  }
  __device__ __forceinline__ void store_rest(const u32 (&rest)[4]) const {
    store_shared_x4(staged + margin_at(), rest[0], rest[1], rest[2], rest[3]);
  }
};
