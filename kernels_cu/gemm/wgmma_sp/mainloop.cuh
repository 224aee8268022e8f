// The role of gemm/wgmma_sp.cu that multiplies.
#pragma once
#include "gemm/wgmma_sp/stream_k_fixup.cuh"
#ifdef S24_F32_SPLIT
#include "gemm/wgmma_sp/blocked_sum.cuh"
#include "gemm/wgmma_sp/split_products.cuh"
#endif

constexpr int kPingPongBarrier = 8;

// One warpgroup's sums of one work.
struct ConsumerMainloop {
  const WgmmaSpParams& p;
  PipelineState<Config::kWeightStages> weight;
  PipelineState<Config::kXStages> source;
  u32 base, warpgroup, x_empty;  // the last: of the block of the cluster that this lane reports to
  Barriers barriers;
  u32 last_weight = 0, last_source = 0;

  __device__ __forceinline__ void release_weight(u32 stage, u32 zero = 0) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(barriers.weight_empty(stage) + zero);
  }
  __device__ __forceinline__ void release_x(u32 stage) const {
    if (threadIdx.x % 32 >= Config::kXMulticast) return;
    if constexpr (Config::kXMulticast == 1) barrier_arrive(x_empty + 8 * stage);
    else barrier_arrive_cluster(x_empty + 8 * stage);
  }

  static __device__ __forceinline__ u64 x_descriptor(u32 address) {
    if constexpr (Config::kXColumnMajor)
      return matrix_descriptor_of_lines<2 * Config::kTokenGroup, Config::kTokenGroupBytes>(address);
    else return matrix_descriptor(address);
  }

  static __device__ __forceinline__ void clear(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup]) {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
#pragma unroll
      for (int i = 0; i < Config::kAccumulators; ++i) sums[r][i] = 0;
      wgmma_fence_operand(sums[r]);
    }
  }
  static __device__ __forceinline__ void add(AccumulatorTile (&totals)[Config::kMTilesPerWarpgroup],
                                             const AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup]) {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
#pragma unroll
      for (int i = 0; i < Config::kAccumulators; ++i) totals[r][i] += sums[r][i];
  }

#ifdef S24_W_PRESPLIT
  // Tiles of K; every kTilesPerPromotion of them their sums leave the tensor cores.
  __device__ __forceinline__ void multiply_split(AccumulatorTile (&totals)[Config::kMTilesPerWarpgroup], u32 begin,
                                                 u32 end, const BlockedSum&) {
    static_assert(Config::kTilesPerPromotion % 2 == 0, "two tiles load_partials turns with registers for metadata");
    for (u32 tile = begin; tile < end;) {
      AccumulatorTile sums[Config::kMTilesPerWarpgroup];
      u32 first[Config::kMTilesPerWarpgroup][1], second[Config::kMTilesPerWarpgroup][1];
      issue<0>(sums, first);
      advance();
#pragma unroll 1
      while (++tile < end) {
        issue<1>(sums, second);
        release_previous<1>();
        advance();
        if (++tile == end || (tile - begin) % Config::kTilesPerPromotion == 0) break;
        issue<1>(sums, first);
        release_previous<1>();
        advance();
      }
      release_previous<0>();
#pragma unroll
      for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) wgmma_fence_operand(sums[r]);
      add(totals, sums);
    }
  }
  __device__ __forceinline__ void advance() { source.next(), source.next(), weight.next(); }
  // Once no more than kPending tiles are multiplied, the stages of the one before are free.
  template <int kPending> __device__ __forceinline__ void release_previous() const {
    wgmma_wait<kPending>();
    release_x(source.stage >= 2 ? source.stage - 2 : source.stage + Config::kXStages - 2);
    release_x(source.stage >= 1 ? source.stage - 1 : Config::kXStages - 1);
    release_weight(weight.stage >= 1 ? weight.stage - 1 : Config::kWeightStages - 1);
  }

  // A tile's products. The first box is of X's low part, the second of its high one; the small products come first.
  template <int kAdd> __device__ __forceinline__ void issue(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup],
                                                            u32 (&metadata)[Config::kMTilesPerWarpgroup][1]) {
    const u32 values = base + weight.stage * Config::kWeightStageBytes +
                       warpgroup * Config::kMTilesPerWarpgroup * Config::kWeightTileBytes;
    barrier_wait(barriers.weight_full(weight.stage), weight.parity);
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
      load_shared_words(metadata[r], values + r * Config::kWeightTileBytes + Tile::kValueBytes + threadIdx.x % 128 * 4);
    PipelineState<Config::kXStages> box = source;
    u64 boxes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i, box.next()) {
      barrier_wait(barriers.x_full(box.stage), box.parity);
      boxes[i] = matrix_descriptor(base + Config::kXAt + box.stage * Config::kXStageBytes);
    }
    const u64 high = matrix_descriptor(values);
    wgmma_fence();
    multiply_box<kAdd>(sums, high, boxes[0], metadata);
    multiply_box<1>(sums, high + 4, boxes[1], metadata);
    multiply_box<1>(sums, high, boxes[1], metadata);
    wgmma_commit();
  }
  // A part of the tile with one of X, in two steps. Descriptors count 16 bytes.
  template <int kAdd>
  __device__ __forceinline__ void multiply_box(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup], u64 a, u64 b,
                                               const u32 (&metadata)[Config::kMTilesPerWarpgroup][1]) const {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
      const u64 at = a + r * (Config::kWeightTileBytes >> 4);
      wgmma_sp<ElementKind::BF16, 0, kAdd, false>(sums[r], at, b, metadata[r][0]);
      wgmma_sp<ElementKind::BF16, 1, 1, false>(sums[r], at + 2, b + 4, metadata[r][0]);
    }
  }
