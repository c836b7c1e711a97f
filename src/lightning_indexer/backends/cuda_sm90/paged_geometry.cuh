// The geometry of one instantiation of paged_mqa_logits.cuh, from PagedConfig, with its shared memory and arguments.
//
// Compile-time: HEADS, HEAD_DIM, NEXT_N, PAGE, FP4, UE8M0, CLEAN, OUT_BF16, GROUP_ROWS, WORKERS, CTAS_PER_SM, K_STAGES,
// Q_STAGES, MATH_REGISTERS, OTHER_REGISTERS (0: no setmaxnreg), Q_BOX, K_BOX, SHARED_BYTES, SHARED_LIMIT, KERNEL_NAME.
#pragma once

#include "out.cuh"
#include "ptx.cuh"

namespace {

constexpr bool kClean = CLEAN;
constexpr bool kFp4 = FP4;  // keys are MXFP4
constexpr int kHeads = HEADS, kHeadDim = HEAD_DIM, kNextN = NEXT_N, kPage = PAGE;
constexpr int kRowBytes = kFp4 ? kHeadDim / 2 : kHeadDim;  // of a key in the cache
static_assert(kHeads % 8 == 0 && kHeads >= 8 && kHeads <= 128, "HEADS: the lanes of a quad share them, two at a time");
static_assert(kHeadDim == 32 || kHeadDim == 64 || kHeadDim == 128, "HEAD_DIM: one swizzle span of TMA and WGMMA");
static_assert(!kFp4 || kHeadDim == 128, "FP4: a lane of a quad has one of a key's four blocks of 32 channels");
static_assert(kNextN >= 1 && kNextN <= 8, "NEXT_N: lanes below next_n hold what belongs to a row");
static_assert(kPage == 16 || kPage == 32 || kPage == 64 || kPage == 128, "PAGE: pages fill tiles, or tiles pages");

// Tile: 64 keys, the M of a WGMMA. Group: rows of a sequence whose heads are the N of one WGMMA.
constexpr int kTileKeys = 64;
constexpr int kGroupRows = GROUP_ROWS;
constexpr int kGroups = (kNextN + kGroupRows - 1) / kGroupRows;
constexpr int kPairs = kGroupRows * kHeads;
static_assert(kGroupRows >= 1 && kGroupRows <= kNextN && kPairs <= 256, "GROUP_ROWS: the N of a WGMMA is at most 256");
static_assert(!kFp4 || kPairs <= 128,
              "GROUP_ROWS: fp4 keys lie in registers beside the products, of 128 columns at most");
// Lanes of a quad that share the heads of a row. A quad sums 4 / kLanesPerRow rows at once.
constexpr int kLanesPerRow = kGroupRows % 4 == 0 ? 1 : kGroupRows % 2 == 0 ? 2 : 4;
constexpr int kRowsAtOnce = 4 / kLanesPerRow;
constexpr int kRowsPerLane = kGroupRows / kRowsAtOnce;
constexpr int kColumnPairs = kHeads / (2 * kLanesPerRow);  // pairs of heads that a lane sums for one row

// A block of a tile: a page, or the part of one that a tile holds.
constexpr int kBlocks = kPage < kTileKeys ? kTileKeys / kPage : 1;
constexpr int kBlockKeys = kTileKeys / kBlocks;
constexpr int kTilesPerPage = kPage > kTileKeys ? kPage / kTileKeys : 1;
// The scales of a page of 64 keys are the rows behind them, and come in the same load, swizzled like them (fp4 keys and
// theirs are not).
constexpr bool kScalesInLoad = kPage == kTileKeys;
constexpr int kScaleBytes = 4 * kTileKeys;

// Stages start where a swizzle pattern does.
__host__ __device__ constexpr int round_up(int bytes) { return (bytes + 1023) / 1024 * 1024; }
constexpr int kKStages = K_STAGES, kQStages = Q_STAGES;
constexpr int kTileBytes = kTileKeys * kRowBytes;
constexpr int kKStageBytes = kFp4 ? kTileBytes + kScaleBytes : round_up(kTileBytes + kScaleBytes);
constexpr int kQBytes = kGroups * kPairs * kHeadDim;
constexpr int kQStageBytes = round_up(kQBytes);
constexpr int kQLoadBytes = kRowsAtOnce * kHeads * kHeadDim;
constexpr int kWeights = (kPairs + 15) / 16 * 16;  // of a group: a lane reads four at a time
static_assert(kKStages >= 2 && kKStages <= 32, "K_STAGES: one is loaded while another is read; a lane looks up each");
static_assert(kQStages >= 1, "Q_STAGES: one at least");
static_assert(kPairs * kHeadDim % (8 * kHeadDim) == 0, "a group starts where a swizzle pattern does");

// Sides of a TMA box, channels first.
template <int... kSides>
struct Box {
  static constexpr int kRank = sizeof...(kSides);
  static constexpr int kSide[] = {kSides...};
  static constexpr int kBytes = (kSides * ...);  // of one byte an element
};
using QBox = Box<Q_BOX>;
using KBox = Box<K_BOX>;
static_assert(QBox::kRank == 5 && QBox::kSide[0] == kHeadDim && QBox::kSide[1] == 2 * kLanesPerRow &&
                  QBox::kSide[2] == kRowsAtOnce && QBox::kSide[3] == kColumnPairs && QBox::kSide[4] == 1,
              "Q_BOX: channels, heads of the lanes of a row, rows, pairs of heads, one sequence");
static_assert(QBox::kBytes == kQLoadBytes, "Q_BOX: whole rows");
static_assert(KBox::kRank == 3 && KBox::kSide[0] == kRowBytes && KBox::kSide[2] == 1 &&
                  KBox::kBytes == kBlockKeys * kRowBytes + (kScalesInLoad ? kScaleBytes : 0),
              "K_BOX: channels, the keys of a block (and their scales), one page");

// Warps: a math warpgroup for each worker; then one warpgroup of producer warps, one for each worker, and fill warps.
constexpr int kWorkers = WORKERS, kCtasPerSm = CTAS_PER_SM;
constexpr int kMathThreads = 128 * kWorkers, kThreads = kMathThreads + 128;
constexpr int kFillWarps = 4 - kWorkers;
static_assert(kWorkers >= 1 && kFillWarps >= 1, "WORKERS: one warpgroup holds their producer warps and a fill warp");

// Registers. A CTA starts with an even share of the file, in units of eight a thread; setmaxnreg moves them.
constexpr int kLaunchRegisters = 65536 / (kThreads * kCtasPerSm) / 8 * 8;
constexpr int kMathRegisters = MATH_REGISTERS, kOtherRegisters = OTHER_REGISTERS;
constexpr bool kMoveRegisters = kMathRegisters > 0;
static_assert(!kMoveRegisters || (kMathRegisters % 8 == 0 && kOtherRegisters % 8 == 0 && kOtherRegisters >= 24 &&
                                  kOtherRegisters <= kLaunchRegisters && kLaunchRegisters <= kMathRegisters),
              "MATH_REGISTERS, OTHER_REGISTERS: multiples of 8, above and below what a thread starts with");
static_assert(kMathThreads * kMathRegisters + 128 * kOtherRegisters <= kThreads * kLaunchRegisters,
              "MATH_REGISTERS, OTHER_REGISTERS: together more than a CTA starts with");

// One load of a worker's queue: the tile `tile` of sequence `sequence`.
struct alignas(16) Unit {
  int sequence;
  int tile;
  int left;    // tiles of this sequence from here on that the worker has
  int blocks;  // of the tile that hold a key that some row sees
  int block[kBlocks];
};

// What a math warpgroup works on between two loads of q: successive tiles of one sequence.
struct Segment {
  int sequence;
  int first_tile;
  int tiles;            // 0: there are no more segments
  int lengths[kNextN];  // as the caller gave them
};

struct alignas(1024) Worker {
  unsigned char q[kQStages][kQStageBytes];
  unsigned char k[kKStages][kKStageBytes];
  alignas(16) float weights[kQStages][kGroups][kWeights];
  Unit unit[32];
  Segment segment[kQStages];
  uint64_t q_full[kQStages], q_empty[kQStages], k_full[kKStages], k_empty[kKStages];
};

constexpr int kPrefixEntries = 512;
constexpr int kDepths = 32;  // exponents below a key's largest block, from 19 on nothing is left of a code
struct Shared {
  Worker worker[kWorkers];
  alignas(16) uint32_t neg_inf[512];  // the source of bulk stores
  int warp_tiles[kMathThreads / 32];
  int prefix[kPrefixEntries + 1];        // tiles of all sequences before an entry of them
  alignas(8) uint2 magnitudes[kDepths];  // of fp4 keys
};
static_assert(sizeof(Shared) == SHARED_BYTES, "SHARED_BYTES: PagedConfig.shared_bytes and struct Shared differ");
static_assert(SHARED_BYTES <= SHARED_LIMIT, "SHARED_BYTES: more shared memory than a CTA may have");

struct Arguments {
  const float* weights;
  const int* lengths;
  const int* tables;
  const int* indices;          // null: sequence b reads row b of the tables
  const unsigned char* cache;  // for scales that do not come with the keys
  Out* out;
  long long w_stride, length_stride, row_length_stride, table_stride, cache_stride, out_stride;
  int batch, width;
  int keys;             // the most that a row sees
  int derived_lengths;  // 1: lengths [B], of each sequence's last row; 0: [B, next_n], a row's own
  // As if every row saw `keys` keys: tiles of a sequence, and those of a piece; `guess_rest` pieces have one more.
  int guess_tiles, guess_share, guess_rest;
  uint32_t pieces_inverse, guess_inverse;  // ceil(2^32 / x), at most 2^32 - 1, of the pieces and of guess_tiles
};

// bar.sync and bar.arrive, by what they wait for.
enum NamedBarrier : int {
  kAllHere = 0,    // the whole CTA, twice: the warps' sums are there, then the mbarriers and the prefix sums
  kFillReady = 1,  // fill warps: the source of the bulk stores is there
  kQOrdered = 2,   // and + worker: its math warps, q is in the order of fp4 keys
};

}  // namespace
