// A stand-in for the backend's dependent_launch.cuh on the CPU.
#pragma once

#include "ptx.cuh"

inline void let_next_start() { standin::release_dependents(); }
inline void wait_for_previous() { standin::wait_for_front(); }
