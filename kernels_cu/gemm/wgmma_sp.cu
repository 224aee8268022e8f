// Y[n, m] = epilogue(alpha * scale_x[n] * scale_w[m] * sum_k X[n, k] * W[m, k]), operands fed by the copy engine.
//
// W is the sparse A operand of wgmma.sp, X is B; both are read from shared memory. W comes packed in tiles of 64 rows
// x 256 bytes of columns, each one bulk copy; X comes through a tensor map in boxes of 128 bytes of columns. W and X
// have rings of their own, for a tile of W is two boxes of X long. X of 16-bit elements may lie in columns, where the
// tokens of a column are adjacent: then a stage is boxes of up to 64 tokens, a line for each of 64 columns, and wgmma
// reads them N-major. So may Y: its tiles are staged as they lie there. Neither changes a bit of a result.
//
// The blocks of a cluster lie kShare along M, which share X: each copies a part of it to all; and kSlices along K.
// With one slice, blocks stay and take tile after tile. Such a block may sum K in kParts, one after the other; and it
// may have a range of tiles that begins and ends anywhere (kRanges, Turns): sums of an item, and what its whole parts
// have come to, are then handed over to the next block.
// A slice or part is summed in increasing k, and they are folded from the first to the last, ((0+1)+2)+3. So the bits
// of a row depend on kSlices * kParts alone, and they are those of gemm/mma_sp.cu for as many slices. The tensor
// cores add products of fp8 with few bits; kPromote moves their sums to float32 every 128 columns.
//
// A thread has the sums of rows r and r + 8 of W, of which a gated epilogue makes a result: Y is half as wide, and a
// row tile gives 32 of its columns.
//
// float32 (kXParts) is multiplied in parts of bf16: X comes in parts that gemm/f32_split.cu has made; W is packed in
// two (kPlanes), or it is float32 and split in registers, in three. gemm/wgmma_sp/split_products.cuh says how.
//
// Each role has its file in gemm/wgmma_sp/, those that copy share copies.cuh; pipeline.cuh is what they go by.
//
//   role         who                            what
//   copy_weights last warpgroup, thread 0       W, kRowTiles tiles a stage
//   copy_source  last warpgroup, thread 32      X, this block's part of a stage to all blocks that share it
//   copy_both    last warpgroup, warp 0         instead, with kOneCopies: one lane
//   copy_lines   last warpgroup, threads 64 ..  instead: X in columns of fewer than 64 tokens, for this block
//   report_lines last warpgroup, thread 32      that a stage of these has come
//   Multiplier   each of kWarpgroups            kRowBlocks row tiles of W, all of the block's tokens
//   Handover     last warpgroup, warp 2         kRanges: waits for the flags of sums, and sets them
//   Writer       each of kWarpgroups, 1 slice   its results, staged for the copy engine, or element by element
//   Folder       all of kWarpgroups, slices     the block's share of the cluster's rows: sums, epilogue, stores
//
//   barriers     weight_full, source_full: a stage's bytes have come; weight_free, source_free: all warps that read
//                a stage are done with it (X: those of all blocks that share it); source_came: threads have copied a
//                stage. Named barriers 1 ..: a warpgroup's staging area; with slices, 1: all stages have been read;
//                with ranges, further ones: a warpgroup's sums have been stored, or can be loaded. The cluster meets
//                round the fold. Of float32, kTurnBarrier and up: a warpgroup's turn in front of the tensor cores.
//   registers    kSums * kRowBlocks accumulators, at most 128 a thread; twice that with kPromote, and kHeld more with
//                kParts > 1: at most 192. Where kTrade says so, threads that copy hand theirs over and keep 40; those
//                that multiply have 232.
//
//   copy_weights | W0           | W1           | W2           | ..       up to kWeightStages ahead
//   copy_source  | X0   | X1    | X2   | X3    | X4   | X5    | ..       up to kSourceStages ahead
//   Multiplier          | wgmma X0 | X1 | X2 | X3 | ..                   one step of wgmma in flight, the stages of
//                                                                        the step before it freed meanwhile
//   Writer                                        | fill | copy |        while the next item is copied in
#include "gemm/wgmma_sp/cluster_reduce.cuh"
#include "gemm/wgmma_sp/epilogue_store.cuh"
#include "gemm/wgmma_sp/mainloop.cuh"
#include "gemm/wgmma_sp/producer.cuh"
#include "gemm/wgmma_sp/stream_k_fixup.cuh"

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    gemm_wgmma_sp(const __grid_constant__ WgmmaSpParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const Barriers barriers{base + Config::kBarrierAt};
  const u32 rank = blockIdx.x % Config::kCluster, share = rank % Config::kShare, slice = rank / Config::kShare;
  const u32 warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.x_map);
    prefetch_tensor_map(&p.x_tail_map);
    if (Config::kSlices == 1 && p.y_aligned) prefetch_tensor_map(&p.y_map);
    constexpr int kReaders = 4 * Config::kWarpgroups;  // warps that report a stage free
    for (int i = 0; i < Config::kWeightStages; ++i) {
      barrier_init(barriers.weight_full(i), 1);
      barrier_init(barriers.weight_free(i), kReaders);
    }
    for (int i = 0; i < Config::kSourceStages; ++i) {
      barrier_init(barriers.source_full(i), 1);
      barrier_init(barriers.source_free(i), kReaders * Config::kSourceShare);
      if (Config::kByThreads) barrier_init(barriers.source_came(i), Config::kLineThreads);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (Config::kCluster > 1) cluster_sync_relaxed();
  if constexpr (Config::kAfterPass) {
    // The pass lets this kernel start when all before it is done: W needs no wait.
    launch_dependent_grids();
    if (threadIdx.x / 32 != Config::kMultiplying / 32) grid_dependency_wait();
  } else {
    if (threadIdx.x == Config::kMultiplying) prefetch_weights(p, share, slice);
    if constexpr (!Config::kOneCopies) launch_dependent_grids();
    grid_dependency_wait();
  }

  if (warpgroup == Config::kWarpgroups) {
    if constexpr (Config::kTrade) warpgroup_reg_dealloc<Config::kCopyRegisters>();
    const u32 thread = threadIdx.x % 128;
    if constexpr (Config::kOneCopies) {
      if (thread / 32 == 0 && elect_one()) {
        copy_both(p, base, barriers, share, slice);
        launch_dependent_grids();  // earlier, they would take from memory what this kernel still waits for
      }
    } else {
      if (thread == 0) copy_weights(p, base, barriers, share, slice);
      if constexpr (Config::kByThreads) {
        if (thread == 32) report_lines(p, barriers, slice);
        if (thread >= 128 - Config::kLineThreads) copy_lines(p, base, barriers, share, slice);
      } else {
        if (thread == 32) copy_source(p, base, barriers, share, slice);
      }
    }
    if (Config::kRanges && thread / 32 == 2) Handover{p}.wait();
    __syncwarp();
    if constexpr (Config::kSlices > 1) cluster_sync();
  } else {
    if constexpr (Config::kTrade) warpgroup_reg_alloc<Config::kSumRegisters>();
    Multiplier multiplier{p, {}, {}, base, warpgroup, barriers.source_free(0), barriers};
    if constexpr (Config::kSourceShare > 1)
      multiplier.source_free =
          cluster_address(barriers.source_free(0), threadIdx.x % 32 % Config::kShare + Config::kShare * slice);
    if (Config::kTurns && warpgroup == 1)
      named_barrier_arrive(kTurnBarrier, Config::kMultiplying);  // the other's is first
    Sums sums[Config::kRowBlocks];
    Writer<Config::Out> writer{p, base + Config::kStagingAt + warpgroup * Config::kStagingBytes, 1 + (int)warpgroup};
    for (Turns turn(p, slice); turn.more(p); turn.next(p)) {
      const Item item(p, turn.index, share);
#ifdef S24_F32_SPLIT
      if constexpr (Config::kRanges) Handover{p}.take(sums, warpgroup, turn.takes());
      else Multiplier::clear(sums);
      const Groups groups(p, turn, warpgroup, slice);
      multiplier.multiply_split(sums, turn.first, turn.last, groups);
#else
      const u32 tiles = turn.last - turn.first;
      if constexpr (Config::kRanges) {
        Handover{p}.take(sums, warpgroup, turn.takes());
        if constexpr (Config::kParts > 1) multiplier.multiply_pieces(sums, turn, Handover{p});
        else multiplier.multiply<true>(sums, tiles);
      } else if constexpr (Config::kPromote) multiplier.multiply_promoting(sums, tiles);
      else if constexpr (Config::kParts > 1) multiplier.multiply_parts(sums, tiles, Handover{p});
      else multiplier.multiply(sums, tiles);
#endif
      const u32 row_tile = warpgroup * Config::kRowBlocks;
      if constexpr (Config::kRanges) {
        if (turn.gives()) {
          Handover{p}.give(sums, warpgroup);
          continue;
        }
      }
#ifdef S24_F32_SPLIT
      if (Config::kTilesOfGroup) groups.finish(sums, turn.last);
#else
      if constexpr (Config::kRanges && Config::kParts > 1) multiplier.add_parts(sums, turn, Handover{p});
#endif
      if constexpr (Config::kSlices == 1) {
#pragma unroll
        for (int r = 0; r < Config::kRowBlocks; ++r)
          writer.write(sums[r], (item.row_tile + row_tile + r) * Tile::kRows, item.token);
      } else {
        named_barrier_sync(1, Config::kMultiplying);  // every stage has been read: the sums take their place
        store_sums(sums, base, row_tile);
        cluster_sync();
        Folder(p, item, base, share, slice).run();
      }
    }
    if (Config::kSlices == 1 && p.y_aligned && writer.is_copier()) tma_store_wait_read<0>();
  }
  if constexpr (Config::kSlices > 1) cluster_sync_relaxed();  // nobody leaves while its sums are still read
}
