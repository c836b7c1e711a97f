// The shared-memory plan and the arguments of the kernels on product.cuh.
//
// Compile-time, from config.py: geometry.cuh's, and CLEAN, COMPRESSED, OUT_BF16, APPEND, ROWS_LISTED,
// KERNEL_NAME.
#pragma once

#include "geometry.cuh"
#include "out.cuh"
#include "ptx.cuh"

namespace {

constexpr bool kClean = CLEAN;
constexpr bool kCompressed = COMPRESSED;
constexpr bool kAppend = APPEND;  // scores that pass a gate are appended to lists; none is stored (append.cuh)

// Where lists are kept a piece of the work belongs to a CTA, whose workers take its tiles in turn: half as many pieces,
// so half as many lists.
constexpr int kPiecesPerCta = kAppend ? 1 : G::kWorkers;
constexpr int kTileStep = kAppend ? G::kWorkers : 1;  // tiles from one of a worker's to its next

constexpr int kScratch = 2048;
constexpr int kKnownBlocks = 1024;
constexpr int kFillColumns = 2048;

#if APPEND
constexpr int kLists = 4 * G::kWorkers;  // of a row and a piece: one for each math warp

struct alignas(16) Gate {
  float at_least;  // what passes in tiles that start at or before last_key
  float above;     // what passes behind: the next larger number
  int last_key;
  float highest;  // of the sample, for the selection
};

// Places of the lists of one row block and piece.
struct alignas(16) Lists {
  Gate gate[G::kRows];
  int* counts;  // of the block's first row and the first warp; null: there was no room for this piece
  int first;    // likewise, in Arguments.candidates
  int step;     // 1: upwards from the start of a list's room; -1: downwards from its end
  int alone;    // the piece is all of the block
};
#else
struct Lists {};
#endif

struct RowBlock : Lists {  // what a math warpgroup needs to know of one row block
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
#if APPEND
  int middle;  // place of the piece in the middle of a row block
#endif
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
#if ROWS_LISTED
  const int* listed;  // [rows]: where weights, ks and ke of a row lie; q and the result count from 0
#endif
#if APPEND
  const Gate* gates;  // [rows]
  int2* candidates;   // [places, kRows, kLists, room]: a score's bits and its key
  int* counts;        // [places, 2, kRows, kLists]: of what grows upwards, and of what grows downwards
  int2* middles;      // [CTAs]: the row block that this CTA's piece lies within, or -1, and its place or -1
  int* taken;         // places behind those of the row blocks, zero at the start
  int room;           // candidates of a list
  int places;         // one a row block, and some for pieces that neither begin nor end one
#endif
};

// bar.sync and bar.arrive, by what they wait for.
enum NamedBarrier : int {
  kAllHere = 0,       // the whole CTA: the mbarriers and the costs are there
  kPiecesFound = 1,   // producer and fill warps: the costs have been read, -inf may take their place
  kFillReady = 2,     // fill warps: the source of the bulk stores is there
  kCostsCleared = 3,  // math warps: before costs of several blocks are added up
  kPlaceTaken = 4,    // producer warps: the place of the piece in the middle is known
};

}  // namespace
