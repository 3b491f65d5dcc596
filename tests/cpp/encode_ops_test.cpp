// Instructions as dispatches against the host kernels: random shapes, strides and alignments, every kind but
// attention, through the shim. The kernels themselves are tested in tests/metal_delegate/test_metal_kernels.py.
#include "metal_delegate/gpu/encode_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <sstream>

#include "metal_delegate/msl_host/msl_library.h"
#include "runtime/kernels/kernels.h"
#include "tests/cpp/kernels_testing.h"

namespace flexpte::gpu {
namespace {

using bound::Instruction;
using bound::OpKind;
using flexpte::testing::rounding;
using flexpte::testing::Tensor;

// What exporter/msl_elementwise.py writes for input_0 + input_1 * scalars[0] + capture_0[1].
constexpr std::string_view kElementwise = R"(
inline half add_value(float input_0, half input_1, device const int* capture_0, constant const CaptureView* views,
                      constant const long* scalars) {
  return half(input_0 + float(input_1) * float(scalars[0]) + float(capture_0[views[0].strides[0]]));
}
struct add_params {
  ElementwiseHeader header;
  ElementwiseStrides strides[3];
  CaptureView views[1];
  long scalars[1];
};
[[kernel]] void add(constant add_params& params [[buffer(0)]], device half* out [[buffer(1)]],
                    device const float* input_0 [[buffer(2)]], device const half* input_1 [[buffer(3)]],
                    device const int* capture_0 [[buffer(4)]], uint2 position [[thread_position_in_grid]],
                    uint2 grid [[threads_per_grid]]) {
  for (uint row = position.y; row < params.header.rows; row += grid.y) {
    long to = 0;
    long at_0 = 0;
    long at_1 = 0;
    uint rest = row;
    for (int d = params.header.rank - 1; d >= 0; --d) {
      const uint index = rest % uint(params.header.sizes[d]);
      rest /= uint(params.header.sizes[d]);
      to += long(index) * params.strides[0].rows[d];
      at_0 += long(index) * params.strides[1].rows[d];
      at_1 += long(index) * params.strides[2].rows[d];
    }
    for (long i = long(position.x) * 4; i < params.header.inner; i += long(grid.x) * 4) {
      const int count = int(min(4L, params.header.inner - i));
      const vec<float, 4> in_0 =
          elementwise_load(input_0 + at_0 + i * params.strides[1].inner, params.strides[1].inner, count,
                           (params.header.vectors & 2u) != 0);
      const vec<half, 4> in_1 =
          elementwise_load(input_1 + at_1 + i * params.strides[2].inner, params.strides[2].inner, count,
                           (params.header.vectors & 4u) != 0);
      vec<half, 4> result;
      for (int j = 0; j < 4; ++j) result[j] = add_value(in_0[j], in_1[j], capture_0, params.views, params.scalars);
      elementwise_store(out + to + i * params.strides[0].inner, result, params.strides[0].inner, count,
                        (params.header.vectors & 1u) != 0);
    }
  }
}
)";

class EncodeOps : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    std::ostringstream text;
    text << "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n";
    for (const char* name : {"params.h", "strided.metal", "elements.metal", "linear.metal", "rows.metal",
                             "reduce.metal", "indexing.metal", "elementwise.metal"}) {
      std::ifstream file(std::string(FLEXPTE_SOURCE_DIR "/metal_delegate/kernels/") + name);
      ASSERT_TRUE(file.good()) << name;
      text << file.rdbuf() << "\n";
    }
    text << kElementwise;
    const auto add = [&](const std::string& name, const std::string& function) {
      text << "template [[host_name(\"" << name << "\")]] [[kernel]] decltype(" << function << ") " << function
           << ";\n";
    };
    for (const auto& [letters, t] :
         {std::pair<std::string, std::string>{"float32", "float"}, {"float16", "half"}, {"bfloat16", "bfloat"}}) {
      add("gemv_" + letters, "linear_gemv<" + t + ", " + t + ", " + t + ", " + t + ">");
      add("gemm_" + letters, "linear_gemm<" + t + ", " + t + ", " + t + ", " + t + ", " + t + ">");
      add("matmul_" + letters, "matmul<" + t + ", " + t + ", " + t + ", " + t + ">");
      add("rms_norm_" + letters, "rms_norm<" + t + ", " + t + ", " + t + ">");
      add("layer_norm_" + letters, "layer_norm<" + t + ", " + t + ", " + t + ", " + t + ">");
      add("softmax_" + letters, "softmax<" + t + ", " + t + ">");
    }
    for (int op = 0; op < 9; ++op) {
      const std::string out = op < 5 ? "float" : op < 7 ? "bool" : "long";
      add("reduce_" + std::to_string(op), "reduce<float, float, " + out + ", " + std::to_string(op) + ">");
    }
    for (const auto& [bytes, t] : {std::pair<int, std::string>{1, "uchar"}, {2, "short"}, {4, "int"}, {8, "long"}}) {
      for (const std::string index : {"int", "long"}) {
        add("gather_" + std::to_string(bytes) + index, "gather<" + t + ", " + index + ">");
        add("index_copy_" + std::to_string(bytes) + index, "index_copy<" + t + ", " + index + ">");
      }
    }
    add("arange_float16", "arange<half>");
    auto library = msl_host::compile_library(text.str(), {});
    ASSERT_TRUE(library.status().is_ok()) << library.status().message();
    library_ = library.value();
  }
  static void TearDownTestSuite() { library_ = nullptr; }

  void SetUp() override {
    auto queue = library_->make_queue();
    ASSERT_TRUE(queue.status().is_ok());
    queue_ = std::move(queue).value();
    encoder_ = std::make_unique<Encoder>(*queue_);
  }

  // Encodes and runs; operands without data are absent.
  Status run(OpKind kind, decltype(Instruction::params) params, const std::vector<std::string>& kernels,
             const std::vector<TensorView>& operands, std::vector<int64_t> scalars = {}, int64_t start = 0,
             int64_t step = 1) {
    Instruction instruction;
    instruction.kind = kind;
    instruction.params = std::move(params);
    for (const TensorView& view : operands) instruction.operands.push_back(view.rank == 0 && !view.data ? -1 : 0);
    std::vector<const Pipeline*> pipelines;
    for (const std::string& name : kernels) {
      FLEXPTE_ASSIGN(const Pipeline* pipeline, queue_->pipeline(name));
      pipelines.push_back(pipeline);
    }
    for (const TensorView& view : operands) {
      if (view.data == nullptr) continue;
      int64_t bytes = element_size_bytes(view.dtype);
      for (int32_t d = 0; d < view.rank; ++d)
        bytes += (view.size(d) - 1) * view.stride(d) * element_size_bytes(view.dtype);
      FLEXPTE_TRY(
          queue_->map(static_cast<const std::byte*>(view.data), static_cast<size_t>(bytes), Access::kReadWrite));
    }
    FLEXPTE_TRY(encode_instruction(*encoder_, Call{instruction, 41, pipelines, operands, scalars, start, step}));
    FLEXPTE_TRY(queue_->finish());
    for (const TensorView& view : operands) {
      if (view.data != nullptr) queue_->unmap(static_cast<const std::byte*>(view.data));
    }
    bad_instruction_ = encoder_->bad_instruction();
    encoder_->reset();
    return Status::ok();
  }

  int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }

  // Dimensions in any order in memory, with gaps or none; `keep_last`: the last one stays contiguous.
  Tensor strided(DType dtype, std::vector<int64_t> sizes, bool keep_last = false) {
    std::vector<size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), size_t{0});
    if (pick(0, 1) == 1) std::shuffle(order.begin(), order.end() - (keep_last ? 1 : 0), random_);
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = keep_last ? 1 : pick(1, 2);
    const int64_t gap = std::array<int64_t, 3>{0, 8, 3}[static_cast<size_t>(pick(0, 2))];
    for (size_t d = order.size(); d-- > 0;) {
      strides[order[d]] = stride;
      stride = stride * sizes[order[d]] + (d + 1 == order.size() ? gap : 0);
    }
    Tensor tensor(dtype, sizes, strides);
    tensor.fill_random(static_cast<uint32_t>(pick(0, 1000000)));
    return tensor;
  }

  static void expect_near(const Tensor& got, const Tensor& want, double tolerance) {
    for (int64_t i = 0; i < got.num_elements(); ++i) {
      const double error = std::abs(got.get(i) - want.get(i));
      if (std::isnan(want.get(i)) && std::isnan(got.get(i))) continue;
      ASSERT_LE(error, tolerance + 2 * rounding(got.view().dtype) * std::abs(want.get(i))) << "element " << i;
    }
  }
  // All bytes, those between elements too.
  static void expect_equal(const Tensor& got, const Tensor& want) { ASSERT_EQ(got.bytes(), want.bytes()); }

  static std::shared_ptr<msl_host::Library> library_;
  std::unique_ptr<Queue> queue_;
  std::unique_ptr<Encoder> encoder_;
  uint32_t bad_instruction_ = 0;
  std::mt19937 random_{7};
  const ThreadPool pool_{1};
  std::vector<std::byte> workspace_ = std::vector<std::byte>(size_t{8} << 20);
};
std::shared_ptr<msl_host::Library> EncodeOps::library_;

