// How a candidate lies in its list: the score, and a code of the key in as few bytes as hold it.
//
// A list is that of one math warp, which computes kListKeys keys of every kListStep: the code counts those from the
// list's first key on. Compile-time, from mqa_topk_config.py: CODE_BYTES.
#pragma once

namespace {

constexpr int kListKeys = 16;
constexpr int kListStep = 128;

#if CODE_BYTES == 2
using Code = unsigned short;
#else
using Code = unsigned int;
#endif
static_assert(sizeof(Code) == CODE_BYTES, "2 or 4");

// Of the candidates of one list, or of its part that grows upwards or downwards.
struct alignas(8) Count {
  int count;
  int first_key;  // of code 0
};

}  // namespace
