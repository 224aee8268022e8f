// C = epilogue(alpha * op(S) @ X) for a block-sparse S, with operands loaded by TMA. dsd is computed as it stands, dds
// as C^T = op(S)^T @ op(A)^T. Here rows are rows of op(S), and tokens are columns of X, whichever way C lies in memory.
//
// A row panel has 128 rows of op(S), or 64 for blocks below 128 and few tokens: one block row, or several that share
// the columns of X that more than one of them keeps. A cluster computes one row panel times kTileN tokens for each of
// its CTAs. The CTAs share the values of S: each loads a part of them and multicasts it. A step covers 128 bytes of k
// in which the panel keeps any block, and the rows of X at that k. A panel that is longer than in random layouts may be
// cut into slices of its kept columns; panels.py says where. Instead, where few work tiles would leave multiprocessors
// idle, every panel may be cut into kClusterSlices slices, which the CTAs of a cluster compute and add. Steps are
// summed in increasing k, then slices in their order, so the bits of a result depend on the layout, its token, and on
// how panels are cut.
//
// For sdd a row panel is one block row, or 64 rows of small blocks. A work tile is some of the block columns in which
// the panel keeps a block. A step is 128 bytes of k of op(A)'s rows, which the cluster shares, and of op(B)'s columns.
// The columns of a panel are divided evenly among the fewest work tiles. 8-bit elements require that k is contiguous in
// all operands.
//
// role       warps                        work
// producer   last warpgroup, 2 warps      S; the other two warps X: a stage a step, up to kStages ahead, also into the
//            each                         next work tiles. With small blocks each warp loads a block column of S and X,
//                                         S by cp.async, because a TMA request costs more than such a block
// consumer   each of kWarpgroups          64 rows x kWarpgroupN tokens by wgmma; skips steps without its blocks;
//                                         stages its results and stores them by TMA while the next stages are loaded
//
// barriers   full: a stage's bytes have arrived. empty: all warps of the cluster that read the stage are done.
//            Named barriers from 1 on guard a warpgroup's staging area; the one behind them guards the stages, in which
//            the slices of a cluster exchange their sums.
// registers  kWarpgroupN / 2 accumulators; producer warps release registers to the consumers. CTAs with one consumer
//            warpgroup have half of the registers and of the shared memory, so that two share a multiprocessor.
//
// producer | step 0 | step 1 | step 2 | ..
// mainloop          | wgmma 0 | 1 | 2 | ..                     one step in flight; the previous stage is released
//                                                              meanwhile
// epilogue                                  | fill | store |   in a cluster | sums | cluster sync | add and store |
//
// The kernel is persistent. Work tiles: slices, or whole panels if one CTA sums the slices of a panel, from the longest
// to the shortest with every token tile of a raster group, then the next raster group. For sdd the first work tile of
// every panel and batch, then the second of each panel that has one, and so on. Cluster c of G takes work tile c, then
// 2G - 1 - c, then 2G + c, so that no cluster gets only long panels. If a panel is long, clusters claim all but
// their first work tile from a counter; which cluster computes a work tile changes no bit.
#include "blocksparse/block_mainloop.cuh"
#include "blocksparse/blocks_wgmma/cluster_sums.cuh"
#include "blocksparse/blocks_wgmma/cp_async_producer.cuh"
#include "blocksparse/blocks_wgmma/slice_sums.cuh"
#include "blocksparse/tile_epilogue.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/stmatrix.cuh"

constexpr int kSparseGroup = Config::kSCpAsync ? Config::kBlockBytes : Config::kBox64Bytes;
using SparseOperand = DenseOperand<Config::kSparseMajor, Config::kBoxBytes, kSparseGroup>;
// A shared-memory row of X holds one token's k. Otherwise it holds 64 tokens, for sdd at most those of one block
// column, and a group holds all k of these tokens.
constexpr int kTokensBeside = Config::kSampled && Config::kSmall ? Config::kBlock : 64;
constexpr int kDenseLine = Config::kDenseMajor == Major::K ? Config::kBoxBytes : Config::kBytes * kTokensBeside;
constexpr int kDenseGroup = Config::kSmall ? Config::kBox * kDenseLine : Config::kBox64Bytes;
constexpr int kTokenBytes = Config::kSmall ? Config::kBoxBytes : kDenseLine;  // average distance between tokens
using XOperand = DenseOperand<Config::kDenseMajor, kDenseLine, kDenseGroup>;
template <bool kInteger> struct AccumulatorOf {
  using Type = float;
};
template <> struct AccumulatorOf<true> {
  using Type = int;
};
using Sum = AccumulatorOf<Config::kElement == ElementKind::S8>::Type;
using AccumulatorTile = Sum[Config::kAccumulators];  // one thread's part of 64 rows x kWarpgroupN

