// O = softmax(scale * Q K^T) V over kept blocks, and the logarithm of each row's sum of exponentials.
//
// A work tile is a block row of one head of one batch. A tile of K or V is S24_TILE keys: a kept block, two of 64, or
// for large heads half of one of 128, in increasing columns. A pipeline group is a producer warp and the consumer
// warpgroups that it feeds, each of which has 64 rows: two that share the tiles of a block row of 128, or one with a
// block row of 64 of its own.
//
//   role      warps                       work
//   producer  last warpgroup, warp c      pipeline group c: Q of each work tile; K and V, one stage for each tile, also
//                                         of the next work tile
//   consumer  the first two warpgroups    S = Q K^T, softmax in registers, O += P V with P from registers
//
//   barriers  full, empty: of a stage. work_full: Q and the description of the work tile have arrived. work_empty: its
//             warpgroups no longer need them. Named barriers 1 and 2: ping-pong of the warpgroups' products; 3
//             and 4: the threads of one warpgroup.
//   registers S S24_TILE / 2, P S24_TILE / 4, O head_size / 2, and Q of some heads head_size / 4 for each thread;
//             producers release registers to the consumers.
//
//   tensor cores  | S0 |        | S1 | P0 V0 |        | S2 | P1 V1 |
//   softmax            | 0      |     | 1             |     | 2             overlaps P V of the previous tile
//
// With dropout there are too few registers to overlap: softmax begins once P V of the previous tile is done.
//
// Stages are filled in the order in which they are read: K0 K1 V0 K2 V1 ... One CTA sums each row over its kept tiles
// in increasing columns, so the bits of a result depend on its block row alone.
//
// The kernel is persistent. Work tiles: matrices in raster groups whose K and V stay in L2, and within a raster group
// every head's longest block row, then the next. A pipeline group takes the next work tile from a counter in memory,
// which does not influence any result.
//
// With S24_DROPOUT, P has zeros where Dropout drops a cell, after it has been added to the sum, and the result is
// multiplied by keep_scale.
#include "blocksparse/attention_wgmma/producer.cuh"

using Products = WarpgroupProducts<Config>;

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// A consumer warpgroup: 64 rows of a work tile at a time. A thread has rows g and g + 8 of its warp's 16: index 0 is
// row g, index 1 is row g + 8.
struct ConsumerMainloop {
  const AttentionWgmmaParams& p;
  const PipelineGroup pipeline;
  const u32 group, warpgroup;
  const Dropout dropout;
  Ring at;
  u32 work_parity = 0;
  float most[2], sum[2];  // largest score so far, before the scale; this thread's part of the sum of exponentials
  u32 weights[Config::kCells / 2];  // P, rounded
  u32 queries[Config::kQuerySteps + 1][4];

  // Returns the thread's first row.
  __device__ __forceinline__ int row(const WorkTile& work) const {
    return first_row(work.row * Config::kBlock + group * 64);
  }
  // The two warpgroups alternate on the tensor cores: each waits until the other passes.
  __device__ __forceinline__ void ping_pong_wait() const {
    if constexpr (Config::kPingPong) named_barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void ping_pong_pass() const {
    if constexpr (Config::kPingPong) named_barrier_arrive(2 - warpgroup, 256);
  }

  __device__ __forceinline__ void issue_scores(float (&scores)[Config::kCells]) const {
    const u64 tile = Products::Tile::descriptor(pipeline.tile(uniform_word(at.stage)));
    if constexpr (Config::kQuerySteps) {
      const auto fragment = [this](int k) -> const u32(&)[4] { return queries[k]; };
      Products::issue_cells<Config::kSign>(scores, fragment, tile);
    } else {
      const u64 own = Products::Stationary::descriptor(pipeline.query(group));
      Products::issue_cells<Config::kSign>(scores, Products::rows(own), tile);
    }
  }
  // Loads the warpgroup's rows of Q as fragments of A.
  __device__ __forceinline__ void load_queries() {
    if constexpr (Config::kQuerySteps) {
      const u32 lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
      for (int k = 0; k < Config::kQuerySteps; ++k)
        ldmatrix_x4(queries[k], pipeline.query(group) + k / 4 * Config::kStationaryBoxBytes + row * 128 +
                                    ((k % 4 * 2 + lane / 16) ^ row % 8) * 16);
    }
  }
  __device__ __forceinline__ void issue_values(float (&out)[Config::kAccumulators], u32 stage) const {
    Products::issue_sums(out, weights, Products::Summed::descriptor(pipeline.tile(uniform_word(stage))));
  }

  // Waits for O of the tile before, and for the next stage: the branch of this wait keeps in place what is above it.
  __device__ __forceinline__ void end_values(float (&out)[Config::kAccumulators]) {
    const u32 values = at.stage;
    at.next();
    barrier_wait(pipeline.full(at.stage), at.parity);
    wgmma_wait<0>();
    wgmma_fence_operand(out);
    release(pipeline.empty(values));
  }

  // Hides scores of the last block's tiles; `behind` tiles of the block follow this one. The last piece may have keys
  // that are not valid, and stale keys may follow the piece.
  __device__ __forceinline__ void hide(float (&scores)[Config::kCells], const WorkTile& work, int behind) const {
    const int first = (work.count - 1) % Config::kPiecesPerStep * Config::kPiece;
    const int key = (work.last - (Config::kPiecesPerBlock > 1 ? behind : 0)) * Config::kPiece;
    const int query = row(work);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int end = min(Config::kPiece, work.keys - key);
      if constexpr (Config::kCausal) end = min(end, query + 8 * half + 1 - key);
      end += first - first_column();
#pragma unroll
      for (int j = 0; j < Config::kTile / 8; ++j) {
        if (8 * j >= end) scores[4 * j + 2 * half] = -infinity();
        if (8 * j + 1 >= end) scores[4 * j + 2 * half + 1] = -infinity();
      }
    }
  }
  __device__ __forceinline__ static bool hides(const WorkTile& work) {
    const bool part = Config::kPiecesPerStep > 1 && work.count % Config::kPiecesPerStep;
    return part || (Config::kCausal && work.last / Config::kPiecesPerBlock == (int)work.row) ||
           (Config::kLengths && work.keys < (work.last + 1) * Config::kPiece);
  }

