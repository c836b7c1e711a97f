// Constants, arguments and shared memory of top_k.cuh.
//
// Compile-time, from top_k.py: KERNEL_NAME, KIND, THREADS, CTAS_PER_SM, VECTORS, CAPACITY, CLUSTER, BINS,
// SAMPLE_STRIDE, SAMPLE_VECTORS, PLAN_BYTES, WHOLE_ROWS, DTYPE, INDEX_BASE, BY_SCORE, TIES_LARGER, VALUES.
#pragma once

using uint32_t = unsigned int;
using uint64_t = unsigned long long;

namespace {

enum Kind { kShort, kStream, kAcross };  // a row in registers; a row streamed by one CTA; a row shared by a cluster
enum Dtype { kFloat32, kBfloat16, kFloat16 };
enum IndexBase { kFromStart, kAbsolute, kPlusOffset, kThroughPages };

constexpr Kind kKind = static_cast<Kind>(KIND);
constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr IndexBase kIndexBase = static_cast<IndexBase>(INDEX_BASE);
constexpr bool kByScore = BY_SCORE;
constexpr bool kTiesLarger = TIES_LARGER;
constexpr bool kValues = VALUES;
constexpr bool kWholeRows = WHOLE_ROWS;  // loads start before the window is known

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kPack = kDtype == kFloat32 ? 4 : 8;  // scores of a 16-byte vector
constexpr int kVectors = VECTORS;                  // vectors that a thread holds
constexpr int kCluster = CLUSTER;
constexpr int kCapacity = CAPACITY;  // candidates of a CTA
constexpr int kBins = BINS;          // of the linear histograms
constexpr int kListed = 256;         // scores of the bin where the cut lies that are ranked one against the other
constexpr int kMostK = 4096;

constexpr int kSampled = kPack / SAMPLE_STRIDE;  // scores of a vector that enter the sample
constexpr int kSampleVectors = SAMPLE_VECTORS;   // of a thread, in a cluster

constexpr int kKeyBins = 1024;
constexpr int kKeyBits = 10;
constexpr int kKeyShift = kDtype == kBfloat16 ? 16 : kDtype == kFloat16 ? 13 : 0;  // low key bits that say nothing

constexpr int kSharedBins = 512;  // of the histogram that a cluster exchanges, two 16-bit counts a word

static_assert(kVectors * kPack <= 32, "one bit a score in a word");
static_assert(kThreads % 32 == 0 && kWarps <= 32, "one lane a warp in block scans");
static_assert(kBins % kThreads == 0 && kKeyBins % kThreads == 0 && kBins >= kKeyBins, "bins of a thread");
static_assert(kCluster * kCapacity <= 65536, "16-bit counts");

struct Arguments {
  const void* logits;
  const int* row_starts;  // null: 0
  const int* row_ends;    // null: width
  const int* offsets;
  const int* page_table;
  int* indices;
  float* values;
  long long logits_stride, indices_stride, values_stride, page_stride;
  int width, k, page_size;
  int bitmap_words;  // 0: a row is never streamed, its positions would not fit
  float overshoot;   // the most candidates wanted, over k
};
static_assert(sizeof(Arguments) == 112, "_ARGUMENTS of top_k.py");

// Dynamic shared memory. Words are 4 bytes; the bitmap has a length of its own for each launch.
struct Candidate {
  float score;
  uint32_t position;
};

struct alignas(16) ShortPlan {
  uint64_t listed[kListed];
  uint32_t bins[kBins];
  uint32_t chosen[kThreads];  // bits of scores that the list decided
  uint32_t staged[1];         // k positions
};

struct alignas(16) StreamPlan {
  Candidate candidates[kCapacity];  // later the k positions
  uint64_t listed[kListed];
  uint32_t bins[kBins];
  uint32_t bitmap[4];  // bitmap_words
};

struct alignas(16) AcrossPlan {
  Candidate candidates[kCapacity];
  uint64_t listed[kListed];      // this CTA's, which the others read
  uint64_t all_listed[kListed];  // everybody's
  uint32_t bins[kBins];
  uint32_t sums[kKeyBins];
  uint32_t counts[kSharedBins / 2];  // which the others read
  uint32_t gathered[kCluster][kSharedBins / 2];
  uint32_t bitmap[4];  // bitmap_words
};

static_assert(sizeof(ShortPlan) + 4 * kMostK <= sizeof(StreamPlan) || kKind == kShort, "short rows in a streaming CTA");
static_assert(kKind == kShort || kCapacity >= kMostK / 2, "the k positions lie where the candidates were");

static_assert(sizeof(ShortPlan) <= PLAN_BYTES + 16 || kKind != kShort, "plan_bytes of top_k.py");
static_assert(sizeof(StreamPlan) <= PLAN_BYTES || kKind != kStream, "plan_bytes of top_k.py");
static_assert(sizeof(AcrossPlan) <= PLAN_BYTES || kKind != kAcross, "plan_bytes of top_k.py");

struct Cut {  // the bin where the k-th score lies
  uint32_t bin, above, inside;
};

}  // namespace
