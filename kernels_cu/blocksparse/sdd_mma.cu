// C = the kept blocks of alpha * op(A) @ op(B), for sums of up to 64 products. Writing C once takes most of the time.
//
// op(A) is the A operand of mma m16n8k16, and op(B) is B. Lanes load both from global memory, where caches have them,
// into registers. Lane 4 * group + quad has the k from 2 * kWords * quad on, in kWords words of two, whichever way an
// operand is stored, so bits do not depend on it. Both operands are zeros beyond the sums' length.
//
// A warp computes kM16Tiles * 16 rows of each block of a run of neighbouring blocks of C. It keeps these rows of op(A)
// in registers while the block row stays the same. A piece is the kTiles * 8 columns of a block that it computes at a
// time: a lane then stores neighbouring cells, and four lanes whole sectors. Every warp has equal work, however uneven
// the block rows are, and warps share nothing.
//
//   role   threads    what it does
//   Run    all warps  loads op(B) of kAhead pieces ahead, multiplies, rounds and stores pieces
//
//   barriers   none
//   registers  op(A): 2 * kM16Tiles * kWords, at most 24; op(B): up to 32 in flight, and 16 of the piece; 16 sums
//
//   tables  | blocks of the run, one a lane |
//   load    |                               | 0 .. kAhead - 1 | kAhead | ..  each takes the place of a multiplied piece
//   mma     |                                                 | 0      | 1 | ..
//   store   |                                                          | 0 | 1 | ..
#include "blocksparse/blocks_mma/fragments.cuh"
#include "blocksparse/params/sdd_mma.cuh"
#include "common/epilogue.cuh"
#include "ptx/async.cuh"
#include "ptx/mma.cuh"

// All compile-time constants; macros are read here alone.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kBlock = S24_BLOCK, kM16Tiles = S24_M16_TILES, kWords = S24_WORDS;
  // Neighbouring k that a lane can load together if they are contiguous.
  static constexpr int kVector = S24_VECTOR;
  // Whether k is contiguous in op(A), and in op(B); otherwise rows or columns are.
  static constexpr bool kLeftAlongK = S24_LEFT_ALONG_K, kRightAlongK = S24_RIGHT_ALONG_K;

  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kTileM = 16 * kM16Tiles, kRowTiles = kBlock / kTileM;
  // n8 tiles of a piece: a lane stores 16 bytes of a row, if a block has as many and registers can hold op(B).
  static constexpr int kTiles = kBlock == 16 || sizeof(Out::Bits) == 4 || kWords > 4 ? 2 : 4;
  static constexpr int kPieceN = 8 * kTiles, kPieces = kBlock / kPieceN;
  // Registers of a lane's loads: of a row along k, and of a piece. Single cells take a register each.
  static constexpr int kRowWords = kVector == 1 ? 2 * kWords : kWords;
  static constexpr int kRightWords = kTiles * (kRightAlongK ? kRowWords : 2 * kWords);
  static constexpr int kAhead = kRightWords >= 16 ? 1 : 2;
  static constexpr int kResidentCtas = 4;  // of an SM, at least; they bound a thread's registers
  static_assert(2 * kWords % kVector == 0, "a lane's k are whole loads");
};
using Bits = Config::In::Bits;
constexpr int kM16Tiles = Config::kM16Tiles, kWords = Config::kWords, kTiles = Config::kTiles;

// Rounds values to neighbouring results.
template <class Out, int kWordCount, int kValues>
__device__ __forceinline__ void round_values(u32 (&words)[kWordCount], const float (&v)[kValues]) {
#pragma unroll
  for (int i = 0; i < kWordCount; ++i) {
    if constexpr (kWordCount == kValues) words[i] = Out::from_float(canonical_nan(v[i]));
    else words[i] = Out::pair(v[2 * i], v[2 * i + 1]);
  }
}

// A run of blocks, and the registers of the warp that computes a row tile of each.
struct Run {
  const SddMmaParams& p;
  const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const u32 k = fragment_k<8 * kWords>(quad, 0, 0);  // this lane's first
  const Bits *a, *b;                                 // this lane's first cells of row or column 0
  Config::Out::Bits* out;                            // this lane's first result in the first piece
  int pieces;

