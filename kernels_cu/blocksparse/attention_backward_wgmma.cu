// dQ, dK and dV of O = softmax(scale * Q K^T) V over kept blocks, from dO and the results of the forward pass.
//
// The first launch, `attention_backward_rows`, computes for every row of Q the base of its exponents, from the
// logarithm of its sum, and delta = sum(dO * O). Then `attention_backward_wgmma` runs two or three times, compiled for
// its gradients. One launch for dK and dV computes S once, and its sums fit in registers for heads up to 128.
//
//   kGradients  a work tile               stationary  streamed, of its kept blocks           result
//   KV          a block column, of K's    K, V        Q, dO, of each head of Q that shares K  dK, dV
//   K, V        a block column, of K's    K, V; K     Q, dO, of each head of Q that shares K  dK; dV
//   Q           a block row, of Q's       Q, dO       K, V; with kStored K, dS                dQ
//
// Let first and second be the members of either pair. A warpgroup has 64 rows of the stationary operands, and a tile
// has kTile rows of the streamed ones. It computes in registers (for K and V everything is transposed):
//
//   S = first first^T    P = exp(scale * S - base)    G = second second^T    dS = P * (G - delta)
//   dQ, dK: sums += dS first    dV: sums += P second
//
// P and dS are rounded to the element; dS is computed from the rounded P. With kStored the launch for dK stores dS, as
// fragments of A, and the launch for dQ loads it instead of computing it again.
//
// Dropout gives P of dropped cells the sign bit. Dropped cells add nothing to dV, where keep_scale multiplies the
// result, and their G is 0. Other G are multiplied by keep_scale.
//
// A pipeline group is a producer thread and the consumer warpgroups that it feeds: two that share the tiles of a block
// of 128, or one with a block of 64 of its own. A stage holds a tile of the first and of the second streamed operand.
// Two pipeline groups of large heads exceed shared memory: then there is one, and a warpgroup has no work.
//
//   role      warps                               work
//   producer  last warpgroup, a thread of warp c  pipeline group c: the stationary operands of each work tile; stages;
//                                                 looks up the next work tile
//   consumer  the first two warpgroups            the products above, and what is between them
//
//   tensor cores  | S | G | P second | dS first | next S | next G | next P second |
//   registers         | P |    | dS  |                   | next P |     | next dS  |
//
//   barriers  full, empty: of a stage. work_full: the stationary operands and the description of the work tile have
//             arrived. work_empty: its warpgroups no longer need them. Named barriers 1 and 2: a warpgroup's threads.
//   registers sums 128, S 32, G 32, bases 16, P 16, dS 16 for each thread, of 240; a producer thread has 24.
//
// One warpgroup computes each sum in the order of its tables, without atomics, so the bits of a result depend on its
// block row or block column alone. Work tiles are scheduled as in attention_wgmma.cu.
#include "blocksparse/attention_backward_wgmma/producer.cuh"
#include "blocksparse/attention_backward_wgmma/rows.cuh"

// Spreads the sign of either half over its 16 bits: bit 3 of a selector's digit repeats the sign of its byte.
__device__ __forceinline__ u32 spread_signs(u32 pair) {
  u32 mask;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(pair));
  return mask;
}

// Transposes an 8 x 8 matrix of 16-bit elements, of which a lane has two neighbours of a row. A whole warp calls it.
__device__ __forceinline__ u32 transpose_8x8(u32 pair) {
  u32 found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(pair));
  return found;
}

using Ring = PipelineState<Config::kPipelineStages>;
using Products = WarpgroupProducts<Config>;

// A consumer warpgroup: 64 rows of a work tile at a time. A thread has rows g and g + 8 of its warp's 16: index 0 is
// row g, index 1 is row g + 8.
struct ConsumerMainloop {
  const AttentionBackwardWgmmaParams& p;
  const PipelineGroup pipeline;
  const u32 group;  // number of the warpgroup in its pipeline group
  const Dropout dropout;
  Ring at;
  u32 sequence = 0;           // so far
  float bases[2], deltas[2];  // bases and deltas of the thread's rows, if rows of Q are stationary

