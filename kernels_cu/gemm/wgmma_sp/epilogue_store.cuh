// The epilogue of gemm/wgmma_sp.cu without split-K: results are staged in shared memory and stored by TMA.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"
#include "gemm/wgmma_sp/dot_in_float64.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma_batches.cuh"

// The state of a warpgroup's staging buffers that TMA loads C into. Without kCStaged the struct is empty, so it
// adds nothing to the code of other products.
template <class Result, bool kStaged = Config::kCStaged> struct CStaging {};
template <class Result> struct CStaging<Result, true> {
  Barriers barriers;
  PipelineState<Config::kStagingBuffers> at;  // the buffer of the next step
  u32 stored = Config::kStagingBuffers;       // the buffer of the step before; none before the first step
};

// Stores 64 rows x kTileN tokens of one warpgroup. A step stages kStepTokens tokens in one of two buffers. TMA stores
// them while the next step is staged, and the last steps while the next work tile is multiplied. If the lines of Y are
// not aligned for TMA, the threads store single elements; if a group of tokens ends within a step, they store 16 bytes
// at a time. If TMA loads C, a producer thread has loaded it into a step's buffer before, and each thread replaces the
// C of its results.
template <class Result> struct EpilogueStore : CStaging<Result>, ResultScale<Config> {
  typedef typename Result::Bits Bits;

  const WgmmaSpParams& p;
  u32 staging;  // shared memory address of the buffers
  int barrier;  // named barrier of the warpgroup
  u32 next_buffer = 0;
  // The epilogue's operands: the bias and the scales of a thread's two rows of each m64 tile, and the scales of the
  // tokens, of which a lane has every 32nd.
  Config::Bias::Bits bias[Config::kMTilesPerWarpgroup][2];
  float scale_w[Config::kMTilesPerWarpgroup][2];
  float scale_x[Config::kScaleX == 2 ? (Config::kTileN + 31) / 32 : 1];

  static constexpr int kOutBytes = sizeof(Bits);
  // Results of one token in a TMA box.
  static constexpr int kLineOutputs = Config::kYColumnMajor ? Config::kMTileOutputs : 128 / kOutBytes;
  static constexpr int kBoxOutputs = Config::kMTileOutputs < kLineOutputs ? Config::kMTileOutputs : kLineOutputs;
  static constexpr int kBoxBytes = kBoxOutputs * kOutBytes, kBoxes = Config::kMTileOutputs / kBoxOutputs;

  // The most groups of eight tokens whose results are computed together, as registers allow, and how many are.
  static constexpr bool kFewRegisters = Config::kWarpgroups == 3 || Config::kKChunks > 1;
  static constexpr int kMostTogether = Config::kHasC && !kFewRegisters ? 4 : 1;
  static constexpr int kStepGroups = Config::kStepTokens / 8;
  static constexpr int kTogether = kStepGroups % kMostTogether == 0 ? kMostTogether : kStepGroups % 2 == 0 ? 2 : 1;

  // Completes the initialisation of the aggregate.
  __device__ __forceinline__ void begin(Barriers barriers) {
    if constexpr (Config::kCStaged) this->barriers = barriers;
  }

  // The offset of a token's output in a buffer. For a row-major Y a box's tokens lie one after the other under the
  // swizzle of kBoxBytes; for a column-major Y each output has a line of tokens under the swizzle of kLineBytes.
  static __device__ __forceinline__ constexpr u32 staged_at(int token, int output) {
    if constexpr (Config::kYColumnMajor) {
      constexpr int kLine = Config::kLineBytes, kChunks = kLine / 16;
      const int in = token * kOutBytes;
      return output * kLine + (in / 16 ^ output * kChunks / 8 % kChunks) * 16 + in % 16;
    } else {
      constexpr int kChunks = kBoxBytes / 16;
      const int in = output % kBoxOutputs * kOutBytes;
      return (output / kBoxOutputs * Config::kStepTokens + token) * kBoxBytes +
             (in / 16 ^ token / (8 / kChunks) % kChunks) * 16 + in % 16;
    }
  }

  // The offset at which a thread of the warpgroup stages gated results of eight tokens from `token` on. Its warp has
  // eight outputs. Results of 2 bytes: the row of stmatrix. Others: the output of token 2t + i.
  static __device__ __forceinline__ constexpr u32 gated_at(int thread, int token, int i = 0) {
    const int lane = thread % 32, output = thread % 128 / 32 * 8;
    if constexpr (kOutBytes != 2) return staged_at(token + lane % 4 * 2 + i, output + lane / 4);
    else return Config::kYColumnMajor ? staged_at(token, output + lane % 8) : staged_at(token + lane % 8, output);
  }

  // Loads bias and scales of the warpgroup's m64 tiles from `m_tile` on. The bias is converted where it is added: a
  // conversion would wait for it.
  __device__ __forceinline__ void load_operands(const WorkTile& work, u32 m_tile) {
    const auto biases = work.of_batch<&BatchParams::bias>(p, (const typename Config::Bias::Bits*)p.bias);
    const auto scales_w = work.of_batch<&BatchParams::scale_w>(p, p.scale_w);
    const auto scales_x = work.of_batch<&BatchParams::scale_x>(p, p.scale_x);
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int i = 0; i < 2 * Config::kMTilesPerWarpgroup; ++i) {
      const i64 row = (work.row_tile + m_tile + i / 2) * Tile::kRows + 16 * warp + lane / 4 + i % 2 * 8;
      const i64 at = work.first_row(p) + min(row, p.m - 1);
      bias[i / 2][i % 2] = p.bias ? biases[at] : 0;
      scale_w[i / 2][i % 2] = scale_at<Config::kScaleW>(scales_w, at);
    }
#pragma unroll
    for (int i = 0; i < sizeof scale_x / sizeof(float); ++i)
      scale_x[i] = scale_at<Config::kScaleX>(scales_x, min(work.token + 32 * i + lane, work.token_end(p) - 1));
  }

  // Writes the results of the warpgroup's r-th m64 tile, whose first row is `row0`.
  __device__ __forceinline__ void write(const AccumulatorTile& sums, i64 row0, const WorkTile& work, int r) {
    if (row0 >= p.m) return;
    this->begin_scale(p.scale_y);
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
    const i64 output0 = row0 / Config::kRowsPerOutput;
#pragma unroll
    for (int step = 0; step < Config::kTileN / Config::kStepTokens; ++step) {
      const i64 token = work.token + step * Config::kStepTokens;
      if (token >= work.token_end(p)) break;
      const u32 buffer = staging + next_buffer * Config::kStepBytes;
      if (++next_buffer == Config::kStagingBuffers) next_buffer = 0;
      if constexpr (Config::kCStaged) {
        if (loads_c(p)) barrier_wait(this->barriers.c_full(barrier - 1, this->at.stage), this->at.parity);
      }
      fill(buffer, sums + step * Config::kStepTokens / 2, row0, step * Config::kStepTokens, work, r);
      if (p.y_aligned && (!Config::kGrouped || token + Config::kStepTokens <= work.token_end(p)))
        store_box(buffer, output0, token, work);
      else if (Config::kGrouped && p.y_aligned) store_chunks(buffer, output0, token, work);
      else store_elements(buffer, output0, token, work);
      if constexpr (Config::kCStaged) this->stored = this->at.stage, this->at.next();
    }
    if constexpr (Config::kSplitTerms > 0) recompute_nans(sums, row0, work);
    this->raise(p.amax, row0 + 16 * warp + g < p.m, !Config::kGated && row0 + 16 * warp + g + 8 < p.m);
  }

  // Fills a buffer with the results of the step that begins at `token` of the work tile.
  __device__ __forceinline__ void fill(u32 buffer, const Accumulator* sums, i64 row0, int token, const WorkTile& work,
                                       int r) {
    const i64 token0 = work.token + token;
    const int t = threadIdx.x % 4, left = (int)min(work.token_end(p) - token0, (i64)Config::kStepTokens) - 2 * t;
#pragma unroll
    for (int first = 0; first < kStepGroups; first += kTogether) {
      CBits c[kTogether];
      if constexpr (Config::kHasC) load_c(c, buffer, row0, token0, 8 * first, work);
      float v[kTogether][4];
#pragma unroll
      for (int k = 0; k < 4 * kTogether; ++k) {
        const int j = first + k / 4, i = k % 4;
        v[k / 4][i] = unactivated(sums[4 * j + i], p, scale_of(token + 8 * j, 2 * t + i % 2), scale_w[r][i / 2],
                                  Config::Bias::to_float(bias[r][i / 2]), Config::kHasC ? c_value(c[k / 4], i) : 0.0f);
      }
      activate<Config, 4 / Config::kRowsPerOutput>(v);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int j = first + k;
        // A NaN sum is recomputed behind the store, which leaves C for it where Y is C.
        if constexpr (Config::kSplitTerms > 0 && Config::kHasC)
#pragma unroll
          for (int i = 0; i < 4; ++i) v[k][i] = sums[4 * j + i] == sums[4 * j + i] ? v[k][i] : c_value(c[k], i);
        if constexpr (Config::kGated)
#pragma unroll
          for (int i = 0; i < 2; ++i) v[k][i] = __fmul_rn(v[k][i], v[k][i + 2]);
        if constexpr (is_fp8(Config::kOut)) scale(v[k], left - 8 * j);
        stage(buffer, 8 * j, sums + 4 * j, v[k]);
      }
    }
  }

  // The scale of the work tile's token `first + token`, of which `first` is a multiple of 8. All lanes call it.
  __device__ __forceinline__ float scale_of(int first, int token) const {
    if constexpr (Config::kScaleX != 2) return scale_x[0];
    else return __shfl_sync(~0u, scale_x[first / 32], first % 32 + token);
  }

  // Scales a thread's fp8 results of eight tokens. `left` is the number of the work tile's tokens from the thread's
  // first one on.
  __device__ __forceinline__ void scale(float (&v)[4], int left) {
#pragma unroll
    for (int i = 0; i < 4 / Config::kRowsPerOutput; ++i) v[i] = this->scaled(v[i], i % 2 < left, i / 2);
  }

  // Stages a thread's results of eight tokens from `token` on, of which `d` are the sums.
  __device__ __forceinline__ void stage(u32 buffer, int token, const Accumulator* d, const float (&v)[4]) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16, g = lane / 4, t = lane % 4;
    if constexpr (Config::kGated) {
      stage_gated(buffer, token, v[0], v[1]);
    } else if constexpr (is_fp8(Config::kOut)) {  // Y is row-major, so outputs 8 apart lie 8 bytes apart
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 to = buffer + staged_at(token + 2 * t + i, row + g), pair = Result::pair(v[i], v[i + 2]);
        store_shared(to, (u8)pair);
        store_shared(to + 8, (u8)(pair >> 8));
      }
    } else if constexpr (Config::kYColumnMajor && kOutBytes == 2) {
      stmatrix_x2(buffer + staged_at(token, row + lane % 16), Result::pair(v[0], v[1]), Result::pair(v[2], v[3]));
    } else if constexpr (Config::kYColumnMajor) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_shared_x2(buffer + staged_at(token + 2 * t, row + g + i * 8), rounded<Result>(d[2 * i], v[2 * i]),
                        rounded<Result>(d[2 * i + 1], v[2 * i + 1]));
    } else if constexpr (kOutBytes == 2) {
      stmatrix_transposed_x2(buffer + staged_at(token + lane % 8, row + lane / 8 % 2 * 8), Result::pair(v[0], v[1]),
                             Result::pair(v[2], v[3]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_shared(buffer + staged_at(token + 2 * t + i % 2, row + g + i / 2 * 8), rounded<Result>(d[i], v[i]));
    }
  }

  // A thread's elements of C for the results of eight tokens: in pairs where they have 16 bits.
  static constexpr bool kCPairs = kOutBytes == 2 && sizeof(typename Config::C::Bits) == 2;
  using CBits = u32[kCPairs ? 2 : 4];
  static __device__ __forceinline__ float c_value(const CBits& bits, int i) {
    const u32 found = kCPairs ? bits[i / 2] >> i % 2 * 16 : bits[i];
    return Config::C::to_float((typename Config::C::Bits)found);
  }

  // Loads C for kTogether groups of eight tokens, from `token` of the step on, in the order of the accumulators. All
  // loads come before the first result, because no load can pass the store of a result that replaces a C.
  __device__ __forceinline__ void load_c(CBits (&c)[kTogether], u32 buffer, i64 row0, i64 token0, int token,
                                         const WorkTile& work) const {
    if (Config::kCStaged && loads_c(p)) load_staged_c(c, buffer, token);
    else load_c_elements(c, row0, token0 + token, work);
  }
  __device__ __forceinline__ void load_staged_c(CBits (&c)[kTogether], u32 buffer, int token) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kTogether; ++j, token += 8) {
      if constexpr (kCPairs && Config::kYColumnMajor) {
        load_matrix_x2(c[j], buffer + staged_at(token, row + lane % 16));
      } else if constexpr (kCPairs) {
        load_matrix_transposed_x2(c[j], buffer + staged_at(token + lane % 8, row + lane / 8 % 2 * 8));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          c[j][i] =
              load_shared_as<typename Config::C::Bits>(buffer + staged_at(token + 2 * t + i % 2, row + g + i / 2 * 8));
      }
    }
  }
  __device__ __forceinline__ void load_c_elements(CBits (&c)[kTogether], i64 row0, i64 token,
                                                  const WorkTile& work) const {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kTogether; ++j, token += 8)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 bits = c_bits_of(p, work, token + 2 * t + i % 2, row0 + row + i / 2 * 8);
        if constexpr (kCPairs) c[j][i / 2] = i % 2 ? c[j][i / 2] | bits << 16 : bits;
        else c[j][i] = bits;
      }
  }

  // One thread of the producer warpgroup loads C, step by step in the order in which the consumers store. While a work
  // tile is multiplied it prefetches all of the tile's C to L2, because the buffers hold a part of it only.
  static __device__ __forceinline__ void produce_c(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 m_rank,
                                                   u32 slice) {
    PipelineState<Config::kStagingBuffers> at[Config::kWarpgroups];
    for (TileScheduler scheduler(p, slice); scheduler.more(p); scheduler.next(p)) {
      if (scheduler.stores_partials()) continue;
      const WorkTile work(p, scheduler.index, m_rank);
      for_each_box(p, work, [&](int, u32 output, u32 token, int) {
        if constexpr (Config::kBatched) tma_prefetch(&p.c_map, output, token, work.coordinate<&BatchParams::c>(p));
        else tma_prefetch(&p.c_map, output, token);
      });
      for_each_box(p, work, [&](int w, u32 output, u32 token, int box) {
        const u32 full = barriers.c_full(w, at[w].stage);
        const u32 to = base + Config::kStagingAt + w * Config::kStagingBytes + at[w].stage * Config::kStepBytes;
        if (box == 0) {
          barrier_wait(barriers.c_empty(w, at[w].stage), at[w].parity ^ 1);
          barrier_arrive_expect_tx(full, Config::kMTileOutputs * Config::kTokenBytes);
        }
        const u32 box_to = to + box * Config::kStepTokens * kBoxBytes;
        if constexpr (Config::kBatched)
          tma_load(box_to, &p.c_map, output, token, work.coordinate<&BatchParams::c>(p), full);
        else tma_load(box_to, &p.c_map, output, token, full);
        if (box == kBoxes - 1) at[w].next();
      });
    }
  }
  // Calls visit(warpgroup, first coordinate, second coordinate, number in its step) for each box of a work tile.
  template <class Visit>
  static __device__ __forceinline__ void for_each_box(const WgmmaSpParams& p, WorkTile work, Visit visit) {
#pragma unroll 1
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
#pragma unroll 1
      for (u32 token = (u32)work.token; token < (u32)work.token + Config::kTileN && token < p.n;
           token += Config::kStepTokens)
#pragma unroll
        for (int w = 0; w < Config::kWarpgroups; ++w) {
          const i64 output = (work.row_tile + w * Config::kMTilesPerWarpgroup + r) * Config::kMTileOutputs;
          if (output >= p.m) continue;
          if constexpr (Config::kYColumnMajor) {
            visit(w, token, (u32)output, 0);
          } else {
#pragma unroll
            for (int box = 0; box < kBoxes; ++box) visit(w, (u32)output + box * kBoxOutputs, token, box);
          }
        }
  }

  // Stages gated results: a thread has one output of two tokens.
  __device__ __forceinline__ void stage_gated(u32 buffer, int token, float first, float second) const {
    const u32 to = buffer + gated_at(threadIdx.x, token);
    if constexpr (kOutBytes == 2 && Config::kYColumnMajor) {
      stmatrix(to, Result::pair(first, second));
    } else if constexpr (kOutBytes == 2) {
      stmatrix_transposed(to, Result::pair(first, second));
    } else if constexpr (Config::kYColumnMajor) {
      store_shared_x2(to, rounded<Result>(first), rounded<Result>(second));
    } else {
      store_shared(to, rounded<Result>(first));
      store_shared(buffer + gated_at(threadIdx.x, token, 1), rounded<Result>(second));
    }
  }

  // Recomputes results of which a sum is NaN. Each thread replaces its own, once the whole tile has been stored to Y.
  __device__ __forceinline__ void recompute_nans(const AccumulatorTile& sums, i64 row0, const WorkTile& work) const {
    static_assert(Config::kAccumulators <= 128, "one bit per accumulator");
    u64 nans[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) {
      const int result = Config::kGated ? i & ~2 : i;  // the first of the two sums of a gated result
      nans[i / 64] |= (u64)(sums[i] != sums[i]) << result % 64;
    }
    if (!named_barrier_or(barrier, 128, (nans[0] | nans[1]) != 0)) return;
    if (p.y_aligned && issues_stores()) tma_store_wait();
    named_barrier_sync(barrier, 128);
#pragma unroll 1
    while (nans[0] | nans[1]) {
      const int i = nans[0] ? __ffsll(nans[0]) - 1 : 64 + __ffsll(nans[1]) - 1, lane = threadIdx.x % 32;
      if (nans[0]) nans[0] &= nans[0] - 1;
      else nans[1] &= nans[1] - 1;
      const i64 token = work.token + i / 4 * 8 + lane % 4 * 2 + i % 2,
                row = row0 + threadIdx.x % 128 / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
      if (token >= p.n || row >= p.m) continue;
      ((Bits*)p.y)[y_offset(p, token, output_of_row<Config>(row))] =
          rounded<Result>(finished_again(p, token, row, c_of(p, work, token, row)));
    }
  }

  // Stores a buffer by TMA, one box per warp. Elements outside of Y are not written. Before the warpgroup syncs, the
  // issuing threads wait until the next step's buffer has been read.
  __device__ __forceinline__ void store_box(u32 buffer, i64 output0, i64 token, const WorkTile& work) const {
    async_proxy_fence();
    if (!Config::kCStaged && issues_stores()) tma_store_wait_read<Config::kStagingBuffers - 2>();
    named_barrier_sync(barrier, 128);
    if (!issues_stores()) return;
    const int box = Config::kYColumnMajor ? 0 : threadIdx.x % 128 / 32;
    const u32 output = (u32)output0 + box * kBoxOutputs, from = buffer + box * Config::kStepTokens * kBoxBytes;
    const u32 column = Config::kYColumnMajor ? (u32)token : output, row = Config::kYColumnMajor ? output : (u32)token;
    if constexpr (Config::kBatched) tma_store(&p.y_map, column, row, work.coordinate<&BatchParams::y>(p), from);
    else tma_store(&p.y_map, column, row, from);
    tma_store_commit();
    if constexpr (Config::kCStaged) {
      tma_store_wait_read<1>();
      if (this->stored < Config::kStagingBuffers) barrier_arrive(this->barriers.c_empty(barrier - 1, this->stored));
    }
  }
  // Whether TMA loads C (produce_c).
  static __device__ __forceinline__ bool loads_c(const WgmmaSpParams& p) { return p.y_aligned && p.c_aligned; }
  static __device__ __forceinline__ bool issues_stores() {
    return threadIdx.x % 32 == 0 && threadIdx.x % 128 / 32 < kBoxes;
  }

  // Stores the tokens of a step that belong to the group. Rows of Y begin at multiples of 16 bytes.
  __device__ __forceinline__ void store_chunks(u32 buffer, i64 output0, i64 token0, const WorkTile& work) const {
    constexpr int kOutputs = 16 / kOutBytes, kChunks = Config::kMTileOutputs / kOutputs;
    if (issues_stores()) tma_store_wait_read<0>();  // the next step fills the other buffer
    named_barrier_sync(barrier, 128);
    for (int i = threadIdx.x % 128; i < Config::kStepTokens * kChunks; i += 128) {
      const int t = i / kChunks, o = i % kChunks * kOutputs;
      const i64 token = token0 + t, output = output0 + o;
      if (token >= work.token_end(p) || output >= outputs_per_token(p)) continue;
      float v[4];
      load_shared_x4(v, buffer + staged_at(t, o));
      store_global((Bits*)p.y + y_offset(p, token, output), __float_as_uint(v[0]), __float_as_uint(v[1]),
                   __float_as_uint(v[2]), __float_as_uint(v[3]));
    }
  }

  __device__ __forceinline__ void store_elements(u32 buffer, i64 output0, i64 token0, const WorkTile& work) const {
    named_barrier_sync(barrier, 128);
    Bits* y = work.of_batch<&BatchParams::y>(p, (Bits*)p.y);
    for (int i = threadIdx.x % 128; i < Config::kStepTokens * Config::kMTileOutputs; i += 128) {
      const int t = Config::kYColumnMajor ? i % Config::kStepTokens : i / Config::kMTileOutputs,
                o = Config::kYColumnMajor ? i / Config::kStepTokens : i % Config::kMTileOutputs;
      const i64 token = token0 + t, output = output0 + o;
      if (token < work.token_end(p) && output < outputs_per_token(p))
        y[y_offset(p, token, output)] = load_shared_as<Bits>(buffer + staged_at(t, o));
    }
  }
};