  // Returns whether a tile may belong to the last block.
  __device__ __forceinline__ static bool ends(int tile, int tiles) {
    return Config::kPiecesPerBlock == 1 ? tile == tiles - 1 : tile >= tiles - Config::kPiecesPerBlock;
  }

  // Zeroes the exponentials of dropped cells.
  __device__ __forceinline__ void drop(float (&scores)[Config::kCells], const WorkTile& work,
                                       const u32 (&starts)[Config::kPiecesPerStep]) const {
    if (Config::kDropout && p.drop_below) {  // the branch keeps its words apart from what is above it
#pragma unroll
      for (int beside = 0; beside < Config::kPiecesPerStep; ++beside)
        dropout.of_queries(*(float (*)[Config::kPiece / 2])(scores + beside * Config::kPiece / 2), work.matrix,
                           row(work), starts[beside], p.drop_below, [](float& cell) { cell = 0.0f; });
    }
  }
  // Loads the first keys of a stage's pieces.
  __device__ __forceinline__ void load_starts(u32 (&starts)[Config::kPiecesPerStep], u32 stage) const {
    if constexpr (Config::kDropout) {
#pragma unroll
      for (int beside = 0; beside < Config::kPiecesPerStep; ++beside)
        starts[beside] = uniform(pipeline.starts(stage) + 4 * beside);
    }
  }

  // Replaces scores by exponentials, and returns in `factor` what the sums so far are multiplied by: 1 unless a score
  // exceeds the base so far by more than 8 powers of 2.
  template <bool kFirst> __device__ __forceinline__ void softmax(float (&scores)[Config::kCells], float (&factor)[2]) {
    // Two chains a row, so that the latency of one hides behind the others.
    float tops[2][2], totals[2][2] = {}, bases[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) tops[half][0] = tops[half][1] = kFirst ? -infinity() : most[half];
#pragma unroll
    for (int j = 0; j < Config::kTile / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        tops[half][j % 2] = fmaxf(tops[half][j % 2], fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = kFirst ? -infinity() : most[half];
      float top = quad_max(fmaxf(tops[half][0], tops[half][1]));
      if (!kFirst && (top - before) * p.scale <= 8.0f) top = before;
      most[half] = top;
      bases[half] = top == -infinity() ? 0.0f : top * p.scale;
      factor[half] = kFirst ? 0.0f : top == before ? 1.0f : power_of_2(__fmaf_rn(before, p.scale, -bases[half]));
    }
#pragma unroll
    for (int j = 0; j < Config::kTile / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[4 * j + 2 * half + i];
          score = power_of_2(__fmaf_rn(score, p.scale, -bases[half]));
          totals[half][i] += score;
        }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = totals[half][0] + totals[half][1];
      sum[half] = kFirst ? total : __fmaf_rn(sum[half], factor[half], total);
    }
  }

  // Zeroes the rows of V in the last tile that are not valid, because they may hold NaN.
  __device__ __forceinline__ void clear_values(const WorkTile& work) const {
    const int first = (work.count - 1) % Config::kPiecesPerStep * Config::kPiece;
    const int end = first + min(Config::kPiece, work.keys - work.last * Config::kPiece);
    if (end < Config::kTile) clear_rows<Config::kTile, Config::kBoxes>(pipeline.tile(at.stage), end, 3 + warpgroup);
  }