#elif defined S24_F32_SPLIT
  using RowTerms = WeightTerms[Config::kMTilesPerWarpgroup];
  using RowFragments = WeightFragment[Config::kMTilesPerWarpgroup];

  // Tiles of K: while the tensor cores multiply one, the next is split.
  __device__ __forceinline__ void multiply_split(AccumulatorTile (&totals)[Config::kMTilesPerWarpgroup], u32 begin,
                                                 u32 end, const BlockedSum& groups) {
    static_assert(Config::kTilesPerBlockedSum % 2 == 0, "two tiles load_partials turns with registers for their parts");
    RowTerms one, other;
    if (begin < end) {
      RowFragments tile;
      read_weight(tile);
      split_weight(tile, one);
    }
    for (u32 tile = begin; tile < end; tile += 2) {
      if (groups.begins(tile)) groups.add(totals, tile);
      multiply_tile(totals, one, other, tile + 1 < end);
      if (tile + 1 < end) multiply_tile(totals, other, one, tile + 2 < end);
    }
  }

  __device__ __forceinline__ void multiply_tile(AccumulatorTile (&totals)[Config::kMTilesPerWarpgroup],
                                                const RowTerms& parts, RowTerms& next, bool has_next) {
    u64 boxes[Config::kSplitTerms];
    PipelineState<Config::kXStages> box = source;
#pragma unroll
    for (int i = 0; i < Config::kSplitTerms; ++i, box.next()) {
      barrier_wait(barriers.x_full(box.stage), box.parity);
      boxes[i] = matrix_descriptor(base + Config::kXAt + box.stage * Config::kXStageBytes);
    }
    if constexpr (Config::kPingPong) named_barrier_sync(kPingPongBarrier + warpgroup, Config::kConsumerThreads);
    AccumulatorTile sums[Config::kMTilesPerWarpgroup];
    issue(sums, parts, boxes);
    if constexpr (Config::kPingPong) named_barrier_arrive(kPingPongBarrier + (warpgroup ^ 1), Config::kConsumerThreads);
    if (has_next) {
      RowFragments tile;
      read_weight(tile);
      split_weight(tile, next);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) wgmma_fence_operand(sums[r]);
#pragma unroll
    for (int i = 0; i < Config::kSplitTerms; ++i, source.next()) release_x(source.stage);
    add(totals, sums);
  }

  // Box i is of X's part kSplitTerms - 1 - i, which meets those parts of W whose products with it are large enough.
  __device__ __forceinline__ void issue(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup], const RowTerms& parts,
                                        const u64 (&boxes)[Config::kSplitTerms]) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kSplitTerms; ++i)
