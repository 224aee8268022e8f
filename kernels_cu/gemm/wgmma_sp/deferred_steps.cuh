// Epilogue steps that overlap wgmma: a consumer warpgroup computes the last groups of a work tile's tokens while the
// tensor cores multiply the first boxes of X of the next work tile.
#pragma once
#include "gemm/wgmma_sp/epilogue_store.cuh"

// Defers nothing, and leaves no trace in the code.
template <class Result, bool kDefers = (Config::kDeferredGroups > 0)> struct DeferredSteps {
  using Epilogue = EpilogueStore<Result>;
  static constexpr int kTiles = 0;

  __device__ __forceinline__ DeferredSteps(Epilogue&) {}
  __device__ __forceinline__ bool more(const TileScheduler& scheduler, const WgmmaSpParams& p) const {
    return scheduler.more(p);
  }
  __device__ __forceinline__ void hold(const AccumulatorTile&, i64, const WorkTile&,
                                       const typename Epilogue::RowTerms&) const {}
  __device__ __forceinline__ void forget() const {}
};

// Holds copies of a work tile's last accumulators, because the next work tile is summed in their registers. They are
// computed in pieces, one beside each box of X in flight. A piece waits for its own warpgroup and for stores of this
// warpgroup alone, so the pipelines proceed as without it.
template <class Result> struct DeferredSteps<Result, true> {
  using Epilogue = EpilogueStore<Result>;

  static constexpr int kFirst = Epilogue::kWrittenGroups, kStepGroups = Epilogue::kStepGroups;
  static constexpr int kGroups = Config::kTileN / 8 - kFirst;
  static constexpr int kPieceGroups = kStepGroups % 2 == 0 ? 2 : 1;  // groups of eight tokens of a piece
  static constexpr int kPieces = kGroups / kPieceGroups;
  static constexpr int kTiles = (kPieces + 1) / 2;  // K tiles whose boxes are multiplied beside the pieces
  static_assert(kFirst % kPieceGroups == 0 && kGroups % kPieceGroups == 0, "a piece belongs to one step");

  Epilogue& epilogue;
  Accumulator held[4 * kGroups] = {};
  bool pending = false;  // whether any are held
  WorkTile work;         // theirs
  u32 row0, token0;      // where it begins: 32 bits suffice
  u32 tokens;            // how many of its tokens are stored
  typename Epilogue::RowTerms terms;

  __device__ __forceinline__ DeferredSteps(Epilogue& epilogue) : epilogue(epilogue) {}

  // Whether there is another work tile. Held groups are computed at once unless it has K tiles enough.
  __device__ __forceinline__ bool more(const TileScheduler& scheduler, const WgmmaSpParams& p) {
    const bool more = scheduler.more(p);
    if (!pending || (more && scheduler.last - scheduler.first >= kTiles)) return more;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) compute(piece);
    pending = false;
    return more;
  }

  // The compiler would keep a plain copy and its original in one place, and spill both.
  __device__ __forceinline__ void hold(const AccumulatorTile& sums, i64 first_row, const WorkTile& finished,
                                       const typename Epilogue::RowTerms& its_terms) {
    const WgmmaSpParams& p = epilogue.p;
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) held[i] = accumulator_of(bits_of(sums[4 * kFirst + i]) ^ opaque_zero(p));
    work = finished, row0 = (u32)first_row, token0 = (u32)work.token, terms = its_terms, pending = true;
    tokens = first_row < p.m ? (u32)min(work.token_end(p) - work.token, (i64)Config::kTileN) : 0;
  }
  // Tells the compiler that nothing is held, so that no registers are kept for it.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (auto& sum : held) sum = 0;
  }

  // The group of the work tile that a piece begins with.
  static __device__ __forceinline__ constexpr int first_group(int piece) { return kFirst + piece * kPieceGroups; }

  // Stages a piece, and stores its step if it is the step's last one.
  __device__ __forceinline__ void compute(int piece) {
    const int step = first_group(piece) / kStepGroups, group = first_group(piece) % kStepGroups;
    if (piece >= kPieces || step * Config::kStepTokens >= tokens) return;
    const u32 buffer = group == 0 ? epilogue.take_buffer() : epilogue.taken_buffer();
    const u32 token = token0 + step * Config::kStepTokens;
    epilogue.fill(buffer, held + 4 * piece * kPieceGroups, row0, token, work, terms, group, group + kPieceGroups);
    if (group + kPieceGroups == kStepGroups) epilogue.store(buffer, row0, token, work);
  }
};