// Mainloop -----------------------------------------------------------------------------------------------

// The mainloop of one consumer warpgroup: 64 rows x kWarpgroupN tokens.
struct ConsumerMainloop : BlockMainloop<Config, ConsumerMainloop, Config::kClaims> {
  __device__ __forceinline__ void issue(AccumulatorTile& sums, u32 present) const {
    const u64 a = SparseOperand::descriptor(stage() + warpgroup_m * 64 * Config::kBoxBytes);
    const u64 b =
        XOperand::descriptor(stage() + Config::kSparseBytes + warpgroup_n * Config::kWarpgroupN * kTokenBytes);
    constexpr u32 kBlockStrideB =
        Config::kDenseMajor == Major::K || Config::kSmall ? Config::kTileN * Config::kBoxBytes : Config::kBox * 128;
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < Config::kBlocksPerStep; ++block) {  // the block columns of the stage, in order
      if (Config::kBlocksPerStep > 1 && !(present >> 8 * block & 0xff)) continue;
#pragma unroll
      for (int k = 0; k < Config::kBoxBytes / 32; ++k)
        wgmma_dense<Config::kElement, Config::kSparseMajor, Config::kDenseMajor>(
            sums, a + (block * (Config::kTileM * Config::kBoxBytes) >> 4) + k * SparseOperand::kStep,
            b + (block * kBlockStrideB >> 4) + k * XOperand::kStep);
    }
    wgmma_commit();
  }
};

// Epilogue --------------------------------------------------------------------------------------------

constexpr StoredBy kStoredBy = Config::kSampled && Config::kSmall ? StoredBy::Threads
                               : Config::kUnalignedRows           ? StoredBy::Warps
                                                                  : StoredBy::Tma;

// Stores the results of one warpgroup: 64 rows x kWarpgroupN tokens. For sdd with small blocks threads store the kept
// blocks.
struct EpilogueStore : TileEpilogue<EpilogueStore, Config, BlocksWgmmaParams, Config::kTokensContiguous, kStoredBy> {
  template <class Sums>
  __device__ __forceinline__ void write(const Sums& sums, const WorkTile& work, u32 warpgroup_m, u32 warpgroup_n) {
    const u32 row0 = work.row() + warpgroup_m * 64, token0 = work.token + warpgroup_n * Config::kWarpgroupN;
    const u32 tokens = Config::kSampled ? work.token + work.count * Config::kPieceN : p.tokens;
    const u32 rows = p.head_block_rows * Config::kBlock;
    write_tile(sums, work, row0, rows, (i64)work.head * rows + row0, token0, tokens);
  }

  __device__ __forceinline__ void store(u32 buffer, const WorkTile& work, u32 row, u32 token) const {
    const u32 warpgroup_m = (row - work.row()) / 64;
    if constexpr (Config::kSampled && Config::kSmall) {
      copy_blocks<Config::kBlock>(buffer, work, warpgroup_m, token);
    } else if constexpr (Config::kSampled) {
      const i64 place = work.first + token / Config::kBlock + (i64)work.batch * p.blocks;
      tma_store(&p.out_map, token % Config::kBlock, (u32)place * Config::kBlock + warpgroup_m * 64, buffer);
      tma_store_commit();
    } else {
      store_boxes(buffer, row, token, work.matrix(p));
    }
  }

  // The bits of one result.
  template <class Sum, class Out = Config::Out> __device__ __forceinline__ auto rounded(Sum sum, float bias) const ->
      typename Out::Bits {
    if constexpr (Config::kRaw) return (typename Out::Bits)sum;
    else return Out::from_float(canonical_nan(result(sum, bias)));
  }