constexpr std::array kFloats = {DType::kF32, DType::kF16, DType::kBF16};

std::string of(const std::string& kind, DType dtype) {
  return kind + "_" + std::string(dtype_name(dtype));
}

TEST_F(EncodeOps, Linear) {
  for (int i = 0; i < 60; ++i) {
    const DType dtype = kFloats[static_cast<size_t>(i % 3)];
    const int64_t rows = i % 2 == 0 ? pick(1, 5) : pick(6, 80), k = pick(0, 1) == 1 ? 8 * pick(1, 9) : pick(1, 70);
    const int64_t n = pick(1, 80);
    const int64_t gap = std::array<int64_t, 3>{0, 8, 1}[static_cast<size_t>(pick(0, 2))];
    Tensor x(dtype, {1, rows, k}, {0, k + gap, 1}), weight(dtype, {n, k}), bias(dtype, {n});
    x.fill_random(1), weight.fill_random(2), bias.fill_random(3);
    Tensor out(dtype, {1, rows, n}, {0, n + gap, 1}), want(dtype, {1, rows, n}, {0, n + gap, 1});
    const bool has_bias = pick(0, 1) == 1;
    flexpte::linear(x.view(), weight.view(), has_bias ? &bias.view() : nullptr, want.view(), pool_, workspace_);
    const Status status = run(OpKind::kLinear, bound::NoParams{}, {of("gemv", dtype), of("gemm", dtype)},
                              {x.view(), weight.view(), has_bias ? bias.view() : TensorView{}, out.view()});
    ASSERT_TRUE(status.is_ok()) << status.message();
    expect_near(out, want, 1e-4);
  }
}

