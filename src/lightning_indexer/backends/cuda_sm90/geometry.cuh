// The geometry of one instantiation, from config.py's KernelConfig, and what the hardware asks of it.
//
// Compile-time, as macros: HEADS, HEAD_DIM, PAIRS, TILE_KEYS, WORKERS, THREADS, K_STAGES, Q_STAGES, MATH_REGISTERS,
// OTHER_REGISTERS, Q_BOX, K_BOX, SHARED_BYTES, SHARED_LIMIT.
#pragma once

namespace {

// Sides of a TMA box, channels first.
template <int... kSides>
struct Box {
  static constexpr int kRank = sizeof...(kSides);
  static constexpr int kSide[] = {kSides...};
  static constexpr int kBytes = (kSides * ...);  // of one byte an element
  static constexpr bool kFits = ((kSides >= 1 && kSides <= 256) && ...);
};

template <int kHeads_, int kHeadDim_, int kPairs_, int kTileKeys_, int kWorkers_, int kThreads_, int kKStages_,
          int kQStages_, int kMathRegisters_, int kOtherRegisters_, class QBox, class KBox>
struct Geometry {
  // Tile
  static constexpr int kHeads = kHeads_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kPairs = kPairs_;                          // (row, head) pairs of a tile
  static constexpr int kRows = kPairs / kHeads;                   // query rows of a row block
  static constexpr int kLanesPerRow = kRows < 4 ? 4 / kRows : 1;  // lanes of a quad that share a row (H = 128)
  static constexpr int kRowsPerLane = kRows > 4 ? kRows / 4 : 1;  // rows that a lane sums
  static constexpr int kRowsPerLoad = kRows < 4 ? kRows : 4;
  static constexpr int kTileKeys = kTileKeys_;
  static_assert(kHeads == 8 || kHeads == 16 || kHeads == 32 || kHeads == 64 || kHeads == 128,
                "HEADS: a lane of a quad sums whole rows, or half of one");
  static_assert(kHeadDim == 32 || kHeadDim == 64 || kHeadDim == 128, "HEAD_DIM: one swizzle span of TMA and WGMMA");
  static_assert(kTileKeys == 64, "TILE_KEYS: the keys of a tile are the M of one WGMMA, 64");
  static_assert(kPairs == 256, "PAIRS: the (row, head) pairs of a tile are the N of one WGMMA, 256");

  // Queues between TMA and the tensor cores
  static constexpr int kKStages = kKStages_;  // tiles of keys, per worker
  static constexpr int kQStages = kQStages_;  // row blocks, per worker
  static constexpr int kQTileBytes = kPairs * kHeadDim;
  static constexpr int kKTileBytes = kTileKeys * kHeadDim;
  static_assert(kKStages >= 2, "K_STAGES: a tile is given back after the next product is issued, so two at least");
  static_assert(kQStages >= 2, "Q_STAGES: a row block is given back after the next one has begun, so two at least");
  static_assert(kQTileBytes % 1024 == 0 && kKTileBytes % 1024 == 0, "a stage starts where a swizzle pattern does");
  static_assert(QBox::kFits && KBox::kFits, "Q_BOX, K_BOX: a side of a TMA box is 1 to 256");
  static_assert(QBox::kSide[0] == kHeadDim && KBox::kSide[0] == kHeadDim, "Q_BOX, K_BOX: inner bytes, a swizzle span");
  static_assert(QBox::kRank == 5 && QBox::kSide[1] == 2 && QBox::kSide[2] == kLanesPerRow &&
                    QBox::kSide[3] == kRowsPerLoad && QBox::kSide[4] == kHeads / kLanesPerRow / 2,
                "Q_BOX: channels, even or odd head, lanes of a row, rows, pairs of heads");
  static_assert(QBox::kBytes == kRowsPerLoad * kHeads * kHeadDim, "Q_BOX: whole rows");
  static_assert(KBox::kRank == 2 && KBox::kBytes == kKTileBytes, "K_BOX: one load, one tile of keys");

  // Warps: a math warpgroup for each worker; then one warpgroup of producer warps, one for each worker, and fill warps
  static constexpr int kWorkers = kWorkers_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kMathThreads = 128 * kWorkers;
  static constexpr int kFillWarps = 4 - kWorkers;
  static_assert(kWorkers >= 1 && kFillWarps >= 1, "WORKERS: one warpgroup holds their producer warps and a fill warp");
  static_assert(kThreads == kMathThreads + 128, "THREADS: a math warpgroup for each worker, and one of other warps");

  // Registers. The CTA starts with an even share of the file, in units of eight a thread; setmaxnreg moves them.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kMathRegisters = kMathRegisters_;
  static constexpr int kOtherRegisters = kOtherRegisters_;
  static_assert(kMathRegisters % 8 == 0 && kMathRegisters >= 24 && kMathRegisters <= 256 && kOtherRegisters % 8 == 0 &&
                    kOtherRegisters >= 24 && kOtherRegisters <= 256,
                "MATH_REGISTERS, OTHER_REGISTERS: setmaxnreg takes multiples of 8 from 24 to 256");
  static_assert(kOtherRegisters <= kLaunchRegisters && kLaunchRegisters <= kMathRegisters,
                "MATH_REGISTERS, OTHER_REGISTERS: setmaxnreg.dec lowers what a thread starts with, .inc raises it");
  static_assert(kMathThreads * kMathRegisters + 128 * kOtherRegisters <= kThreads * kLaunchRegisters,
                "MATH_REGISTERS, OTHER_REGISTERS: together more than the 65536 that the CTA starts with");
  static_assert(kMathRegisters >= kPairs / 2 + kPairs / 4, "MATH_REGISTERS: accumulators and weights of a lane");
};

using G = Geometry<HEADS, HEAD_DIM, PAIRS, TILE_KEYS, WORKERS, THREADS, K_STAGES, Q_STAGES, MATH_REGISTERS,
                   OTHER_REGISTERS, Box<Q_BOX>, Box<K_BOX>>;
static_assert(SHARED_BYTES <= SHARED_LIMIT, "SHARED_BYTES: more shared memory than a CTA may have");

}  // namespace
