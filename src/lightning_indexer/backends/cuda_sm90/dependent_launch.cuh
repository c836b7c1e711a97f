// Programmatic dependent launch: a kernel starts while the one in front of it ends.
#pragma once

namespace {

// The next kernel may start as soon as every CTA of this one has said so.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// Until the kernel in front has ended: before what it writes is read, and what it reads is written.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace
