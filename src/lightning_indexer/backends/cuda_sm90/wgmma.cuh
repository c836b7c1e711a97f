// WGMMA of e4m3 operands, the first in shared memory or registers: descriptors, fences, and m64nNk32 for every N that
// the instruction has.
// Names follow the PTX ISA.
#pragma once

#include "ptx.cuh"

namespace ptx {

// Matrix descriptor of a K-major operand whose rows are kRowBytes long and swizzled over kRowBytes.
template <int kRowBytes>
__device__ __forceinline__ uint64_t matrix_descriptor(const void* pointer) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128, "a swizzle span of Hopper");
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  constexpr uint64_t kGroupBytes = 8 * kRowBytes;  // eight rows, the unit of the swizzle pattern
  return (shared_address(pointer) & 0x3FFFF) >> 4 | uint64_t(1) << 16 | (kGroupBytes >> 4) << 32 | kSwizzle << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait_all() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// d [64, N] (+)= a [64, 32] * b [N, 32]^T, both e4m3 in shared memory; N is twice the registers of d, a multiple of 8.
// accumulate = 0 starts from zero.
// clang-format off
#define PTX_WGMMA(N, REGISTERS, OPERANDS, A, B, ACCUMULATE)                                             \
  __device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {    \
    asm volatile(                                                                                       \
        "{\n"                                                                                           \
        ".reg .pred p;\n"                                                                               \
        "setp.ne.b32 p, %" #ACCUMULATE ", 0;\n"                                                         \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS "}, %" #A ", %" #B       \
        ", p, 1, 1;\n"                                                                                  \
        "}"                                                                                             \
        : OPERANDS                                                                                      \
        : "l"(a), "l"(b), "r"(accumulate));                                                             \
  }

// Four registers an eighth of N more: as the assembler writes them, and as operands.
#define PTX_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PTX_R8 "%0, %1, %2, %3"
#define PTX_R16 PTX_R8 ", %4, %5, %6, %7"
#define PTX_R24 PTX_R16 ", %8, %9, %10, %11"
#define PTX_R32 PTX_R24 ", %12, %13, %14, %15"
#define PTX_R40 PTX_R32 ", %16, %17, %18, %19"
#define PTX_R48 PTX_R40 ", %20, %21, %22, %23"
#define PTX_R56 PTX_R48 ", %24, %25, %26, %27"
#define PTX_R64 PTX_R56 ", %28, %29, %30, %31"
#define PTX_R72 PTX_R64 ", %32, %33, %34, %35"
#define PTX_R80 PTX_R72 ", %36, %37, %38, %39"
#define PTX_R88 PTX_R80 ", %40, %41, %42, %43"
#define PTX_R96 PTX_R88 ", %44, %45, %46, %47"
#define PTX_R104 PTX_R96 ", %48, %49, %50, %51"
#define PTX_R112 PTX_R104 ", %52, %53, %54, %55"
#define PTX_R120 PTX_R112 ", %56, %57, %58, %59"
#define PTX_R128 PTX_R120 ", %60, %61, %62, %63"
#define PTX_R136 PTX_R128 ", %64, %65, %66, %67"
#define PTX_R144 PTX_R136 ", %68, %69, %70, %71"
#define PTX_R152 PTX_R144 ", %72, %73, %74, %75"
#define PTX_R160 PTX_R152 ", %76, %77, %78, %79"
#define PTX_R168 PTX_R160 ", %80, %81, %82, %83"
#define PTX_R176 PTX_R168 ", %84, %85, %86, %87"
#define PTX_R184 PTX_R176 ", %88, %89, %90, %91"
#define PTX_R192 PTX_R184 ", %92, %93, %94, %95"
#define PTX_R200 PTX_R192 ", %96, %97, %98, %99"
#define PTX_R208 PTX_R200 ", %100, %101, %102, %103"
#define PTX_R216 PTX_R208 ", %104, %105, %106, %107"
#define PTX_R224 PTX_R216 ", %108, %109, %110, %111"
#define PTX_R232 PTX_R224 ", %112, %113, %114, %115"
#define PTX_R240 PTX_R232 ", %116, %117, %118, %119"
#define PTX_R248 PTX_R240 ", %120, %121, %122, %123"
#define PTX_R256 PTX_R248 ", %124, %125, %126, %127"
#define PTX_O8 PTX_F4(0)
#define PTX_O16 PTX_O8, PTX_F4(4)
#define PTX_O24 PTX_O16, PTX_F4(8)
#define PTX_O32 PTX_O24, PTX_F4(12)
#define PTX_O40 PTX_O32, PTX_F4(16)
#define PTX_O48 PTX_O40, PTX_F4(20)
#define PTX_O56 PTX_O48, PTX_F4(24)
#define PTX_O64 PTX_O56, PTX_F4(28)
#define PTX_O72 PTX_O64, PTX_F4(32)
#define PTX_O80 PTX_O72, PTX_F4(36)
#define PTX_O88 PTX_O80, PTX_F4(40)
#define PTX_O96 PTX_O88, PTX_F4(44)
#define PTX_O104 PTX_O96, PTX_F4(48)
#define PTX_O112 PTX_O104, PTX_F4(52)
#define PTX_O120 PTX_O112, PTX_F4(56)
#define PTX_O128 PTX_O120, PTX_F4(60)
#define PTX_O136 PTX_O128, PTX_F4(64)
#define PTX_O144 PTX_O136, PTX_F4(68)
#define PTX_O152 PTX_O144, PTX_F4(72)
#define PTX_O160 PTX_O152, PTX_F4(76)
#define PTX_O168 PTX_O160, PTX_F4(80)
#define PTX_O176 PTX_O168, PTX_F4(84)
#define PTX_O184 PTX_O176, PTX_F4(88)
#define PTX_O192 PTX_O184, PTX_F4(92)
#define PTX_O200 PTX_O192, PTX_F4(96)
#define PTX_O208 PTX_O200, PTX_F4(100)
#define PTX_O216 PTX_O208, PTX_F4(104)
#define PTX_O224 PTX_O216, PTX_F4(108)
#define PTX_O232 PTX_O224, PTX_F4(112)
#define PTX_O240 PTX_O232, PTX_F4(116)
#define PTX_O248 PTX_O240, PTX_F4(120)
#define PTX_O256 PTX_O248, PTX_F4(124)

PTX_WGMMA(8, PTX_R8, PTX_O8, 4, 5, 6)
PTX_WGMMA(16, PTX_R16, PTX_O16, 8, 9, 10)
PTX_WGMMA(24, PTX_R24, PTX_O24, 12, 13, 14)
PTX_WGMMA(32, PTX_R32, PTX_O32, 16, 17, 18)
PTX_WGMMA(40, PTX_R40, PTX_O40, 20, 21, 22)
PTX_WGMMA(48, PTX_R48, PTX_O48, 24, 25, 26)
PTX_WGMMA(56, PTX_R56, PTX_O56, 28, 29, 30)
PTX_WGMMA(64, PTX_R64, PTX_O64, 32, 33, 34)
PTX_WGMMA(72, PTX_R72, PTX_O72, 36, 37, 38)
PTX_WGMMA(80, PTX_R80, PTX_O80, 40, 41, 42)
PTX_WGMMA(88, PTX_R88, PTX_O88, 44, 45, 46)
PTX_WGMMA(96, PTX_R96, PTX_O96, 48, 49, 50)
PTX_WGMMA(104, PTX_R104, PTX_O104, 52, 53, 54)
PTX_WGMMA(112, PTX_R112, PTX_O112, 56, 57, 58)
PTX_WGMMA(120, PTX_R120, PTX_O120, 60, 61, 62)
PTX_WGMMA(128, PTX_R128, PTX_O128, 64, 65, 66)
PTX_WGMMA(136, PTX_R136, PTX_O136, 68, 69, 70)
PTX_WGMMA(144, PTX_R144, PTX_O144, 72, 73, 74)
PTX_WGMMA(152, PTX_R152, PTX_O152, 76, 77, 78)
PTX_WGMMA(160, PTX_R160, PTX_O160, 80, 81, 82)
PTX_WGMMA(168, PTX_R168, PTX_O168, 84, 85, 86)
PTX_WGMMA(176, PTX_R176, PTX_O176, 88, 89, 90)
PTX_WGMMA(184, PTX_R184, PTX_O184, 92, 93, 94)
PTX_WGMMA(192, PTX_R192, PTX_O192, 96, 97, 98)
PTX_WGMMA(200, PTX_R200, PTX_O200, 100, 101, 102)
PTX_WGMMA(208, PTX_R208, PTX_O208, 104, 105, 106)
PTX_WGMMA(216, PTX_R216, PTX_O216, 108, 109, 110)
PTX_WGMMA(224, PTX_R224, PTX_O224, 112, 113, 114)
PTX_WGMMA(232, PTX_R232, PTX_O232, 116, 117, 118)
PTX_WGMMA(240, PTX_R240, PTX_O240, 120, 121, 122)
PTX_WGMMA(248, PTX_R248, PTX_O248, 124, 125, 126)
PTX_WGMMA(256, PTX_R256, PTX_O256, 128, 129, 130)