  // Block `lane` of the run: its block row, and where its rows of op(A) and its columns of op(B) begin.
  int block_row;
  i64 left_at, right_at;

  u32 left[kM16Tiles][2][kWords], right[Config::kAhead][Config::kRightWords];

  __device__ __forceinline__ explicit Run(const SddMmaParams& p) : p(p) {
    u32 at = blockIdx.x * Config::kWarps + threadIdx.x / 32;
    const int row = at % Config::kRowTiles * Config::kTileM;
    at /= Config::kRowTiles;
    const u32 first = at % p.runs * p.run_blocks, batch = at / p.runs;
    const int count = batch < p.batch ? (int)min(p.run_blocks, p.blocks - first) : 0;
    pieces = count * Config::kPieces;
    const int lane_row = fragment_row<Config::kLeftAlongK, kM16Tiles>(group, 0, 0);
    a = (const Bits*)p.a + (Config::kLeftAlongK ? lane_row * p.a_stride + k : k * p.a_stride + lane_row);
    // Lanes of two groups load the columns of both if they are contiguous.
    const int lane_column = sampled_column<kTiles>(Config::kRightAlongK ? group : group / 2 * 2, 0);
    b = (const Bits*)p.b + (Config::kRightAlongK ? lane_column * p.b_stride + k : k * p.b_stride + lane_column);
    out = (Config::Out::Bits*)p.out + ((i64)batch * p.blocks + first) * (Config::kBlock * Config::kBlock) +
          (row + lane_row) * Config::kBlock + sampled_column<kTiles>(2 * quad, 0);
    block_row = -1, left_at = right_at = 0;
    const int lane = threadIdx.x % 32;
    if (lane < count) {
      block_row = p.rows[first + lane];
      const u32 head = block_row / p.head_block_rows;
      const i64 matrix = (i64)batch * p.heads + head;
      const i64 rows = (i64)(block_row - head * p.head_block_rows) * Config::kBlock + row;
      const i64 columns = (i64)p.columns[first + lane] * Config::kBlock;
      left_at = matrix * p.a_matrix + rows * (Config::kLeftAlongK ? p.a_stride : 1);
      right_at = matrix * p.b_matrix + columns * (Config::kRightAlongK ? p.b_stride : 1);
    }
  }

  // Loads this lane's k of a row along k.
  __device__ __forceinline__ void load_row(u32* words, const Bits* from) const {
#pragma unroll
    for (int i = 0; i < 2 * kWords; i += Config::kVector) {
      if constexpr (Config::kVector == 1) load_half_word(words[i], from + i, k + i < p.terms);
      else load_words<Config::kVector / 2>(words + i / 2, from + i, k + i < p.terms);
    }
  }
  static __device__ __forceinline__ u32 word_of_row(const u32* words, int i) {
    if constexpr (Config::kVector == 1) return lower_halves(words[2 * i], words[2 * i + 1]);
    else return words[i];
  }