  // Converts the accumulators of one step, which may be integers; results may have 8 bits or be the sums themselves. It
  // is a template of Out so that functions that a result type lacks are never looked up.
  template <class Sum, class Out = Config::Out>
  __device__ __forceinline__ void fill(u32 buffer, const Sum* sums, const float (&bias)[2]) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < Config::kStepColumns / 8; ++j) {
      const Sum* const sum = sums + 4 * j;
      if constexpr (Config::kOutBytes != 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 to = buffer + staged_at(row + g + i / 2 * 8, 8 * j + 2 * t + i % 2);
          store_shared(to, rounded<Sum, Out>(sum[i], bias[i / 2]));
        }
      } else {
        const u32 above = Out::pair(result(sum[0], bias[0]), result(sum[1], bias[0]));
        const u32 below = Out::pair(result(sum[2], bias[1]), result(sum[3], bias[1]));
        if constexpr (Config::kTokensContiguous) stmatrix_x2(buffer + staged_at(row + lane % 16, 8 * j), above, below);
        else stmatrix_transposed_x2(buffer + staged_at(row + lane / 8 % 2 * 8, 8 * j + lane % 8), above, below);
      }
    }
  }

  // Stores the buffer's kept blocks, one warp for each block. It is a template so that larger blocks never instantiate
  // it.
  template <int kBlock>
  __device__ __forceinline__ void copy_blocks(u32 buffer, const WorkTile& work, u32 warpgroup_m, u32 token) const {
    constexpr int kBytes = Config::kOutBytes, kAcross = Config::kStepColumns / kBlock, kDown = 64 / kBlock;
    constexpr int kRowChunks = kBlock * kBytes / 16, kChunks = kBlock * kRowChunks;
    for (int at = threadIdx.x % 128 / 32; at < kAcross * kDown; at += 4) {
      const int across = at % kAcross, down = at / kAcross, column = (int)token / kBlock + across;
      if (column >= work.count) continue;
      const int place =
          p.value_index[(i64)(work.first + column) * Config::kPanelBlockRows + warpgroup_m * kDown + down];
      if (place < 0) continue;
      u8* const to = (u8*)p.values + ((i64)work.batch * p.blocks + place) * (kChunks * 16);
      for (int chunk = threadIdx.x % 32; chunk < kChunks; chunk += 32) {
        const int row = down * kBlock + chunk / kRowChunks, cell = across * kBlock + chunk % kRowChunks * (16 / kBytes);
        float v[4];
        load_shared_x4(v, buffer + staged_at(row, cell));
        *(float4*)(to + chunk * 16) = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
};

// Whether the next kernel may start at once. Otherwise it starts when this one has requested its loads, with which its
// requests would compete for memory. With small blocks that made no difference.
constexpr bool kStartsNextAtOnce = Config::kSCpAsync || Config::kCtasPerSm > 1;

// Prefetches the tables and the values. All lanes of a warp call it together.
__device__ __forceinline__ void prefetch_operand(const BlocksWgmmaParams& p) {
  const i64 block_rows = (i64)p.heads * p.head_block_rows, blocks = p.blocks;
  if constexpr (Config::kSlices == Slices::Apart) {
    prefetch_part_l2(p.slices, 4ll * WorkTile::kSliceFields * p.panels);
  } else {
    prefetch_part_l2(p.panel_order, 4ll * p.panels);
    prefetch_part_l2(p.panel_columns, 4ll * p.panels);
  }
  if constexpr (Config::kSmall) {
    prefetch_part_l2(p.pointers, 4ll * p.panels);
    prefetch_part_l2(p.columns, 4 * blocks / Config::kPanelBlockRows);
    prefetch_part_l2(p.value_index, 4 * blocks);
  } else {
    prefetch_part_l2(p.pointers, 4 * block_rows);
    prefetch_part_l2(p.kept, 4 * block_rows * p.bit_words);
    if (p.value_index) prefetch_part_l2(p.value_index, 4 * blocks);
  }
  prefetch_part_l2(p.values, (i64)Config::kBytes * blocks * (Config::kBlock * Config::kBlock));
}

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    blocks_wgmma(const __grid_constant__ BlocksWgmmaParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const Barriers barriers{base + Config::kBarrierAt};
  const u32 cta_rank = blockIdx.x % Config::kClusterN, warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      store_shared(barriers.present(i), 0u);
      barrier_init(barriers.full(i), Config::kFullArrivals);
      barrier_init(barriers.empty(i), 4 * Config::kWarpgroups * Config::kClusterN);
    }
    barrier_init_fence();
  }
  if (Config::kClaims && threadIdx.x == 32) {  // another warp, so that the kernel starts no later
    Claims{base}.init();
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (Config::kClusterN > 1) cluster_sync_relaxed();
  if constexpr (kStartsNextAtOnce) launch_dependent_grids();
  if constexpr (!Config::kXCopied) {
    if (!Config::kSampled && threadIdx.x < 32) prefetch_operand(p);
    grid_dependency_wait();
  }

  if (warpgroup == Config::kWarpgroups) {
    warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const u32 warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    if constexpr (Config::kSCpAsync)
      CpAsyncProducer{
          p, base, lane, warp / CpAsyncProducer::kWarpsPerColumn, warp % CpAsyncProducer::kWarpsPerColumn, barriers}
          .produce();
    else if (warp < 2) Producer<true>{p, base, cta_rank, lane, warp, barriers}.produce();
    else Producer<false>{p, base, cta_rank, lane, warp - 2, barriers}.produce();
    if (!kStartsNextAtOnce && warp == 3 && lane == 0) launch_dependent_grids();
  } else {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    const u32 warpgroup_m = warpgroup % Config::kWarpgroupsM, warpgroup_n = warpgroup / Config::kWarpgroupsM;
    ConsumerMainloop mainloop{
        {{}, base, warpgroup_m, warpgroup_n, ConsumerRelease<Config>(barriers.empty(0)), barriers}};
    const u32 staging = base + Config::kStagingAt + warpgroup * Config::kBuffers * Config::kBufferBytes;
    EpilogueStore epilogue{{p, staging, 1 + (int)warpgroup}};
    AccumulatorTile sums;
    for (WorkSequence sequence(p, base); sequence.has_work(p); sequence.next<false>(p)) {
      WorkTile work(p, sequence, cta_rank);
      if constexpr (Config::kSlices == Slices::Sequential) {
        SlicesSequential<Sum> sequential{p, warpgroup, {}};
        work.for_slices([&](const WorkTile& slice) {
          mainloop.multiply(sums, slice.steps(p));
          if (slice.slices > 1) sequential.add(sums, slice);
        });
        epilogue.write(sums, work, warpgroup_m, warpgroup_n);
      } else if constexpr (Config::kClusterSlices > 1) {
        mainloop.multiply(sums, work.steps(p));
        const ClusterSums exchanged{p, base};
        exchanged.store(sums, warpgroup_m, warpgroup_n);
        exchanged.write<Sum>(work, [&](Sum sum, float bias) { return epilogue.rounded(sum, bias); });
      } else {
        const u32 token = work.token + warpgroup_n * Config::kWarpgroupN;
        const SlicesApart apart{p, 1 + (int)warpgroup, warpgroup_m, token};
        const u64 seen = Config::kSlices == Slices::Apart ? apart.seen(work) : 0;
        mainloop.multiply(sums, work.steps(p));
        if (Config::kSlices != Slices::Apart || work.slices == 1) epilogue.write(sums, work, warpgroup_m, warpgroup_n);
        else if (apart.store(sums, work, seen))
          epilogue.write(apart.sums_of<Sum>(work), work, warpgroup_m, warpgroup_n);
      }
    }
    if (epilogue.is_storing_thread()) tma_store_wait_read<0>();
  }
  // The other CTA's warps still tell the first one that they have read a claim. Nobody waits for that, so the sync must
  // order it: an arrival that comes late would hit the shared memory of the next kernel's CTA.
  if constexpr (Config::kClaims && Config::kClusterN > 1) {
    __syncwarp();
    cluster_sync();
  }
}
