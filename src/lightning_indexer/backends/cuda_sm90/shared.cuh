// The shared-memory plan and the arguments of mqa_logits.cuh.
//
// Compile-time, from config.py: geometry.cuh's, and CLEAN, COMPRESSED, OUT_BF16, KERNEL_NAME.
#pragma once

#include "geometry.cuh"
#include "out.cuh"
#include "ptx.cuh"

namespace {

constexpr bool kClean = CLEAN;
constexpr bool kCompressed = COMPRESSED;

constexpr int kScratch = 2048;
constexpr int kKnownBlocks = 1024;
constexpr int kFillColumns = 2048;

struct RowBlock {  // what a math warpgroup needs to know of one row block
  int first_row;
  int first_key;
  int tiles;     // 0 ends the worker's piece
  int inner_lo;  // every row's window holds [inner_lo, inner_hi): no masks there
  int inner_hi;
  int lo[G::kRows];
  int hi[G::kRows];
  int origin[G::kRows];  // position of column 0
};

struct alignas(1024) Worker {
  unsigned char q[G::kQStages][G::kQTileBytes];
  unsigned char k[G::kKStages][G::kKTileBytes];
  alignas(16) float weights[G::kQStages][G::kPairs];
  RowBlock block[G::kQStages];
  uint64_t q_full[G::kQStages], q_empty[G::kQStages], k_full[G::kKStages], k_empty[G::kKStages];
};

struct Shared {
  Worker worker[G::kWorkers];
  int first_key[kKnownBlocks];  // of row blocks, up to so many
  union {
    alignas(16) int cost[kScratch];          // of row blocks, while the pieces are found
    alignas(16) uint32_t neg_inf[kScratch];  // 8 KiB, the source of the bulk stores
  };
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: KernelConfig.shared_bytes and struct Shared differ");

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

// bar.sync and bar.arrive, by what they wait for.
enum NamedBarrier : int {
  kAllHere = 0,       // the whole CTA: the mbarriers and the costs are there
  kPiecesFound = 1,   // producer and fill warps: the costs have been read, -inf may take their place
  kFillReady = 2,     // fill warps: the source of the bulk stores is there
  kCostsCleared = 3,  // math warps: before costs of several blocks are added up
};

}  // namespace