#pragma unroll
      for (int part = i; part >= 0; --part)
#pragma unroll
        for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
          const WeightTerms& w = parts[r];
          if (i == 0) wgmma_sp_bf16<0, 0>(sums[r], w.words[0][part], boxes[i], w.metadata[0]);
          else wgmma_sp_bf16<0, 1>(sums[r], w.words[0][part], boxes[i], w.metadata[0]);
          wgmma_sp_bf16<1, 1>(sums[r], w.words[1][part], boxes[i] + 4, w.metadata[0]);
        }
    wgmma_commit();
  }

  __device__ __forceinline__ void read_weight(RowFragments& tile) const {
    barrier_wait(barriers.weight_full(weight.stage), weight.parity);
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
      tile[r].read(base + weight.stage * Config::kWeightStageBytes +
                   (warpgroup * Config::kMTilesPerWarpgroup + r) * Tile::kBytes);
  }
  // Loads that are under way hold back opaque_zero that is reported after them, and the wgmma of others starve them, for as
  // long as it loads_partials to fill a stage anew: the barrier's address needs what they bring.
  __device__ __forceinline__ void split_weight(RowFragments& tile, RowTerms& parts) {
    u32 came = 0;
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
      came ^= tile[r].fold_of_loads();
      parts[r].load_partials(tile[r]);
    }
    __syncwarp();
    release_weight(weight.stage, came & opaque_zero(p));
    weight.next();
  }
