// Grouped GEMM on SM90, FP8 with blocks: e4m3 rows with one fp32 scale for each 1 x 128, e4m3 weights with one for each 128 x 128, bf16 out.
// Scales are read as they lie: (rows, ceil(k / 128)) and (experts, segments * ceil(n / segments / 128), ceil(k / 128)).
//
// -DMOE_TILE_M=64 or 128; 64 rows go to two consumers that take turns (ping-pong), 128 rows to two that share the tile (cooperative).
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "grouped.cuh"

namespace moe::sm90_grouped {

using namespace cute;

using Element = cutlass::float_e4m3_t;
using Out = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
constexpr int kAlign = 16;                  // elements of A and B, 16 bytes
constexpr int kAlignOut = 16 / sizeof(Out);

using Tile = Shape<Int<MOE_TILE_M>, _128, _128>;
using Cluster = Shape<_1, _1, _1>;
constexpr bool kTurns = MOE_TILE_M == 64;
using Schedule = std::conditional_t<kTurns, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpongFP8Blockwise,
                                    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise>;
using Store = std::conditional_t<kTurns, cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>;

using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, 128, 128, GMMA::Major::K, GMMA::Major::K>;
using ScalesA = decltype(Scales::deduce_layoutSFA());
using ScalesW = decltype(Scales::deduce_layoutSFB());

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row*,
    kAlignOut, Out, Row*, kAlignOut, Store>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cute::tuple<Row*, ScalesA*>, kAlign, Element, cute::tuple<Column*, ScalesW*>, kAlign,
    float, Tile, Cluster, cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    Schedule>::CollectiveOp;

using Problem = cutlass::gemm::GroupProblemShape<Shape<int, int, int>>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>>;
using Kernel = typename Gemm::GemmKernel;
using Arrays = GroupArrays<Gemm>;

__host__ __device__ inline void describe(Grouped const& p, Arrays const& to, int group) {
  int const expert = group / p.segments, segment = group % p.segments;
  int const n = p.n / p.segments;
  int64_t const k_blocks = (p.k + 127) / 128, n_blocks = (n + 127) / 128;
  int64_t first, count;
  expert_rows(p, expert, first, count);
  int64_t const block = p.masked ? int64_t(expert) * p.rows : 0;  // first row of the expert's buffer
  to.shapes[group] = make_shape(int(count), n, p.k);
  to.a[group] = p.a + expert * p.a_expert + first * p.a_row;
  to.a_scale[group] = static_cast<float const*>(p.a_scale) + (block + first) * k_blocks;
  to.w[group] = p.w + (int64_t(expert) * p.n + int64_t(segment) * n) * p.k;
  to.w_scale[group] = static_cast<float const*>(p.w_scale) + (int64_t(expert) * p.segments + segment) * n_blocks * k_blocks;
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
  args.mainloop = {reinterpret_cast<Element const**>(to.a), to.a_stride, reinterpret_cast<Element const**>(to.w), to.w_stride,
                   reinterpret_cast<float const**>(to.a_scale), to.a_scale_layout, reinterpret_cast<float const**>(to.w_scale), to.w_scale_layout};
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
  int const groups = p.experts * p.segments;
  Arrays to;
  uint8_t* const own = static_cast<uint8_t*>(workspace) + to.place(workspace, groups);
  if (cudaError_t const error = allow_shared_memory<Kernel>()) return code_of(error);
  describe_groups<<<(groups + 127) / 128, 128, 0, stream>>>(p, to);
  if (cudaError_t const error = cudaGetLastError()) return code_of(error);
  auto params = Kernel::to_underlying_arguments(arguments(to, groups, device, sms), own);
  return code_of(Gemm::run(params, stream));
}

}  // namespace moe::sm90_grouped

MOE_GROUPED_INTERFACE(moe::sm90_grouped)
