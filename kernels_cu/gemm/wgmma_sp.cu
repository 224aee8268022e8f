// Y[n, m] = epilogue(alpha * scale_x[n] * scale_w[m] * sum_k X[n, k] * W[m, k] + beta * C[n, m]): warp-specialised
// wgmma, W 2:4 sparse.
//
// W is the sparse A operand of wgmma.sp, X is B; both are read from shared memory. W comes packed in K tiles of 64 rows
// x 256 bytes of columns, each loaded by one bulk copy. X comes through a tensor map in boxes of 128 bytes of columns.
// W and X have pipelines of their own, because a K tile of W spans two boxes of X. X of 16-bit elements may be
// column-major: a stage is then boxes of up to 64 tokens, a line for each of 64 columns, and wgmma reads them N-major.
// Y may be column-major too: its tiles are staged in that order. The orders change no bit of a result.
//
// A cluster has kClusterM CTAs along M, which share X by multicast: each loads a part of X into all of them. It has
// kSplitK CTAs along K (split-K). Without split-K the CTAs are persistent, and tile_scheduler.cuh gives them their work
// tiles; such a CTA may sum K in kKChunks chunks one after the other, and its range of K tiles may begin and end inside
// a work tile (stream-K). Each slice or chunk of K is summed in increasing k, and their sums are reduced from the first
// to the last, ((0+1)+2)+3. So the bits of a row depend on kSplitK * kKChunks alone, and equal those of gemm/mma_sp.cu
// for as many slices.
//
// With kGrouped, tokens come in groups, each multiplied by a weight of its own: experts. group_table.cuh says which
// tokens a group has. K is cut into the same slices for every group, so a row's bits depend neither on its group's size
// nor on the other groups.
//
// A thread has the sums of rows r and r + 8 of W. A gated epilogue makes one result of the two: Y is half as wide, and
// an m64 tile gives 32 of its columns.
//
// float32 (kSplitTerms) is multiplied in bf16 terms: gemm/f32_split.cu is the pre-pass kernel that splits X, or the
// producers split X of few tokens (kXSplit). W is split into two terms when it is packed (kWPresplit), or into three in
// registers.
//
// A quantized W (kQuantized) stores 4 or 8 bits a value and scales of groups of columns. Each thread makes the elements
// that it multiplies in its registers, which then are the A operand of wgmma. They are rounded as elements, so the bits
// are those of the product of a W of such elements.
//
//   role               threads                          what it does
//   load_weights       last warpgroup, thread 0         loads W, kMTiles tiles per stage
//   load_x             last warpgroup, thread 32        loads this CTA's part of X into all CTAs that share it
//   load_weights_and_x last warpgroup, a lane of warp 0 replaces both where kOneProducer
//   load_joint_stages  last warpgroup, warp 0           replaces all three where kJointStages
//   load_x_cp_async    last warpgroup, threads 64 ..    replaces load_x for a column-major X of few tokens (kXCpAsync)
//   load_and_split_x   last warpgroup, threads 32 .. 95     replaces load_x for float32 of few tokens (kXSplit)
//   publish_x          last warpgroup, thread 32        fences the stages that cp.async loaded
//   StreamKFixup       last warpgroup, warp 2           waits for the flags of partial sums, and sets them
//   produce_c          last warpgroup, thread 96        loads C into the staging buffers (kCStaged)
//   Mainloop           each consumer warpgroup          multiplies kMTilesPerWarpgroup m64 tiles with all tokens
//   EpilogueStore      each consumer warpgroup          without split-K: stages results and stores them by TMA
//   send_to_shares     all consumer warpgroups          with split-K: sends sums to the CTAs that reduce them
//   ClusterReduce      all consumer warpgroups          with split-K: reduces this CTA's share of the rows
//
//   barriers     weight_full, x_full: a stage is loaded. weight_empty, x_empty: all consumer warps have read a stage,
//                of X in all CTAs that share it. x_copied: cp.async has loaded a stage. c_full, c_empty: a staging
//                buffer holds C, or its results have been read. share_full: this CTA has received the sums of its
//                share. Named barriers from 1 on guard the staging area of a warpgroup; with split-K barrier 1 says
//                that all stages have been read, so that sums can be sent. Further ones with stream-K: partial
//                sums have been stored, or can be loaded. Ping-pong: kPingPongBarrier and the next. The CTAs of a
//                cluster sync before they send sums over one another's stages, and before they exit.
//   registers    at most 128 accumulators per thread, kAccumulators * kMTilesPerWarpgroup; twice as many with kPromote,
//                and kHeldAccumulators more with several K chunks: at most 192. With kReallocRegisters, a producer
//                thread keeps 40 registers and a consumer thread has 232.
//
//   load_weights | W0           | W1           | W2           | ..       up to kWeightStages ahead
//   load_x       | X0   | X1    | X2   | X3    | X4   | X5    | ..       up to kXStages ahead
//   Mainloop            | wgmma X0 | X1 | X2 | X3 | ..                   one half tile in flight while the stages of
//                                                                        the half tile before are released
//   EpilogueStore                                 | stage | store |      while the next work tile is loaded
#include "gemm/wgmma_sp/cluster_reduce.cuh"
#include "gemm/wgmma_sp/epilogue_store.cuh"
#include "gemm/wgmma_sp/mainloop_presplit.cuh"
#include "gemm/wgmma_sp/mainloop_sparse.cuh"
#include "gemm/wgmma_sp/mainloop_split_registers.cuh"
#include "gemm/wgmma_sp/producer.cuh"
#include "gemm/wgmma_sp/producer_split.cuh"
#include "gemm/wgmma_sp/stream_k_fixup.cuh"