  // Returns the thread's first row.
  __device__ __forceinline__ int row(const WorkTile& work) const {
    return first_row(work.line * Config::kBlock + group * 64);
  }

  // Waits for a stage and zeroes rows that are not valid. Returns the stage's first row if that matters.
  __device__ __forceinline__ int take(const WorkTile& work, const Ring& one) const {
    barrier_wait(pipeline.full(one.stage), one.parity);
    if constexpr (!Config::kCausal && !Config::kLengths && !Config::kDropout) return 0;
    const int start = (int)uniform(pipeline.start(one.stage));
    if constexpr (Config::kLengths) {
      const int end = (Config::kStationaryKv ? work.rows : work.keys) - start;
      if (end < Config::kTile)  // two tiles, or with dS one, in boxes that lie behind one another
        clear_rows<Config::kTile, (Config::kLoads ? 1 : 2) * Config::kBoxes>(pipeline.tile(one.stage, 0), max(end, 0),
                                                                             1 + threadIdx.x / 128);
    }
    return start;
  }

  // Issues the product of a stationary operand's rows and the tile of the streamed one.
  __device__ __forceinline__ void issue_cells(float (&cells)[Config::kCells], u32 which, u32 stage) const {
    const u64 own = Products::Stationary::descriptor(pipeline.stationary(group, which));
    const u64 tile = Products::Tile::descriptor(pipeline.tile(uniform_word(stage), which));
    Products::issue_cells<1>(cells, Products::rows(own), tile);
  }
  __device__ __forceinline__ void issue_sums(float (&sums)[Config::kAccumulators],
                                             const u32 (&factors)[Config::kCells / 2], u32 which, u32 stage) const {
    Products::issue_sums(sums, factors, Products::Summed::descriptor(pipeline.tile(uniform_word(stage), which)));
  }

  __device__ __forceinline__ void load_rows(const WorkTile& work) {
    const i64 line = (i64)work.matrix * p.queries + row(work);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      bases[half] = p.bases[line + 8 * half], deltas[half] = p.deltas[line + 8 * half];
  }
  // Ties words to this point of the program.
  static __device__ __forceinline__ void settle(u32 (&words)[Config::kCells / 2]) {
#pragma unroll
    for (int i = 0; i < Config::kCells / 2; ++i) asm volatile("" : "+r"(words[i])::"memory");
  }
  // Loads the bases or deltas of the thread's columns, if rows of Q are streamed.
  __device__ __forceinline__ void load_columns(float (&found)[Config::kTile / 4], u32 stage, u32 which) const {
    if constexpr (Config::kStationaryKv) {
#pragma unroll
      for (int j = 0; j < Config::kTile / 8; ++j) {
        u32 words[2];
        load_shared_words(words, pipeline.line(stage, which) + (8 * j + first_column()) * 4);
        found[2 * j] = __uint_as_float(words[0]), found[2 * j + 1] = __uint_as_float(words[1]);
      }
    }
  }