  __device__ __forceinline__ void load_left(i64 at) {
    const Bits* const from = a + at;
    if constexpr (Config::kLeftAlongK) {
      u32 rows[2 * kM16Tiles][Config::kRowWords];
#pragma unroll
      for (int row = 0; row < 2 * kM16Tiles; ++row) load_row(rows[row], from + 8 * row * p.a_stride);
#pragma unroll
      for (int row = 0; row < 2 * kM16Tiles; ++row)
#pragma unroll
        for (int i = 0; i < kWords; ++i) left[row / 2][row % 2][i] = word_of_row(rows[row], i);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        u32 pairs[2][kM16Tiles];  // of rows, at one k
#pragma unroll
        for (int j = 0; j < 2; ++j)
          load_words<kM16Tiles>(pairs[j], from + (2 * i + j) * p.a_stride, k + 2 * i + j < p.terms);
#pragma unroll
        for (int m16_tile = 0; m16_tile < kM16Tiles; ++m16_tile) {
          left[m16_tile][0][i] = lower_halves(pairs[0][m16_tile], pairs[1][m16_tile]);
          left[m16_tile][1][i] = upper_halves(pairs[0][m16_tile], pairs[1][m16_tile]);
        }
      }
    }
  }

  __device__ __forceinline__ void load_right(int slot, int piece) {
    if (piece >= pieces) return;
    const i64 column = piece % Config::kPieces * Config::kPieceN;
    const i64 at = __shfl_sync(~0u, right_at, piece / Config::kPieces);
    const Bits* const from = b + at + column * (Config::kRightAlongK ? p.b_stride : 1);
    if constexpr (Config::kRightAlongK) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        load_row(right[slot] + tile * Config::kRowWords, from + 2 * tile * p.b_stride);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kWords; ++i)
        load_words<kTiles>(right[slot] + i * kTiles, from + i * p.b_stride, k + i < p.terms);
    }
  }

  // The words of B's fragments: two k of this lane's column of each tile.
  __device__ __forceinline__ void right_fragments(u32 (&words)[kTiles][kWords], int slot) const {
    const u32(&loaded)[Config::kRightWords] = right[slot];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if constexpr (Config::kRightAlongK) {
          words[tile][i] = word_of_row(loaded + tile * Config::kRowWords, i);
        } else {
          const u32 first = loaded[2 * i * kTiles + tile], second = loaded[(2 * i + 1) * kTiles + tile];
          words[tile][i] = group % 2 ? upper_halves(first, second) : lower_halves(first, second);
        }
      }
  }

  __device__ __forceinline__ void multiply(float (&acc)[kTiles][4], int m16_tile,
                                           const u32 (&b)[kTiles][kWords]) const {
    const u32(&a)[2][kWords] = left[m16_tile];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i + 1 < kWords; i += 2) {
        const u32 left_words[4] = {a[0][i], a[1][i], a[0][i + 1], a[1][i + 1]};
        const u32 right_words[2] = {b[tile][i], b[tile][i + 1]};
        mma_m16n8k16<Config::kElement>(acc[tile], left_words, right_words);
      }
      if constexpr (kWords % 2) {
        const u32 left_words[2] = {a[0][kWords - 1], a[1][kWords - 1]};
        mma_m16n8k8<Config::kElement>(acc[tile], left_words, b[tile][kWords - 1]);
      }
    }
  }

  // Stores the results of an m16 tile, whose two rows of this lane have 2 * kTiles neighbours each.
  __device__ __forceinline__ void store(const float (&acc)[kTiles][4], int m16_tile, int piece) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float v[2 * kTiles];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i)
        v[i] = activated<Config, FastMath>(acc[i / 2][2 * half + i % 2], p.alpha, 0.0f);
      u32 words[kTiles * sizeof(Config::Out::Bits) / 2];
      round_values<Config::Out>(words, v);
      const int row = fragment_row<Config::kLeftAlongK, kM16Tiles>(0, m16_tile, half);
      const i64 at = (i64)(piece / Config::kPieces) * (Config::kBlock * Config::kBlock) + row * Config::kBlock +
                     piece % Config::kPieces * Config::kPieceN;
      store_words<sizeof(words) / 4>(out + at, words);
    }
  }

  __device__ __forceinline__ void run() {
    constexpr int kAhead = Config::kAhead;
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) load_right(slot, slot);
    int loaded = -1;  // block row of op(A)
    for (int first = 0; first < pieces; first += kAhead) {
#pragma unroll
      for (int slot = 0; slot < kAhead; ++slot) {
        const int piece = first + slot;
        if (piece >= pieces) break;
        const int wanted = __shfl_sync(~0u, block_row, piece / Config::kPieces);
        if (wanted != loaded) load_left(__shfl_sync(~0u, left_at, piece / Config::kPieces));
        loaded = wanted;
        u32 b_words[kTiles][kWords];
        right_fragments(b_words, slot);
        load_right(slot, piece + kAhead);
#pragma unroll
        for (int m16_tile = 0; m16_tile < kM16Tiles; ++m16_tile) {
          float acc[kTiles][4] = {};
          multiply(acc, m16_tile, b_words);
          store(acc, m16_tile, piece);
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kResidentCtas)
    sdd_mma(const __grid_constant__ SddMmaParams p) {
  launch_dependents_and_wait();
  Run(p).run();
}