template <int kSplitTerms> struct MainloopOf {
  using Type = SparseMainloop<Config>;
};
template <> struct MainloopOf<2> {
  using Type = PresplitMainloop<Config>;
};
template <> struct MainloopOf<3> {
  using Type = SplitRegistersMainloop<Config>;
};
using Mainloop = MainloopOf<Config::kSplitTerms>::Type;

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    gemm_wgmma_sp(const __grid_constant__ WgmmaSpParams p) {
  const u32 base = shared_address(shared);
  const Barriers barriers{base + Config::kBarrierAt};
  const u32 rank = blockIdx.x % Config::kClusterSize, m_rank = rank % Config::kClusterM,
            slice = rank / Config::kClusterM;
  // The shuffle tells the compiler that a warpgroup has one role, so that it computes addresses once for a warp. That
  // pays where consumers issue many instructions for a tile.
  const u32 warpgroup = Config::kQuantized ? __shfl_sync(~0u, threadIdx.x / 128, 0) : threadIdx.x / 128;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.x_map);
    prefetch_tensor_map(&p.x_tail_map);
    if (Config::kSplitK == 1 && p.y_aligned) prefetch_tensor_map(&p.y_map);
    constexpr int kReaders = 4 * Config::kWarpgroups;  // consumer warps, which each arrive at an empty barrier
    for (int i = 0; i < Config::kWeightStages; ++i) {
      barrier_init(barriers.weight_full(i), 1);
      barrier_init(barriers.weight_empty(i), kReaders);
    }
    for (int i = 0; i < Config::kXStages; ++i) {
      barrier_init(barriers.x_full(i), 1);
      barrier_init(barriers.x_empty(i), kReaders * Config::kXMulticast);
      if (Config::kXCpAsync) barrier_init(barriers.x_copied(i), Config::kXCopyThreads);
    }
    if constexpr (Config::kCStaged) {
      for (int i = 0; i < Config::kWarpgroups * Config::kStagingBuffers; ++i) {
        barrier_init(barriers.c_full(0, i), 1);
        barrier_init(barriers.c_empty(0, i), EpilogueStore<Config::Out>::kBoxes);
      }
    }
    if constexpr (Config::kSplitK > 1) barrier_init(barriers.share_full(), 1);
    barrier_init_fence();
    if constexpr (Config::kSplitK > 1)
      barrier_arrive_expect_tx(barriers.share_full(), (Config::kSplitK - 1) * received_bytes(slice));
  }
  __syncthreads();
  if constexpr (Config::kClusterSize > 1) cluster_sync_relaxed();
  if constexpr (Config::kXFromPrepass) {
    // The pre-pass kernel starts this one once all kernels before the two are done, so W needs no wait.
    launch_dependent_grids();
    if (threadIdx.x / 32 != Config::kConsumerThreads / 32) grid_dependency_wait();
  } else {
    if (!Config::kGrouped && threadIdx.x == Config::kConsumerThreads) prefetch_weights(p, m_rank, slice);
    if constexpr (!Config::kOneProducer) launch_dependent_grids();
    grid_dependency_wait();
  }
  if constexpr (Config::kGrouped) {
    const GroupTable table(p);
    table.make(p, m_blocks_of(p));
    // With split-K there is a cluster for each work tile that there may be.
    if (Config::kSplitK > 1 && blockIdx.x / Config::kClusterSize >= table.work_tiles()) return;
  }

  // Shares that lie over the stages are sent once all CTAs of the cluster have read their stages.
  constexpr bool kOverStages = Config::kSplitK > 1 && !Config::kShareApart;
  if (warpgroup == Config::kWarpgroups) {
    if constexpr (Config::kReallocRegisters) warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const u32 thread = threadIdx.x % 128;
    if constexpr (Config::kJointStages) {
      if (thread / 32 == 0) {
        load_joint_stages(p, base, barriers, m_rank, slice);
        launch_dependent_grids();
      }
    } else if constexpr (Config::kOneProducer) {
      if (thread / 32 == 0 && elect_one()) {
        load_weights_and_x(p, base, barriers, m_rank, slice);
        launch_dependent_grids();  // earlier, the next kernel would compete for memory with this kernel's last loads
      }
    } else {
      if (thread == 0) load_weights(p, base, barriers, m_rank, slice);
      if constexpr (Config::kXCpAsync) {
        if (thread == 32) publish_x(p, barriers, slice);
        if (thread >= 128 - Config::kXCopyThreads) load_x_cp_async(p, base, barriers, m_rank, slice);
      } else if constexpr (Config::kXSplit) {
        if (thread / 32 == 1 || thread / 32 == 2) load_and_split_x(p, base, barriers, m_rank, slice, thread / 32 == 2);
      } else {
        if (thread == 32) load_x(p, base, barriers, m_rank, slice);
      }
    }
    if constexpr (Config::kCStaged) {
      using Epilogue = EpilogueStore<Config::Out>;
      if (thread == 96 && Epilogue::loads_c(p)) Epilogue::produce_c(p, base, barriers, m_rank, slice);
    }
    if (Config::kStreamK && thread / 32 == 2) StreamKFixup{p}.exchange_flags();
    __syncwarp();
    if constexpr (kOverStages) cluster_sync_relaxed();
    if constexpr (Config::kSplitK > 1) cluster_arrive_relaxed();
  } else {
    if constexpr (Config::kReallocRegisters) warpgroup_reg_alloc<Config::kConsumerRegisters>();
    Mainloop mainloop{{p, {}, {}, base, warpgroup, barriers.x_empty(0), barriers}};
    mainloop.begin(slice);
    Accumulators accumulators;
    EpilogueStore<Config::Out> epilogue{
        {}, {}, p, base + Config::kStagingAt + warpgroup * Config::kStagingBytes, 1 + (int)warpgroup};
    epilogue.begin(barriers);
    for (TileScheduler scheduler(p, slice); scheduler.more(p); scheduler.next(p)) {
      const WorkTile work(p, scheduler.index, m_rank);
      const u32 m_tile = warpgroup * Config::kMTilesPerWarpgroup;
      // Bias and scales arrive while the tile is multiplied. Sums of K chunks leave no registers for that.
      constexpr bool kLoadsBefore = Config::kSplitK == 1 && Config::kKChunks == 1;
      if constexpr (kLoadsBefore) epilogue.load_operands(work, m_tile);
      mainloop.multiply(accumulators, scheduler, slice);
      if constexpr (Config::kStreamK) {
        if (scheduler.stores_partials()) {
          StreamKFixup{p}.store_partials(accumulators, warpgroup);
          continue;
        }
      }
      mainloop.finish(accumulators, scheduler);
      if constexpr (Config::kSplitK == 1) {
        if constexpr (!kLoadsBefore) epilogue.load_operands(work, m_tile);
#pragma unroll
        for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
          epilogue.write(accumulators[r], (work.row_tile + m_tile + r) * Tile::kRows, work, r);
      } else {
        if constexpr (kOverStages) cluster_sync_relaxed();
        else named_barrier_sync(1, Config::kConsumerThreads);  // every stage has been read
        send_to_shares(accumulators, base, barriers, m_tile, m_rank, slice);
        ClusterReduce reduce(p, work, base, slice);
        reduce.load_operands(threadIdx.x);  // while the sums of the other CTAs arrive
        barrier_wait_cluster(barriers.share_full(), 0);
        __syncwarp();  // all lanes arrive together, and their waits may have ended one by one
        cluster_arrive_relaxed();
        reduce.run();
      }
    }
    if (Config::kSplitK == 1 && p.y_aligned && epilogue.issues_stores()) tma_store_wait_read<0>();
  }
  if constexpr (Config::kSplitK > 1) cluster_wait();  // no CTA exits while its sums are being sent
}
