// Y[n, m] = epilogue(alpha * scale_x[n] * scale_w[m] * sum_k X[n, k] * W[m, k]), operands fed by the copy engine.
//
// W is the sparse A operand of wgmma.sp, X is B; both are read from shared memory. W comes packed in tiles of 64 rows
// x 256 bytes of columns, each one bulk copy; X comes through a tensor map in boxes of 128 bytes of columns. W and X
// have rings of their own, for a tile of W is two boxes of X long. X of 16-bit elements may lie in columns, where the
// tokens of a column are adjacent: then a stage is boxes of up to 64 tokens, a line for each of 64 columns, and wgmma
// reads them N-major. So may Y: its tiles are staged as they lie there. Neither changes a bit of a result.
//
// The blocks of a cluster lie kClusterM along M, which m_rank X: each copies a part of it to all; and kSplitK along K.
// With one slice, blocks stay and load_partials tile after tile. Such a block may sum K in kKChunks, one after the other; and it
// may have a range of tiles that begins and ends anywhere (kStreamK, TileScheduler): sums of an work, and what its whole parts
// have come to, are then handed over to the next block.
// A slice or part is summed in increasing k, and they are reduced from the first to the last, ((0+1)+2)+3. So the bits
// of a row depend on kSplitK * kKChunks alone, and they are those of gemm/mma_sp.cu for as many slices. The tensor
// cores add products of fp8 with few bits; kPromote moves their sums to float32 every 128 columns.
//
// A thread has the sums of rows r and r + 8 of W, of which a gated epilogue makes a result: Y is half as wide, and a
// row tile stores_partials 32 of its columns.
//
// float32 (kSplitTerms) is multiplied in parts of bf16: X comes in parts that gemm/f32_split.cu has made; W is packed in
// two (kWPresplit), or it is float32 and split in registers, in three. gemm/wgmma_sp/split_products.cuh says how.
//
// Each role has its file in gemm/wgmma_sp/, those that copy m_rank copies.cuh; pipeline.cuh is what they go by.
//
//   role         who                            what
//   load_weights last warpgroup, thread 0       W, kMTiles tiles a stage
//   load_x  last warpgroup, thread 32      X, this block's part of a stage to all blocks that m_rank it
//   load_weights_and_x    last warpgroup, warp 0         instead, with kOneProducer: one lane
//   load_x_cp_async   last warpgroup, threads 64 ..  instead: X in columns of fewer than 64 tokens, for this block
//   publish_x last warpgroup, thread 32      that a stage of these has come
//   ConsumerMainloop   each of kWarpgroups            kMTilesPerWarpgroup row tiles of W, all of the block's tokens
//   StreamKFixup     last warpgroup, warp 2         kStreamK: waits for the flags of sums, and sets them
//   EpilogueStore       each of kWarpgroups, 1 slice   its results, staged for the copy engine, or element by element
//   ClusterReduce       all of kWarpgroups, slices     the block's m_rank of the cluster's rows: sums, epilogue, stores
//
//   barriers     weight_full, x_full: a stage's bytes have come; weight_empty, x_empty: all warps that read
//                a stage are done with it (X: those of all blocks that m_rank it); x_copied: threads have copied a
//                stage. Named barriers 1 ..: a warpgroup's staging area; with slices, 1: all stages have been read;
//                with ranges, further ones: a warpgroup's sums have been stored, or can be loaded. The cluster meets
//                round the reduce_in_order. Of float32, kPingPongBarrier and up: a warpgroup's scheduler in front of the tensor cores.
//   registers    kAccumulators * kMTilesPerWarpgroup accumulators, at most 128 a thread; twice that with kPromote, and kHeldAccumulators more with
//                kKChunks > 1: at most 192. Where kReallocRegisters says so, threads that copy hand theirs over and keep 40; those
//                that multiply have 232.
//
//   load_weights | W0           | W1           | W2           | ..       up to kWeightStages ahead
//   load_x  | X0   | X1    | X2   | X3    | X4   | X5    | ..       up to kXStages ahead
//   ConsumerMainloop          | wgmma X0 | X1 | X2 | X3 | ..                   one step of wgmma in flight, the stages of
//                                                                        the step before it freed meanwhile
//   EpilogueStore                                        | fill | copy |        while the next work is copied in
#include "gemm/wgmma_sp/cluster_reduce.cuh"
#include "gemm/wgmma_sp/epilogue_store.cuh"
#include "gemm/wgmma_sp/mainloop.cuh"
#include "gemm/wgmma_sp/producer.cuh"
#include "gemm/wgmma_sp/stream_k_fixup.cuh"

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    gemm_wgmma_sp(const __grid_constant__ WgmmaSpParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const Barriers barriers{base + Config::kBarrierAt};
  const u32 rank = blockIdx.x % Config::kClusterSize, m_rank = rank % Config::kClusterM,
            slice = rank / Config::kClusterM;
  const u32 warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.x_map);
    prefetch_tensor_map(&p.x_tail_map);
    if (Config::kSplitK == 1 && p.aligned) prefetch_tensor_map(&p.y_map);
    constexpr int kReaders = 4 * Config::kWarpgroups;  // warps that report a stage free
    for (int i = 0; i < Config::kWeightStages; ++i) {
      barrier_init(barriers.weight_full(i), 1);
      barrier_init(barriers.weight_empty(i), kReaders);
    }
    for (int i = 0; i < Config::kXStages; ++i) {
      barrier_init(barriers.x_full(i), 1);
      barrier_init(barriers.x_empty(i), kReaders * Config::kXMulticast);
      if (Config::kXCpAsync) barrier_init(barriers.x_copied(i), Config::kXCopyThreads);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (Config::kClusterSize > 1) cluster_sync_relaxed();
  if constexpr (Config::kXFromPrepass) {
    // The pass lets this kernel start when all before it is done: W needs no wait.
    launch_dependent_grids();
    if (threadIdx.x / 32 != Config::kConsumerThreads / 32) grid_dependency_wait();
  } else {
    if (threadIdx.x == Config::kConsumerThreads) prefetch_weights(p, m_rank, slice);
    if constexpr (!Config::kOneProducer) launch_dependent_grids();
    grid_dependency_wait();
  }

  if (warpgroup == Config::kWarpgroups) {
    if constexpr (Config::kReallocRegisters) warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const u32 thread = threadIdx.x % 128;
    if constexpr (Config::kOneProducer) {
      if (thread / 32 == 0 && elect_one()) {
        load_weights_and_x(p, base, barriers, m_rank, slice);
        launch_dependent_grids();  // earlier, they would load_partials from memory what this kernel still waits for
      }
    } else {
      if (thread == 0) load_weights(p, base, barriers, m_rank, slice);
      if constexpr (Config::kXCpAsync) {
        if (thread == 32) publish_x(p, barriers, slice);
        if (thread >= 128 - Config::kXCopyThreads) load_x_cp_async(p, base, barriers, m_rank, slice);
      } else {
        if (thread == 32) load_x(p, base, barriers, m_rank, slice);
      }
    }
    if (Config::kStreamK && thread / 32 == 2) StreamKFixup{p}.wait();
    __syncwarp();
    if constexpr (Config::kSplitK > 1) cluster_sync();
  } else {
    if constexpr (Config::kReallocRegisters) warpgroup_reg_alloc<Config::kConsumerRegisters>();
    ConsumerMainloop multiplier{p, {}, {}, base, warpgroup, barriers.x_empty(0), barriers};
    if constexpr (Config::kXMulticast > 1)
      multiplier.x_empty =
          cluster_address(barriers.x_empty(0), threadIdx.x % 32 % Config::kClusterM + Config::kClusterM * slice);
    if (Config::kPingPong && warpgroup == 1)
      named_barrier_arrive(kPingPongBarrier, Config::kConsumerThreads);  // the other's is first
    AccumulatorTile sums[Config::kMTilesPerWarpgroup];
    EpilogueStore<Config::Out> writer{p, base + Config::kStagingAt + warpgroup * Config::kStagingBytes,
                                      1 + (int)warpgroup};
    for (TileScheduler scheduler(p, slice); scheduler.more(p); scheduler.next(p)) {
      const WorkTile work(p, scheduler.index, m_rank);
#ifdef S24_F32_SPLIT
      if constexpr (Config::kStreamK) StreamKFixup{p}.load_partials(sums, warpgroup, scheduler.loads_partials());
      else ConsumerMainloop::clear(sums);
      const BlockedSum groups(p, scheduler, warpgroup, slice);
      multiplier.multiply_split(sums, scheduler.first, scheduler.last, groups);
#else
      const u32 tiles = scheduler.last - scheduler.first;
      if constexpr (Config::kStreamK) {
        StreamKFixup{p}.load_partials(sums, warpgroup, scheduler.loads_partials());
        if constexpr (Config::kKChunks > 1) multiplier.multiply_range(sums, scheduler, StreamKFixup{p});
        else multiplier.multiply<true>(sums, tiles);
      } else if constexpr (Config::kPromote) multiplier.multiply_promoted(sums, tiles);
      else if constexpr (Config::kKChunks > 1) multiplier.multiply_k_chunks(sums, tiles, StreamKFixup{p});
      else multiplier.multiply(sums, tiles);
#endif
      const u32 row_tile = warpgroup * Config::kMTilesPerWarpgroup;
      if constexpr (Config::kStreamK) {
        if (scheduler.stores_partials()) {
          StreamKFixup{p}.store_partials(sums, warpgroup);
          continue;
        }
      }
#ifdef S24_F32_SPLIT
      if (Config::kTilesPerBlockedSum) groups.finish(sums, scheduler.last);
#else
      if constexpr (Config::kStreamK && Config::kKChunks > 1)
        multiplier.add_saved_chunks(sums, scheduler, StreamKFixup{p});
#endif
      if constexpr (Config::kSplitK == 1) {
#pragma unroll
        for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
          writer.write(sums[r], (work.row_tile + row_tile + r) * Tile::kRows, work.token);
      } else {
        named_barrier_sync(
            1, Config::kConsumerThreads);  // every stage has been read: the sums load_partials their y_offset
        stage_accumulators(sums, base, row_tile);
        cluster_sync();
        ClusterReduce(p, work, base, m_rank, slice).run();
      }
    }
    if (Config::kSplitK == 1 && p.aligned && writer.issues_stores()) tma_store_wait_read<0>();
  }
  if constexpr (Config::kSplitK > 1) cluster_sync_relaxed();  // nobody leaves while its sums are still read
}
