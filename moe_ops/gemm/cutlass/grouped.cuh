// What the grouped libraries share: the problem as it is handed over, and the workspace in which a small kernel lays out each group's pointers,
// strides and sizes from counts that only the device knows.
//
// A group is one segment of one expert's weight: `segments` equal parts of the N rows have scale blocks of their own (w13: gate rows, up rows).
#pragma once

#include "interface.cuh"

namespace moe {

struct Grouped {
  uint8_t const* a;        // e4m3: packed rows, or (experts, rows, k)
  int64_t a_row, a_expert; // strides in bytes
  void const* a_scale;
  uint8_t const* w;        // e4m3 (experts, n, k), contiguous
  void const* w_scale;
  int const* offsets;      // packed: (experts + 1) first rows; masked: (experts) counts
  uint8_t* out;            // (rows, n) or (experts, rows, n), contiguous
  int64_t rows;            // rows of a packed buffer, or the capacity of each expert
  int experts, segments, n, k, masked;
};

__host__ __device__ inline int64_t clamp(int64_t value, int64_t most) { return value < 0 ? 0 : value > most ? most : value; }

// First row and number of rows of an expert, within the buffer whatever the offsets hold.
__host__ __device__ inline void expert_rows(Grouped const& p, int expert, int64_t& first, int64_t& count) {
  if (p.masked) {
    first = 0;
    count = clamp(p.offsets[expert], p.rows);
  } else {
    first = clamp(p.offsets[expert], p.rows);
    int64_t const end = clamp(p.offsets[expert + 1], p.rows);
    count = end > first ? end - first : 0;
    if (count == 0) first = 0;  // a group without rows is skipped; its pointers stay valid ones all the same
  }
}

// Arrays of one element a group, laid out one behind the other.
template <class Gemm>
struct GroupArrays {
  using Kernel = typename Gemm::GemmKernel;
  using Shape = typename Kernel::ProblemShape::UnderlyingProblemShape;

  Shape* shapes;
  void const** a;
  void const** w;
  void const** a_scale;
  void const** w_scale;
  void** out;
  typename Kernel::InternalStrideA* a_stride;
  typename Kernel::InternalStrideB* w_stride;
  typename Kernel::InternalStrideD* out_stride;
  typename Kernel::CollectiveMainloop::InternalLayoutSFA* a_scale_layout;
  typename Kernel::CollectiveMainloop::InternalLayoutSFB* w_scale_layout;

  // Places the arrays at `base` and returns the bytes that they take.
  int64_t place(void* base, int groups) {
    int64_t at = 0;
    auto const next = [&](auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(static_cast<uint8_t*>(base) + at);
      at += round_up(int64_t(groups) * int64_t(sizeof(*array)), 128);
    };
    next(shapes), next(a), next(w), next(a_scale), next(w_scale), next(out);
    next(a_stride), next(w_stride), next(out_stride), next(a_scale_layout), next(w_scale_layout);
    return at;
  }
};

inline bool valid(Grouped const& p) {
  if (p.experts < 1 || p.segments < 1 || p.n < 1 || p.k < 1 || p.rows < 1 || p.n % p.segments) return false;
  bool const aligned = !(reinterpret_cast<uintptr_t>(p.a) % 16 || reinterpret_cast<uintptr_t>(p.w) % 16 || reinterpret_cast<uintptr_t>(p.out) % 16);
  return aligned && p.k % 16 == 0 && p.a_row % 16 == 0 && p.a_expert % 16 == 0 && p.n / p.segments % 8 == 0;
}

}  // namespace moe

// Each source has, in its namespace: workspace_bytes; run, which fills the arrays and launches the GEMM; and describe, which fills one group's
// elements of the arrays, on the device or, for tests without a GPU, on the host.
#define MOE_GROUPED_INTERFACE(space)                                                                                                             \
  MOE_EXPORT void moe_cutlass_describe_on_host(                                                                                                  \
      void const* a, long long a_row, long long a_expert, void const* a_scale, void const* w, void const* w_scale, void const* offsets, void* out, \
      long long rows, int experts, int segments, int n, int k, int masked, void* arrays) {                                                       \
    moe::Grouped const p{static_cast<uint8_t const*>(a), a_row, a_expert, a_scale, static_cast<uint8_t const*>(w), w_scale,                      \
                         static_cast<int const*>(offsets), static_cast<uint8_t*>(out), rows, experts, segments, n, k, masked};                   \
    space::Arrays to;                                                                                                                            \
    to.place(arrays, experts * segments);                                                                                                        \
    for (int group = 0; group < experts * segments; ++group) space::describe(p, to, group);                                                      \
  }                                                                                                                                              \
  MOE_EXPORT int moe_cutlass_workspace(int experts, int segments, int sms, long long* bytes) {                                                   \
    *bytes = space::workspace_bytes(experts * segments, sms);                                                                                    \
    return moe::kOk;                                                                                                                             \
  }                                                                                                                                              \
  MOE_EXPORT int moe_cutlass_grouped(                                                                                                            \
      void const* a, long long a_row, long long a_expert, void const* a_scale, void const* w, void const* w_scale, void const* offsets, void* out, \
      long long rows, int experts, int segments, int n, int k, int masked, void* workspace, long long bytes, int device, int sms, void* stream) { \
    moe::Grouped const p{static_cast<uint8_t const*>(a), a_row, a_expert, a_scale, static_cast<uint8_t const*>(w), w_scale,                      \
                         static_cast<int const*>(offsets), static_cast<uint8_t*>(out), rows, experts, segments, n, k, masked};                   \
    if (!moe::valid(p)) return moe::kBadArgument;                                                                                                \
    if (bytes < space::workspace_bytes(experts * segments, sms)) return moe::kSmallWorkspace;                                                    \
    if (cudaError_t const error = moe::use_device(device)) return moe::code_of(error);                                                           \
    return space::run(p, workspace, device, sms, static_cast<cudaStream_t>(stream));                                                             \
  }
