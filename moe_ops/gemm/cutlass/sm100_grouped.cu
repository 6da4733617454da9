// Grouped GEMM on SM100, MXFP8: e4m3 on both sides with one E8M0 byte for each 1 x 32 of k, bf16 out.
// Scales lie in tiles of 128 rows x 4 bytes (layout swizzle_32x4x4), rows and bytes padded with zeros; those of expert e's weight start at a
// multiple of ceil(n / 128) tile rows. Rows of activations start at a tile row of their expert's own: for packed rows first row / 128 + e, which
// leaves room for every expert whatever the counts; for masked rows e * ceil(capacity / 128).
//
// -DMOE_TILE_M=128 or 256; 256 rows are a pair of multiprocessors that share one product.
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "grouped.cuh"

namespace moe::sm100_grouped {

using namespace cute;

using Data = cutlass::float_e4m3_t;
using Element = cutlass::mx_float8_t<Data>;
using Scale = cutlass::float_ue8m0_t;
using Out = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
constexpr int kAlign = 16;
constexpr int kAlignOut = 16 / sizeof(Out);

constexpr bool kPair = MOE_TILE_M == 256;
using Tile = Shape<Int<MOE_TILE_M>, _128, _128>;
using Cluster = Shape<Int<kPair ? 2 : 1>, _1, _1>;
using Schedule = std::conditional_t<kPair, cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmMxf8f6f4Sm100,
                                    cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmMxf8f6f4Sm100>;
using Store = std::conditional_t<kPair, cutlass::epilogue::PtrArrayTmaWarpSpecialized2Sm, cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm>;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
    Row*, kAlignOut, Out, Row*, kAlignOut, Store>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Element, Row*, kAlign, Element, Column*, kAlign, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>, Schedule>::CollectiveOp;

using Problem = cutlass::gemm::GroupProblemShape<Shape<int, int, int>>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>>;
using Kernel = typename Gemm::GemmKernel;
using Arrays = GroupArrays<Gemm>;
using Scales = typename Mainloop::Sm1xxBlkScaledConfig;

__host__ __device__ inline void describe(Grouped const& p, Arrays const& to, int group) {
  int const expert = group / p.segments, segment = group % p.segments;
  int const n = p.n / p.segments;
  int64_t const tile_row = int64_t((p.k + 127) / 128) * 512;  // bytes of 128 rows of scales
  int64_t first, count;
  expert_rows(p, expert, first, count);
  int64_t const block = p.masked ? int64_t(expert) * p.rows : 0;
  to.shapes[group] = make_shape(int(count), n, p.k);
  int64_t const a_tiles = p.masked ? expert * ((p.rows + 127) / 128) : first / 128 + expert;
  to.a[group] = p.a + expert * p.a_expert + first * p.a_row;
  to.a_scale[group] = static_cast<uint8_t const*>(p.a_scale) + a_tiles * tile_row;
  to.w[group] = p.w + (int64_t(expert) * p.n + int64_t(segment) * n) * p.k;
  to.w_scale[group] = static_cast<uint8_t const*>(p.w_scale) + (int64_t(expert) * ((p.n + 127) / 128) + int64_t(segment) * n / 128) * tile_row;
  to.out[group] = reinterpret_cast<Out*>(p.out) + (block + first) * p.n + int64_t(segment) * n;
  to.a_stride[group] = {p.a_row, _1{}, _0{}};
  to.w_stride[group] = {p.k, _1{}, _0{}};
  to.out_stride[group] = {p.n, _1{}, _0{}};
  to.a_scale_layout[group] = Scales::tile_atom_to_shape_SFA(make_shape(int(count), n, p.k, 1));
  to.w_scale_layout[group] = Scales::tile_atom_to_shape_SFB(make_shape(int(count), n, p.k, 1));
}

__global__ void describe_groups(Grouped p, Arrays to) {
  int const group = blockIdx.x * blockDim.x + threadIdx.x;
  if (group < p.experts * p.segments) describe(p, to, group);
}

typename Gemm::Arguments arguments(Arrays& to, int groups, int device, int sms) {
  typename Gemm::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  args.problem_shape = {groups, to.shapes, nullptr};
  args.mainloop = {reinterpret_cast<Data const**>(to.a), to.a_stride, reinterpret_cast<Data const**>(to.w), to.w_stride,
                   reinterpret_cast<Scale const**>(to.a_scale), to.a_scale_layout, reinterpret_cast<Scale const**>(to.w_scale), to.w_scale_layout};
  args.epilogue = {{}, nullptr, nullptr, reinterpret_cast<Out**>(to.out), to.out_stride};
  args.hw_info.device_id = device;
  args.hw_info.sm_count = sms;
  return args;
}

int64_t workspace_bytes(int groups, int sms) {
  Arrays to;
  int64_t const arrays = to.place(nullptr, groups);
  return arrays + int64_t(Gemm::get_workspace_size(arguments(to, groups, 0, sms)));
}

int run(Grouped const& p, void* workspace, int device, int sms, cudaStream_t stream) {
  if (p.segments != 1 || reinterpret_cast<uintptr_t>(p.a_scale) % 16 || reinterpret_cast<uintptr_t>(p.w_scale) % 16) return kBadArgument;
  int const groups = p.experts;
  Arrays to;
  uint8_t* const own = static_cast<uint8_t*>(workspace) + to.place(workspace, groups);
  if (cudaError_t const error = allow_shared_memory<Kernel>()) return code_of(error);
  describe_groups<<<(groups + 127) / 128, 128, 0, stream>>>(p, to);
  if (cudaError_t const error = cudaGetLastError()) return code_of(error);
  auto const args = arguments(to, groups, device, sms);
  if (auto const status = Kernel::initialize_workspace(args, own, stream); status != cutlass::Status::kSuccess) return code_of(status);
  auto params = Kernel::to_underlying_arguments(args, own);
  return code_of(Gemm::run(params, stream));
}

}  // namespace moe::sm100_grouped

MOE_GROUPED_INTERFACE(moe::sm100_grouped)