#else
  // Two steps: half a tile of W with one stage of X. The half's metadata stays in its registers while its wgmma run,
  // which read them whenever they like; the other half has others.
  template <int kHalf>
  __device__ __forceinline__ void multiply_half(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup],
                                                u32 (&metadata)[Config::kMTilesPerWarpgroup][Tile::kWords / 2]) {
    const u32 values =
        base + weight.stage * Config::kWeightStageBytes + warpgroup * Config::kMTilesPerWarpgroup * Tile::kBytes;
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
      load_shared_words(metadata[r], values + r * Tile::kBytes + Tile::kValueBytes +
                                         (threadIdx.x % 128 * Tile::kWords + kHalf * Tile::kWords / 2) * 4);
    barrier_wait(barriers.x_full(source.stage), source.parity);
    const u64 a = matrix_descriptor(values);
    const u64 b = x_descriptor(base + Config::kXAt + source.stage * Config::kXStageBytes);
    constexpr u64 kSecond = Config::kXColumnMajor ? 4 * Config::kTokenGroup : 4;  // half of the box's columns
    wgmma_fence();
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {  // the selector is an immediate; descriptors count 16 bytes
      const u64 at = a + r * (Tile::kBytes >> 4) + kHalf * 4;
      wgmma_sp<Config::kElement, 0, Config::kPromote ? 0 : 1, Config::kXColumnMajor>(sums[r], at, b, metadata[r][0]);
      wgmma_sp<Config::kElement, Config::kEightBit ? 0 : 1, 1, Config::kXColumnMajor>(
          sums[r], at + 2, b + kSecond, metadata[r][Config::kEightBit ? 1 : 0]);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void release_previous() const {
    release_x(last_source);
    release_weight(last_weight);
  }

  // kOn: on top of what the sums are.
  template <bool kOn = false>
  __device__ __forceinline__ void multiply(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup], u32 tiles) {
    if constexpr (!kOn) clear(sums);
    u32 first[Config::kMTilesPerWarpgroup][Tile::kWords / 2], second[Config::kMTilesPerWarpgroup][Tile::kWords / 2];
    for (u32 at = 0; at < tiles; ++at) {
      barrier_wait(barriers.weight_full(weight.stage), weight.parity);
      multiply_half<0>(sums, first);
      wgmma_wait<1>();  // all but the half just issued: the stages before it are free
      if (at > 0) release_previous();
      last_source = source.stage, last_weight = weight.stage;
      source.next();
      multiply_half<1>(sums, second);
      wgmma_wait<1>();
      release_x(last_source);
      last_source = source.stage;
      source.next(), weight.next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) wgmma_fence_operand(sums[r]);
    if (tiles > 0) release_previous();
  }

  // All of K, in kKChunks. Of the sums of the parts before, registers hold as many as they can, `workspace` the others.
  __device__ __forceinline__ void multiply_k_chunks(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup], u32 tiles,
                                                    StreamKFixup workspace) {
    // Found again where it is needed: few registers are left.
    const auto saved = [&] { return workspace.quads(blockIdx.x, warpgroup, 0); };
    multiply(sums, tiles / Config::kKChunks);
#pragma unroll 1
    for (u32 part = 1; part < Config::kKChunks; ++part) {
      Accumulator held[Config::kHeldAccumulators > 0 ? Config::kHeldAccumulators : 1];
      // By an operation that changes opaque_zero: of a mere copy the compiler keeps both in one y_offset, and spills all.
#pragma unroll
      for (int i = 0; i < Config::kHeldAccumulators; ++i)
        held[i] = accumulator_of(bits_of(sums[i / Config::kAccumulators][i % Config::kAccumulators]) ^ opaque_zero(p));
      workspace.save_accumulators<Config::kHeldAccumulators>(sums, saved());
      multiply(sums, tiles * (part + 1) / Config::kKChunks - tiles * part / Config::kKChunks);
#pragma unroll
      for (int i = 0; i < Config::kHeldAccumulators; ++i)
        sums[i / Config::kAccumulators][i % Config::kAccumulators] += held[i];
      workspace.add_saved<Config::kHeldAccumulators>(sums, saved());
    }
  }

  // Tiles of K of an work whose parts may end elsewhere than its ranges, on top of what its first part's sums are. What
  // whole parts have come to waits in the workspace. No branch passes by their sums: the compiler would move them.
  __device__ __forceinline__ void multiply_range(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup],
                                                 const TileScheduler& scheduler, StreamKFixup workspace) {
    const u32 tiles = (u32)workspace.p.k_tiles;
    const auto begin = [tiles](u32 part) { return tiles * part / Config::kKChunks; };
    float* saved = workspace.p.groups + workspace_offset(workspace_cta(scheduler), warpgroup, 0);
    u32 tile = scheduler.first, part = tile ? (tile * Config::kKChunks - 1) / tiles : 0;  // of the tile before
#pragma unroll 1
    while (true) {
      const u32 end = min(begin(part + 1), scheduler.last);
      multiply<true>(sums, end - tile);
      if (end == scheduler.last) break;
      if constexpr (Config::kKChunks > 2) workspace.add_saved(sums, saved, begin(part) > 0 ? ~0u : 0);
      workspace.save_accumulators(sums, saved);
      clear(sums);
      tile = end, ++part;
    }
  }
  // And those of the last part become the work's.
  __device__ __forceinline__ void add_saved_chunks(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup],
                                                   const TileScheduler& scheduler, StreamKFixup workspace) const {
    workspace.add_saved(sums, workspace.p.groups + workspace_offset(workspace_cta(scheduler), warpgroup, 0));
  }

  // All of K, box by box. The other warpgroup's wgmma run while this one adds.
  __device__ __forceinline__ void multiply_promoted(AccumulatorTile (&totals)[Config::kMTilesPerWarpgroup], u32 tiles) {
    clear(totals);
    AccumulatorTile sums[Config::kMTilesPerWarpgroup];
    u32 metadata[Config::kMTilesPerWarpgroup][Tile::kWords / 2];
    for (u32 at = 0; at < tiles; ++at) {
      barrier_wait(barriers.weight_full(weight.stage), weight.parity);
      multiply_half<0>(sums, metadata);
      promote(totals, sums);
      multiply_half<1>(sums, metadata);
      promote(totals, sums);
      release_weight(weight.stage);
      weight.next();
    }
  }
  __device__ __forceinline__ void promote(AccumulatorTile (&totals)[Config::kMTilesPerWarpgroup],
                                          AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup]) {
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) wgmma_fence_operand(sums[r]);
    release_x(source.stage);
    source.next();
    add(totals, sums);
  }
#endif
};
