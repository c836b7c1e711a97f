// Which keys are the sample: one of every `stride`, at a place that differs from one to the next, so that nothing
// periodic in the keys is taken for all of them.
#pragma once

namespace {

struct Sample {
  int keys, stride;

  __device__ __forceinline__ int count() const { return (keys - 1) / stride + 1; }

  // Of sample i, the same in every call.
  __device__ __forceinline__ int position(int i) const {
    const int first = i * stride, span = min(stride, keys - first);
    const unsigned mixed = (static_cast<unsigned>(i) * 0x9E3779B1u) ^ (static_cast<unsigned>(i) * 0x85EBCA6Bu >> 13);
    return first + static_cast<int>((mixed >> 8 & 0xFFFF) * span >> 16);
  }

  // How many lie before `key`, which is within [0, keys].
  __device__ __forceinline__ int before(int key) const {
    const int i = key / stride;
    return i < count() && position(i) < key ? i + 1 : i;
  }
};

}  // namespace