  __device__ __forceinline__ void multiply(float (&out)[Config::kAccumulators], const WorkTile& work) {
    float scores[Config::kCells], factor[2];
    u32 starts[Config::kPiecesPerStep];
    const int tiles = work.tiles();
    load_queries();
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) out[i] = 0.0f;
    barrier_wait(pipeline.full(at.stage), at.parity);
    load_starts(starts, at.stage);
    ping_pong_wait();
    issue_scores(scores);
    ping_pong_pass();
    wgmma_wait<0>();
    wgmma_fence_operand(scores);
    release(pipeline.empty(at.stage));
    // An arrival does not wait for loads in flight, but the product that is done now has used the fragments of Q.
    if constexpr (Config::kQuerySteps) release(pipeline.work_empty());
    at.next();
    if (ends(0, tiles) && hides(work)) hide(scores, work, tiles - 1);
    softmax<true>(scores, factor);
    drop(scores, work, starts);
    Products::round(weights, scores);
    barrier_wait(pipeline.full(at.stage), at.parity);
    for (int tile = 1; tile < tiles; ++tile) {
      const u32 keys = at.stage;
      load_starts(starts, at.stage);
      ping_pong_wait();
      issue_scores(scores);
      at.next();
      barrier_wait(pipeline.full(at.stage), at.parity);
      issue_values(out, at.stage);
      ping_pong_pass();
      wgmma_wait<1>();
      wgmma_fence_operand(scores);
      release(pipeline.empty(keys));
      if constexpr (Config::kDropout) end_values(out);  // its words need the registers of P
      if (ends(tile, tiles) && hides(work)) hide(scores, work, tiles - 1 - tile);
      softmax<false>(scores, factor);
      drop(scores, work, starts);
      if constexpr (!Config::kDropout) {
        wgmma_fence_operand(scores);
        end_values(out);
      }
      Products::round(weights, scores);
      if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < Config::kAccumulators; ++i) out[i] *= factor[i / 2 % 2];
      }
    }
    if constexpr (!Config::kQuerySteps) release(pipeline.work_empty());
    clear_values(work);
    issue_values(out, at.stage);
    wgmma_wait<0>();
    wgmma_fence_operand(out);
    release(pipeline.empty(at.stage));
    at.next();
  }

  __device__ __forceinline__ void write(const float (&out)[Config::kAccumulators], const WorkTile& work) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row(work) + 8 * half;
      const i64 line = (i64)work.matrix * p.queries + own;
      const bool counts = own < work.rows && work.count > 0;
      const float total = quad_sum(sum[half]), part = total == 0.0f ? 0.0f : 1.0f / total;
      if (threadIdx.x % 4 == 0)
        p.lse[line] =
            counts && total != 0.0f ? __fmaf_rn(most[half] * p.scale, 0.6931471805599453f, logf(total)) : -infinity();

      write_row<Config>(p.o, line, half, out, Config::kDropout ? part * p.keep_scale : part, counts);
    }
  }

  __device__ __forceinline__ void work() {
    if (Config::kPingPong && warpgroup == 1) ping_pong_pass();
    float out[Config::kAccumulators];
    while (true) {
      WorkTile work;
      barrier_wait(pipeline.work_full(), work_parity);
      work_parity ^= 1;
      work.load(pipeline.work());
      if (work.count < 0) break;
      if (work.count > 0) {
        multiply(out, work);
      } else {
        release(pipeline.work_empty());
        sum[0] = sum[1] = 0.0f;
      }
      write(out, work);
    }
    if (Config::kPingPong && warpgroup == 0) ping_pong_wait();  // matches the other warpgroup's last pass
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    attention_wgmma(const __grid_constant__ AttentionWgmmaParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared), warpgroup = uniform_word(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    for (u32 index = 0; index < Config::kPipelineGroups; ++index) PipelineGroup(base, index).init();
    barrier_init_fence();
  }
  __syncthreads();
  launch_dependents_and_wait();

  if (warpgroup == 2) {
    warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const u32 warp = threadIdx.x % 128 / 32;
    if (warp < Config::kPipelineGroups) Producer{p, {base, warp}, threadIdx.x % 32}.produce();
  } else {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    Dropout dropout;
    if constexpr (Config::kDropout) dropout = Dropout(p.seed_offset);
    ConsumerMainloop{
        p, {base, warpgroup / Config::kGroupWarpgroups}, warpgroup % Config::kGroupWarpgroups, warpgroup, dropout}
        .work();
  }
}