TEST_F(EncodeOps, MatMul) {
  for (int i = 0; i < 60; ++i) {
    const DType dtype = kFloats[static_cast<size_t>(i % 3)];
    const int64_t m = pick(1, 70), k = pick(0, 1) == 1 ? 16 * pick(1, 3) : pick(1, 40), n = pick(1, 70);
    const int64_t heads = pick(1, 3), batch = pick(1, 2);
    Tensor a = strided(dtype, {batch, heads, m, k}), b = strided(dtype, {batch, heads, k, n});
    Tensor out = strided(dtype, {batch, heads, m, n});
    Tensor want(dtype, {batch, heads, m, n});
    TensorView right = b.view();
    if (pick(0, 1) == 1) right.strides[1] = 0;
    flexpte::matmul(a.view(), right, want.view(), pool_, workspace_);
    const Status status = run(OpKind::kMatMul, bound::NoParams{}, {of("matmul", dtype)}, {a.view(), right, out.view()});
    ASSERT_TRUE(status.is_ok()) << status.message();
    expect_near(out, want, 1e-4);
  }
}

TEST_F(EncodeOps, NormsAndSoftmax) {
  for (int i = 0; i < 90; ++i) {
    const DType dtype = kFloats[static_cast<size_t>(i % 3)];
    const int64_t columns = pick(0, 1) == 1 ? 4 * pick(1, 160) : pick(1, 600);
    const std::vector<int64_t> sizes = {pick(1, 3), pick(1, 4), columns};
    Tensor x = strided(dtype, sizes, true), out = strided(dtype, sizes, true);
    Tensor want(dtype, sizes), weight(dtype, {columns}), bias(dtype, {columns});
    weight.fill_random(5), bias.fill_random(6);
    const bool has_weight = pick(0, 3) > 0, has_bias = pick(0, 1) == 1;
    const TensorView w = has_weight ? weight.view() : TensorView{}, b = has_bias ? bias.view() : TensorView{};
    Status status;
    if (i % 3 == 0) {
      flexpte::rms_norm(x.view(), has_weight ? &w : nullptr, 1e-5f, want.view(), pool_);
      status = run(OpKind::kRmsNorm, bound::NormParams{1e-5f}, {of("rms_norm", dtype)},
                   {x.view(), w, TensorView{}, out.view()});
    } else if (i % 3 == 1) {
      flexpte::layer_norm(x.view(), has_weight ? &w : nullptr, has_bias ? &b : nullptr, 1e-5f, want.view(), pool_);
      status =
          run(OpKind::kLayerNorm, bound::NormParams{1e-5f}, {of("layer_norm", dtype)}, {x.view(), w, b, out.view()});
    } else {
      flexpte::softmax(x.view(), has_bias, want.view(), pool_);
      status = run(OpKind::kSoftmax, bound::SoftmaxParams{has_bias}, {of("softmax", dtype)}, {x.view(), out.view()});
    }
    ASSERT_TRUE(status.is_ok()) << status.message();
    expect_near(out, want, 2e-5);
    ASSERT_EQ(x.num_elements(), out.num_elements());
  }
}