  // Replaces scores by exponentials.
  __device__ __forceinline__ void exponentiate(float (&scores)[Config::kCells],
                                               const float (&of_columns)[Config::kTile / 4]) const {
#pragma unroll
    for (int i = 0; i < Config::kCells; ++i) {
      const float base = Config::kStationaryKv ? of_columns[i / 4 * 2 + i % 2] : bases[i / 2 % 2];
      scores[i] = power_of_2(__fmaf_rn(scores[i], p.exponent_scale, -base));
    }
  }
  // Returns whether cells of the tile are hidden by the mask or the lengths.
  __device__ __forceinline__ bool hides(const WorkTile& work, int start) const {
    const int first = (int)(work.line * Config::kBlock + group * 64);
    if constexpr (Config::kStationaryKv) return Config::kCausal && start < first + 63;
    return (Config::kLengths && start + Config::kTile > work.keys) ||
           (Config::kCausal && start + Config::kTile > first + 1);
  }
  // Zeroes the hidden cells.
  __device__ __forceinline__ void hide(float (&scores)[Config::kCells], const WorkTile& work, int start) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row(work) + 8 * half;
      int begin = 0, end = Config::kTile;  // of the columns that are not hidden
      if constexpr (Config::kStationaryKv) begin = own - start - first_column();
      else {
        end = work.keys;
        if constexpr (Config::kCausal) end = min(end, own + 1);
        end -= start + first_column();
      }
#pragma unroll
      for (int j = 0; j < Config::kTile / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (8 * j + i < begin || 8 * j + i >= end) scores[4 * j + 2 * half + i] = 0.0f;
    }
  }
  // Gives the exponentials of dropped cells the sign bit.
  __device__ __forceinline__ void drop(float (&scores)[Config::kCells], const WorkTile& work, int start) const {
    const auto negate = [](float& cell) { cell = -cell; };
    if constexpr (Config::kStationaryKv)
      dropout.of_keys(scores, uniform(pipeline.matrix(at.stage)), row(work), start, p.drop_below, negate);
    else dropout.of_queries(scores, work.matrix, row(work), start, p.drop_below, negate);
  }
  // Zeroes the factors that have the sign bit.
  static __device__ __forceinline__ void clear_dropped(u32 (&kept)[Config::kCells / 2],
                                                       const u32 (&factors)[Config::kCells / 2]) {
#pragma unroll
    for (int i = 0; i < Config::kCells / 2; ++i) kept[i] = factors[i] & ~spread_signs(factors[i]);
  }
  // Computes dS from P and G, in place of G.
  __device__ __forceinline__ void differentiate(float (&cells)[Config::kCells],
                                                const u32 (&factors)[Config::kCells / 2],
                                                const float (&of_columns)[Config::kTile / 4]) const {
#pragma unroll
    for (int i = 0; i < Config::kCells; ++i) {
      const float factor = Config::In::to_float((u16)(factors[i / 2] >> (i % 2 * 16)));
      const float delta = Config::kStationaryKv ? of_columns[i / 4 * 2 + i % 2] : deltas[i / 2 % 2];
      if constexpr (Config::kDropout) {
        const float given = __float_as_int(factor) < 0 ? 0.0f : cells[i] * p.keep_scale;
        cells[i] = fabsf(factor) * (given - delta);
      } else {
        cells[i] = factor * (cells[i] - delta);
      }
    }
  }

  // Address in a block of dS, or in a tile's part of it, of the 16 bytes that a thread has of 16 keys and 16 queries.
  static __device__ __forceinline__ u32 fragment(u32 keys, u32 queries) {
    return ((keys * (Config::kBlock / 16) + queries) * 32 + threadIdx.x % 32) * 16;
  }
  __device__ __forceinline__ u32 rows_of_16() const { return group * 4 + threadIdx.x % 128 / 32; }  // in the block

  // Stores dS of the tile at the current stage. Rows of keys that are not valid get zeros.
  __device__ __forceinline__ void store(const u32 (&changes)[Config::kCells / 2], const WorkTile& work) const {
    const u32 block = load_shared_as<u32>(pipeline.block(at.stage)),
              start = load_shared_as<u32>(pipeline.start(at.stage));
    u8* const to =
        (u8*)p.score_gradients + (i64)block * Config::kBlockBytes + fragment(rows_of_16(), start % Config::kBlock / 16);
    bool counts[2] = {true, true};
    if constexpr (Config::kLengths) {
      const int left = load_shared_as<int>(pipeline.work(sequence) + WorkTile::kKeysAt) - row(work);
      counts[0] = left > 0, counts[1] = left > 8;
    }
#pragma unroll
    for (int k = 0; k < Config::kTile / 16; ++k) {
      const u32* const from = changes + 4 * k;
      __stcs((uint4*)(to + 512 * k), make_uint4(counts[0] ? from[0] : 0, counts[1] ? from[1] : 0,
                                                counts[0] ? from[2] : 0, counts[1] ? from[3] : 0));
    }
  }
  // Loads the dS that `store` stored, transposed.
  __device__ __forceinline__ void load(u32 (&changes)[Config::kCells / 2], u32 stage) const {
#pragma unroll
    for (int k = 0; k < Config::kTile / 16; ++k) {
      u32 words[4];
      load_shared_words(words, pipeline.tile(stage, 1) + fragment(k, rows_of_16()));
      changes[4 * k] = transpose_8x8(words[0]), changes[4 * k + 1] = transpose_8x8(words[2]);
      changes[4 * k + 2] = transpose_8x8(words[1]), changes[4 * k + 3] = transpose_8x8(words[3]);
    }
  }
  // Sums the products of the stored dS and the streamed rows of K.
  __device__ __forceinline__ void multiply_loaded(float (&sums)[Config::kAccumulators], const WorkTile& work) {
    u32 changes[Config::kCells / 2], next[Config::kCells / 2];
    take(work, at);
    load(changes, at.stage);
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) sums[i] = 0.0f;
    wgmma_fence_operand(sums);
    release(pipeline.work_empty());
    for (int left = work.tiles; left > 0; --left) {
      issue_sums(sums, changes, 0, at.stage);
      const u32 empty = pipeline.empty(at.stage);
      at.next();
      if (left > 1) {
        take(work, at);
        load(next, at.stage);
      }
      wgmma_wait<0>();
      wgmma_fence_operand(sums);
      settle(changes);
      release(empty);
#pragma unroll
      for (int i = 0; i < Config::kCells / 2; ++i) changes[i] = next[i];
    }
  }

  // A thread's registers for a tile.
  struct Tile {
    float scores[Config::kCells], cells[Config::kCells];  // S, then exponentials; G, then dS
    float of_columns[Config::kTile / 4];                  // bases, then deltas
    u32 factors[Config::kCells / 2];                      // P, rounded
  };

  // Issues what P adds to dV.
  __device__ __forceinline__ void issue_values(float (&sums)[Config::kResults][Config::kAccumulators],
                                               const u32 (&factors)[Config::kCells / 2]) const {
    if constexpr (Config::kDropout) {
      u32 kept[Config::kCells / 2];
      clear_dropped(kept, factors);
      issue_sums(sums[Config::kResults - 1], kept, 1, at.stage);
    } else {
      issue_sums(sums[Config::kResults - 1], factors, 1, at.stage);
    }
  }
  // Computes P of a tile whose S is in flight, issues what it adds to dV, and computes G. Waits for the next tile if
  // there is one, and sets `start` to its first row.
  __device__ __forceinline__ void exponentials(float (&sums)[Config::kResults][Config::kAccumulators], Tile& tile,
                                               int& start, bool more, const WorkTile& work) {
    if constexpr (Config::kOfScores) issue_cells(tile.cells, 1, at.stage);
    if constexpr (!Config::kDropout) load_columns(tile.of_columns, at.stage, 0);
    wgmma_wait<Config::kOfScores>();
    wgmma_fence_operand(tile.scores);
    if constexpr (Config::kDropout) load_columns(tile.of_columns, at.stage, 0);
    exponentiate(tile.scores, tile.of_columns);
    if (hides(work, start)) hide(tile.scores, work, start);
    if constexpr (Config::kDropout) drop(tile.scores, work, start);
    Products::round(tile.factors, tile.scores);
    settle(tile.factors);
    if (more) {  // the branch keeps what is above it in place
      Ring next = at;
      next.next();
      start = take(work, next);
    }
    if constexpr (Config::kEarlyValues) issue_values(sums, tile.factors);
    if constexpr (Config::kOfScores) {
      wgmma_wait<Config::kEarlyValues>();
      wgmma_fence_operand(tile.cells);
    }
  }
  // Computes dS of a tile whose P and G are in registers, issues what it adds to dQ or dK, and with kMore issues S of
  // the next tile.
  template <bool kMore> __device__ __forceinline__ void changes(float (&sums)[Config::kResults][Config::kAccumulators],
                                                                Tile& tile, const WorkTile& work) {
    if constexpr (Config::kOfScores) {
      u32 changes[Config::kCells / 2];
      load_columns(tile.of_columns, at.stage, 1);
      differentiate(tile.cells, tile.factors, tile.of_columns);
      Products::round(changes, tile.cells);
      if constexpr (Config::kOfValues && !Config::kEarlyValues) issue_values(sums, tile.factors);
      if constexpr (Config::kStores) store(changes, work);
      issue_sums(sums[0], changes, 0, at.stage);
    }
    const u32 empty = pipeline.empty(at.stage);
    at.next();
    if constexpr (kMore) {
      issue_cells(tile.scores, 0, at.stage);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    wgmma_fence_operand(sums[0]);
    if constexpr (Config::kResults == 2) wgmma_fence_operand(sums[1]);
    release(empty);
  }

  __device__ __forceinline__ void multiply(float (&sums)[Config::kResults][Config::kAccumulators],
                                           const WorkTile& work) {
    Tile tile;
    int start = take(work, at);
    issue_cells(tile.scores, 0, at.stage);
#pragma unroll
    for (int which = 0; which < Config::kResults; ++which) {
#pragma unroll
      for (int i = 0; i < Config::kAccumulators; ++i) sums[which][i] = 0.0f;
      wgmma_fence_operand(sums[which]);
    }
    int left = work.tiles;
    while (true) {
      exponentials(sums, tile, start, left > 1, work);
      if (--left == 0) break;
      changes<true>(sums, tile, work);
    }
    release(pipeline.work_empty());
    changes<false>(sums, tile, work);
  }

  __device__ __forceinline__ void write(void* results, const float (&sums)[Config::kAccumulators], float factor,
                                        const WorkTile& work) const {
    const int valid_cells = Config::kStationaryKv ? work.keys : work.rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row(work) + 8 * half;
      const bool counts = own < valid_cells && work.tiles > 0;
      const i64 line = (i64)work.matrix * (Config::kStationaryKv ? p.keys : p.queries) + own;
      write_row<Config>(results, line, half, sums, factor, counts);
    }
  }

  __device__ __forceinline__ void work() {
    float sums[Config::kResults][Config::kAccumulators];
    for (;; ++sequence) {
      const u32 place = pipeline.work(sequence);
      barrier_wait(pipeline.work_full(), sequence & 1);
      WorkTile work;
      work.load(place);
      if (work.tiles < 0) break;
      if (work.tiles > 0) {
        if constexpr (Config::kLoads) {
          multiply_loaded(sums[0], work);
        } else {
          if constexpr (!Config::kStationaryKv) load_rows(work);
          multiply(sums, work);
        }
        work.load(place);  // reloaded, so that no register had to keep it
      } else {
        release(pipeline.work_empty());
      }
      if constexpr (Config::kOfScores) write(p.gradients[0], sums[0], p.scale, work);
      if constexpr (Config::kOfValues)
        write(p.gradients[1], sums[Config::kResults - 1], Config::kDropout ? p.keep_scale : 1.0f, work);
    }
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    attention_backward_wgmma(const __grid_constant__ AttentionBackwardWgmmaParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared), warpgroup = uniform_word(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    for (u32 index = 0; index < Config::kPipelineGroups; ++index) {
      PipelineGroup(base + index * Config::kPipelineBytes).init();
    }
    barrier_init_fence();
  }
  __syncthreads();
  launch_dependents_and_wait();

  if (warpgroup == 2) {
    warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const u32 warp = threadIdx.x % 128 / 32, index = Config::kPipelineGroups == 1 ? 0 : warp;
    if (warp < Config::kPipelineGroups && threadIdx.x % 32 == 0)
      Producer{p, {base + index * Config::kPipelineBytes}}.produce(blockIdx.x * Config::kPipelineGroups + index);
  } else if (Config::kWarpgroups == 2 || warpgroup == 0) {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    Dropout dropout;
    if constexpr (Config::kDropout) dropout = Dropout(p.seed_offset);
    if constexpr (Config::kPipelineGroups == 1) ConsumerMainloop{p, {base}, warpgroup, dropout}.work();
    else ConsumerMainloop{p, {base + warpgroup * Config::kPipelineBytes}, 0, dropout}.work();
  }
}
