// A kernel on the stand-ins, as a library. MACROS_FILE: the macros that it is compiled with, and SOURCE_FILE: its source,
// STATIC_SHARED: it has shared variables, DYNAMIC: its dynamic shared memory where that is another variable than `raw`.
#include "ptx.cuh"
// Behind what is precompiled.
#include MACROS_FILE
#ifdef STATIC_SHARED
#undef __shared__
#define __shared__ STANDIN_SHARED
#endif
// After what declares CUDA's words.
#include SOURCE_FILE

#ifdef DYNAMIC
namespace {
alignas(16) unsigned char DYNAMIC[229 * 1024] STANDIN_SHARED;
}
#else
#define DYNAMIC raw
#endif

namespace {

template <class... Parameters>
struct Entry {
  static constexpr int kCount = sizeof...(Parameters);
  static constexpr int kMaps = (0 + ... + std::is_same_v<Parameters, ptx::TensorMap>);
  static constexpr size_t kSizes[] = {sizeof(Parameters)...};

  template <void (*kKernel)(Parameters...), size_t... kNumbers>
  static void call(void** arguments, std::index_sequence<kNumbers...>) {
    kKernel(*static_cast<const Parameters*>(arguments[kNumbers])...);
  }
};

template <class... Parameters>
Entry<Parameters...> entry_of(void (*)(Parameters...));
using Of = decltype(entry_of(&KERNEL_NAME));

void run(void** arguments) { Of::call<&KERNEL_NAME>(arguments, std::make_index_sequence<Of::kCount>()); }

standin::Kernel kernel = {
    run, __start_standin_shared, __stop_standin_shared, DYNAMIC, Of::kCount, Of::kMaps, Of::kSizes, nullptr};

}  // namespace

extern "C" standin::Kernel* standin_kernel() { return &kernel; }