TEST_F(EncodeOps, Reduce) {
  for (int i = 0; i < 180; ++i) {
    const auto op = static_cast<ReduceOp>(i % 9);
    std::vector<int64_t> sizes = {pick(1, 4), pick(1, 40), pick(1, 5), i % 4 == 0 ? pick(2000, 2500) : pick(1, 60)};
    if (i % 4 == 0) sizes[1] = 2;
    if (op == ReduceOp::kProd) sizes = {3, 4, 2, 3};
    const int32_t num_dims = static_cast<int32_t>(pick(1, 4));
    Tensor x = strided(DType::kF32, sizes);
    if (op == ReduceOp::kAny) x.fill_random(1, 1e-60);
    sizes.resize(4 - static_cast<size_t>(num_dims));
    const DType out_type = i % 9 < 5 ? DType::kF32 : i % 9 < 7 ? DType::kBool : DType::kI64;
    Tensor want(out_type, sizes), out(out_type, sizes);
    flexpte::reduce(op, x.view(), num_dims, want.view(), pool_);
    const Status status = run(OpKind::kReduce, bound::ReduceParams{op, num_dims}, {"reduce_" + std::to_string(i % 9)},
                              {x.view(), out.view()});
    ASSERT_TRUE(status.is_ok()) << status.message();
    expect_near(out, want, 1e-5);
  }
}

TEST_F(EncodeOps, GatherAndItsErrors) {
  for (int i = 0; i < 80; ++i) {
    const DType dtype = std::array{DType::kU8, DType::kF16, DType::kF32, DType::kI64}[static_cast<size_t>(i % 4)];
    const DType index_type = pick(0, 1) == 1 ? DType::kI32 : DType::kI64;
    const int32_t dim = static_cast<int32_t>(pick(0, 2));
    const std::vector<int64_t> sizes = {pick(1, 4), pick(1, 5), pick(0, 1) == 1 ? 16 * pick(1, 3) : pick(1, 50)};
    Tensor source = strided(dtype, sizes), index = strided(index_type, {pick(1, 4), pick(1, 3)});
    const int64_t size = sizes[static_cast<size_t>(dim)];
    for (int64_t k = 0; k < index.num_elements(); ++k) index.set(k, static_cast<double>(pick(-size, size - 1)));
    std::vector<int64_t> out_sizes(sizes.begin(), sizes.begin() + dim);
    out_sizes.insert(out_sizes.end(), {index.view().size(0), index.view().size(1)});
    out_sizes.insert(out_sizes.end(), sizes.begin() + dim + 1, sizes.end());
    Tensor out(dtype, out_sizes), want(dtype, out_sizes);
    ASSERT_TRUE(flexpte::gather(source.view(), dim, index.view(), want.view(), pool_).is_ok());
    const std::string kernel =
        "gather_" + std::to_string(element_size_bytes(dtype)) + (index_type == DType::kI32 ? "int" : "long");
    const auto gather = [&] {
      return run(OpKind::kGather, bound::GatherParams{dim}, {kernel}, {source.view(), index.view(), out.view()});
    };
    const Status status = gather();
    ASSERT_TRUE(status.is_ok()) << status.message();
    ASSERT_EQ(bad_instruction_, 0u);
    expect_equal(out, want);
    index.set(index.num_elements() - 1, static_cast<double>(size));
    EXPECT_EQ(gather().code(), Code::kOutOfRange);  // the host sees it
    encoder_->set_unreadable(std::as_bytes(std::span(index.bytes())));
    ASSERT_TRUE(gather().is_ok());
    EXPECT_EQ(bad_instruction_, 42u);
    encoder_->set_unreadable({});
  }
}

