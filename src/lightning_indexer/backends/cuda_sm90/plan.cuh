// Constants, the shared-memory plan and the arguments of mqa_logits.cuh.
//
// Compile-time, from config.py: HEADS, HEAD_DIM, CLEAN, COMPRESSED, OUT_BF16, KSTAGES, QSTAGES, SHARED_BYTES,
// KERNEL_NAME.
#pragma once

#include "ptx.cuh"

namespace {

constexpr int kHeads = HEADS;
constexpr int kHeadDim = HEAD_DIM;
constexpr bool kClean = CLEAN;
constexpr bool kCompressed = COMPRESSED;

constexpr int kPairs = 256;                              // (row, head) pairs of a tile
constexpr int kRows = kPairs / kHeads;                   // query rows of a row block
constexpr int kLanesPerRow = kRows < 4 ? 4 / kRows : 1;  // lanes of a quad that share a row (H = 128)
constexpr int kRowsPerLane = kRows > 4 ? kRows / 4 : 1;  // rows that a lane sums
constexpr int kRowsPerLoad = kRows < 4 ? kRows : 4;
constexpr int kTileKeys = 64;
constexpr int kWorkers = 2;        // each a producer warp and a math warpgroup
constexpr int kKStages = KSTAGES;  // tiles of keys, per worker
constexpr int kQStages = QSTAGES;  // row blocks, per worker

constexpr int kBarriers = 2 * (kQStages + kKStages);  // of a worker
constexpr int kMathThreads = 128 * kWorkers;
constexpr int kThreads = kMathThreads + 128;
constexpr int kFillWarps = 4 - kWorkers;
constexpr int kScratch = 2048;
constexpr int kKnownBlocks = 1024;
constexpr int kFillColumns = 2048;
constexpr int kMathRegisters = 224;
constexpr int kOtherRegisters = 56;
static_assert(2 * kMathRegisters + kOtherRegisters <= 3 * 168, "168 registers a thread at launch");
static_assert(kHeads == 8 || kHeads == 16 || kHeads == 32 || kHeads == 64 || kHeads == 128, "H");
static_assert(kHeadDim == 32 || kHeadDim == 64 || kHeadDim == 128, "D, one swizzle span");

#if OUT_BF16
using Out = unsigned short;
constexpr uint32_t kNegInfPair = 0xFF80FF80u;
#else
using Out = float;
constexpr uint32_t kNegInfPair = 0xFF800000u;
#endif

struct RowBlock {  // what a math warpgroup needs to know of one row block
  int first_row;
  int first_key;
  int tiles;     // 0 ends the worker's piece
  int inner_lo;  // every row's window holds [inner_lo, inner_hi): no masks there
  int inner_hi;
  int lo[kRows];
  int hi[kRows];
  int origin[kRows];  // position of column 0
};

struct alignas(1024) Worker {
  unsigned char q[kQStages][kPairs * kHeadDim];
  unsigned char k[kKStages][kTileKeys * kHeadDim];
  alignas(16) float weights[kQStages][kPairs];
  RowBlock block[kQStages];
  uint64_t q_full[kQStages], q_empty[kQStages], k_full[kKStages], k_empty[kKStages];  // kBarriers in a row
};

struct Shared {
  Worker worker[kWorkers];
  int first_key[kKnownBlocks];  // of row blocks, up to so many
  union {
    alignas(16) int cost[kScratch];          // of row blocks, while the pieces are found
    alignas(16) uint32_t neg_inf[kScratch];  // 8 KiB, the source of the bulk stores
  };
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "config.py's shared_bytes");

struct Arguments {
  const unsigned char* q;  // for a prefetch; null where the heads of a row are not contiguous
  const float* kv_scale;
  const float* weights;
  const int* ks;
  const int* ke;
  Out* out;
  long long q_stride, w_stride, out_stride;
  int rows, keys, width;
  int enter_cost;  // of a row block, in tiles: its q, weights and windows must arrive
};

}  // namespace