// The same with a in registers: a[0] and a[2] are channels 4t to 4t + 3 and 16 + 4t to 19 + 4t of row lane / 4 of a
// warp's 16, t = lane % 4; a[1] and a[3] those of the row eight below.
#define PTX_WGMMA_A(N, REGISTERS, OPERANDS, A0, A1, A2, A3, B, ACCUMULATE)                                          \
  __device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {    \
    asm volatile(                                                                                                   \
        "{\n"                                                                                                       \
        ".reg .pred p;\n"                                                                                           \
        "setp.ne.b32 p, %" #ACCUMULATE ", 0;\n"                                                                     \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS "}, {%" #A0 ", %" #A1 ", %" #A2       \
        ", %" #A3 "}, %" #B ", p, 1, 1;\n"                                                                          \
        "}"                                                                                                         \
        : OPERANDS                                                                                                  \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                     \
  }

PTX_WGMMA_A(8, PTX_R8, PTX_O8, 4, 5, 6, 7, 8, 9)
PTX_WGMMA_A(16, PTX_R16, PTX_O16, 8, 9, 10, 11, 12, 13)
PTX_WGMMA_A(24, PTX_R24, PTX_O24, 12, 13, 14, 15, 16, 17)
PTX_WGMMA_A(32, PTX_R32, PTX_O32, 16, 17, 18, 19, 20, 21)
PTX_WGMMA_A(40, PTX_R40, PTX_O40, 20, 21, 22, 23, 24, 25)
PTX_WGMMA_A(48, PTX_R48, PTX_O48, 24, 25, 26, 27, 28, 29)
PTX_WGMMA_A(56, PTX_R56, PTX_O56, 28, 29, 30, 31, 32, 33)
PTX_WGMMA_A(64, PTX_R64, PTX_O64, 32, 33, 34, 35, 36, 37)
PTX_WGMMA_A(72, PTX_R72, PTX_O72, 36, 37, 38, 39, 40, 41)
PTX_WGMMA_A(80, PTX_R80, PTX_O80, 40, 41, 42, 43, 44, 45)
PTX_WGMMA_A(88, PTX_R88, PTX_O88, 44, 45, 46, 47, 48, 49)
PTX_WGMMA_A(96, PTX_R96, PTX_O96, 48, 49, 50, 51, 52, 53)
PTX_WGMMA_A(104, PTX_R104, PTX_O104, 52, 53, 54, 55, 56, 57)
PTX_WGMMA_A(112, PTX_R112, PTX_O112, 56, 57, 58, 59, 60, 61)
PTX_WGMMA_A(120, PTX_R120, PTX_O120, 60, 61, 62, 63, 64, 65)
PTX_WGMMA_A(128, PTX_R128, PTX_O128, 64, 65, 66, 67, 68, 69)
PTX_WGMMA_A(136, PTX_R136, PTX_O136, 68, 69, 70, 71, 72, 73)
PTX_WGMMA_A(144, PTX_R144, PTX_O144, 72, 73, 74, 75, 76, 77)
PTX_WGMMA_A(152, PTX_R152, PTX_O152, 76, 77, 78, 79, 80, 81)
PTX_WGMMA_A(160, PTX_R160, PTX_O160, 80, 81, 82, 83, 84, 85)
PTX_WGMMA_A(168, PTX_R168, PTX_O168, 84, 85, 86, 87, 88, 89)
PTX_WGMMA_A(176, PTX_R176, PTX_O176, 88, 89, 90, 91, 92, 93)
PTX_WGMMA_A(184, PTX_R184, PTX_O184, 92, 93, 94, 95, 96, 97)
PTX_WGMMA_A(192, PTX_R192, PTX_O192, 96, 97, 98, 99, 100, 101)
PTX_WGMMA_A(200, PTX_R200, PTX_O200, 100, 101, 102, 103, 104, 105)
PTX_WGMMA_A(208, PTX_R208, PTX_O208, 104, 105, 106, 107, 108, 109)
PTX_WGMMA_A(216, PTX_R216, PTX_O216, 108, 109, 110, 111, 112, 113)
PTX_WGMMA_A(224, PTX_R224, PTX_O224, 112, 113, 114, 115, 116, 117)
PTX_WGMMA_A(232, PTX_R232, PTX_O232, 116, 117, 118, 119, 120, 121)
PTX_WGMMA_A(240, PTX_R240, PTX_O240, 120, 121, 122, 123, 124, 125)
PTX_WGMMA_A(248, PTX_R248, PTX_O248, 124, 125, 126, 127, 128, 129)
PTX_WGMMA_A(256, PTX_R256, PTX_O256, 128, 129, 130, 131, 132, 133)
// clang-format on

}  // namespace ptx
