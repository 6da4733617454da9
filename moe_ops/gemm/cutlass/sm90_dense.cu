// Dense GEMM on SM90, FP8 with blocks: e4m3 (m, k) with one fp32 scale for each 1 x 128, e4m3 (n, k) with one for each 128 x 128, bf16 out.
// Scales are read as they lie: rows of A's at any distance, (ceil(n / 128), ceil(k / 128)) of the weight contiguous.
//
// -DMOE_TILE_M=64 or 128, as in sm90_grouped.cu.
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "interface.cuh"

namespace moe::sm90_dense {

using namespace cute;

using Element = cutlass::float_e4m3_t;
using Out = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
constexpr int kAlign = 16;
constexpr int kAlignOut = 16 / sizeof(Out);

using Tile = Shape<Int<MOE_TILE_M>, _128, _128>;
using Cluster = Shape<_1, _1, _1>;
constexpr bool kTurns = MOE_TILE_M == 64;
using Schedule = std::conditional_t<kTurns, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8Blockwise,
                                    cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise>;
using Store = std::conditional_t<kTurns, cutlass::epilogue::TmaWarpSpecialized, cutlass::epilogue::TmaWarpSpecializedCooperative>;

using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, 128, 128, GMMA::Major::K, GMMA::Major::K>;
using ScalesA = decltype(Scales::deduce_layoutSFA());
using ScalesW = decltype(Scales::deduce_layoutSFB());

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row,
    kAlignOut, Out, Row, kAlignOut, Store>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cute::tuple<Row, ScalesA>, kAlign, Element, cute::tuple<Column, ScalesW>, kAlign,
    float, Tile, Cluster, cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    Schedule>::CollectiveOp;

using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue>>;
using Kernel = typename Gemm::GemmKernel;

// Scales of (rows, k) whose rows lie `distance` elements apart.
ScalesA scales_of_rows(int rows, int k, int distance) {
  int const blocks = (k + 127) / 128;
  return make_layout(make_shape(make_shape(_1{}, rows), make_shape(_128{}, blocks), 1),
                     make_stride(make_stride(_0{}, distance), make_stride(_0{}, _1{}), rows * distance));
}

typename Gemm::Arguments arguments(
    void const* a, int64_t a_row, float const* a_scale, int a_scale_row, void const* w, float const* w_scale, void* out, int64_t out_row, int m, int n,
    int k, int device, int sms) {
  typename Gemm::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  args.problem_shape = make_shape(m, n, k, 1);
  args.mainloop = {static_cast<Element const*>(a), {a_row, _1{}, 0}, static_cast<Element const*>(w), {int64_t(k), _1{}, 0},
                   a_scale, scales_of_rows(m, k, a_scale_row), w_scale, Scales::tile_atom_to_shape_SFB(make_shape(m, n, k, 1))};
  args.epilogue = {{}, nullptr, {}, static_cast<Out*>(out), {out_row, _1{}, 0}};
  args.hw_info.device_id = device;
  args.hw_info.sm_count = sms;
  return args;
}

}  // namespace moe::sm90_dense

using namespace moe::sm90_dense;

MOE_EXPORT int moe_cutlass_workspace(int m, int n, int k, int sms, long long* bytes) {
  *bytes = int64_t(Gemm::get_workspace_size(arguments(nullptr, k, nullptr, (k + 127) / 128, nullptr, nullptr, nullptr, n, m, n, k, 0, sms)));
  return moe::kOk;
}

MOE_EXPORT int moe_cutlass_dense(
    void const* a, long long a_row, void const* a_scale, int a_scale_row, void const* w, void const* w_scale, void* out, long long out_row, int m,
    int n, int k, void* workspace, long long bytes, int device, int sms, void* stream) {
  bool const aligned = !(reinterpret_cast<uintptr_t>(a) % 16 || reinterpret_cast<uintptr_t>(w) % 16 || reinterpret_cast<uintptr_t>(out) % 16);
  if (m < 1 || n < 1 || k < 1 || !aligned || k % 16 || a_row % 16 || n % 8 || out_row % 8) return moe::kBadArgument;
  if (cudaError_t const error = moe::use_device(device)) return moe::code_of(error);
  auto const args = arguments(a, a_row, static_cast<float const*>(a_scale), a_scale_row, w, static_cast<float const*>(w_scale), out, out_row, m, n, k,
                              device, sms);
  if (bytes < int64_t(Gemm::get_workspace_size(args))) return moe::kSmallWorkspace;
  if (auto const status = Gemm::can_implement(args); status != cutlass::Status::kSuccess) return moe::code_of(status);
  if (cudaError_t const error = moe::allow_shared_memory<Kernel>()) return moe::code_of(error);
  auto const live = static_cast<cudaStream_t>(stream);
  if (auto const status = Kernel::initialize_workspace(args, workspace, live); status != cutlass::Status::kSuccess) return moe::code_of(status);
  auto params = Kernel::to_underlying_arguments(args, workspace);
  return moe::code_of(Gemm::run(params, live));
}
