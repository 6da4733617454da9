// The C interface that every library built from this folder has, and what its sources share.
//
// A library holds one instantiation: one kind of problem, one tile, one architecture. It allocates nothing, reads no device memory on the host, and
// works on the stream that it is given; all pointers are device pointers. Functions return 0, or a code that moe_cutlass_error turns into text.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cutlass/cutlass.h"

// Of this interface; the Python side refuses a library that has another number.
#define MOE_CUTLASS_INTERFACE 1

#define MOE_EXPORT extern "C" __attribute__((visibility("default")))

namespace moe {

enum Code : int {
  kOk = 0,
  kBadArgument = 1,
  kSmallWorkspace = 2,
  kCutlass = 100,  // + cutlass::Status
  kCuda = 1000,    // + cudaError_t
};

inline int code_of(cudaError_t error) { return error == cudaSuccess ? kOk : kCuda + static_cast<int>(error); }

inline int code_of(cutlass::Status status) {
  if (status == cutlass::Status::kSuccess) return kOk;
  cudaError_t const cause = cudaGetLastError();  // says more, and must not be left for whoever asks next
  return cause == cudaSuccess ? kCutlass + static_cast<int>(status) : code_of(cause);
}

// The runtime in this library is its own copy: it follows the thread's current context, which torch has set; this makes sure.
inline cudaError_t use_device(int device) {
  int current = -1;
  cudaError_t const error = cudaGetDevice(&current);
  return error == cudaSuccess && current != device ? cudaSetDevice(device) : error;
}

template <class Kernel>
cudaError_t allow_shared_memory() {
  constexpr int size = Kernel::SharedStorageSize;
  if constexpr (size < (48 << 10)) return cudaSuccess;
  return cudaFuncSetAttribute(cutlass::device_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, size);
}

constexpr int64_t round_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace moe

MOE_EXPORT int moe_cutlass_interface() { return MOE_CUTLASS_INTERFACE; }

MOE_EXPORT char const* moe_cutlass_error(int code) {
  if (code == moe::kOk) return "no error";
  if (code == moe::kBadArgument) return "an argument that the kernel cannot take";
  if (code == moe::kSmallWorkspace) return "the workspace is too small";
  if (code >= moe::kCuda) return cudaGetErrorString(static_cast<cudaError_t>(code - moe::kCuda));
  return cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(code - moe::kCutlass));
}