TEST_F(EncodeOps, IndexCopyAndItsErrors) {
  for (int i = 0; i < 80; ++i) {
    const DType dtype = std::array{DType::kU8, DType::kBF16, DType::kF32, DType::kI64}[static_cast<size_t>(i % 4)];
    const DType index_type = pick(0, 1) == 1 ? DType::kI32 : DType::kI64;
    const int32_t dim = static_cast<int32_t>(pick(0, 2));
    std::vector<int64_t> sizes = {pick(1, 4), pick(1, 12), pick(0, 1) == 1 ? 16 * pick(1, 3) : pick(1, 50)};
    const int64_t size = sizes[static_cast<size_t>(dim)];
    Tensor target(dtype, sizes), want(dtype, sizes);
    sizes[static_cast<size_t>(dim)] = pick(0, 40);
    Tensor source = strided(dtype, sizes), index(index_type, {sizes[static_cast<size_t>(dim)]});
    for (int64_t k = 0; k < index.num_elements(); ++k) index.set(k, static_cast<double>(pick(0, size - 1)));
    ASSERT_TRUE(flexpte::index_copy(want.view(), dim, index.view(), source.view(), pool_).is_ok());
    const std::string kernel =
        "index_copy_" + std::to_string(element_size_bytes(dtype)) + (index_type == DType::kI32 ? "int" : "long");
    const auto index_copy = [&] {
      return run(OpKind::kIndexCopy, bound::IndexCopyParams{dim}, {kernel},
                 {target.view(), index.view(), source.view()});
    };
    const Status status = index_copy();
    ASSERT_TRUE(status.is_ok()) << status.message();
    expect_equal(target, want);
    if (index.num_elements() == 0) continue;
    index.set(index.num_elements() - 1, -1);
    EXPECT_EQ(index_copy().code(), Code::kOutOfRange);
    encoder_->set_unreadable(std::as_bytes(std::span(index.bytes())));
    ASSERT_TRUE(index_copy().is_ok());
    EXPECT_EQ(bad_instruction_, 42u);
    encoder_->set_unreadable({});
  }
}

TEST_F(EncodeOps, Arange) {
  for (const int64_t count : {1, 31, 257, 3000}) {
    Tensor out(DType::kF16, {count}, {2}), want(DType::kF16, {count}, {2});
    flexpte::arange(want.view(), -5, 3);
    ASSERT_TRUE(run(OpKind::kArange, bound::ArangeParams{}, {"arange_float16"}, {out.view()}, {}, -5, 3).is_ok());
    expect_equal(out, want);
  }
}

TEST_F(EncodeOps, Elementwise) {
  for (int i = 0; i < 60; ++i) {
    std::vector<int64_t> sizes;
    for (int64_t d = pick(0, 5); d > 0; --d) sizes.push_back(pick(1, d == 1 && pick(0, 1) == 1 ? 300 : 6));
    Tensor a = strided(DType::kF32, sizes), b = strided(DType::kF16, sizes), out = strided(DType::kF16, sizes);
    TensorView a_view = a.view(), b_view = b.view();
    if (!sizes.empty()) {
      if (pick(0, 1) == 1) a_view.strides[0] = 0;
      if (pick(0, 1) == 1) b_view.strides[sizes.size() - 1] = 0;
    }
    Tensor capture(DType::kI32, {2});
    capture.fill({5, 7});
    bound::ElementwiseParams params;
    params.num_inputs = 2;
    const Status status = run(OpKind::kElementwise, params, {"add"}, {out.view(), a_view, b_view, capture.view()}, {3});
    ASSERT_TRUE(status.is_ok()) << status.message();
    Tensor wide_a(DType::kF32, sizes), wide_b(DType::kF32, sizes);
    flexpte::copy(a_view, wide_a.view(), pool_);
    flexpte::copy(b_view, wide_b.view(), pool_);
    for (int64_t k = 0; k < out.num_elements(); ++k) {
      const double want = wide_a.get(k) + 3 * wide_b.get(k) + 7;
      ASSERT_NEAR(out.get(k), want, 1e-3 * std::abs(want) + 1e-5) << k;
    }
  }
}

}  // namespace
}  // namespace flexpte::gpu
