// A GPU for the build of torch that has none: see simulated_gpu.py.
//
// Kernels for torch's key CUDA: memory is the CPU's, and each operator runs the CPU's kernel on copies of its tensors. As on
// a GPU, an operator refuses tensors of both devices and generators of the other one, and draws from a stream of its own.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <set>

namespace simulated {

using at::Tensor;
using Ints = c10::SymIntArrayRef;
using Maybe = std::optional<Tensor>;

const c10::Device GPU(c10::DeviceType::CUDA, 0);
const c10::Stream STREAM(c10::Stream::DEFAULT, GPU);
constexpr uint64_t SEED = 67280421310721;  // torch's own default
constexpr uint64_t OTHER = 0x9E3779B97F4A7C15;  // a GPU draws other numbers from a seed than the CPU
constexpr int64_t HEAD = 64;               // bytes before an allocation, which hold its size
std::atomic<int64_t> now{0}, peak{0};
bool forked = false;  // a process that was forked from one with a GPU has none

void release(void* place) {
  if (!place) return;
  char* head = static_cast<char*>(place) - HEAD;
  now -= *reinterpret_cast<int64_t*>(head);
  c10::free_cpu(head);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    TORCH_CHECK(!forked, "Cannot re-initialize CUDA in forked subprocess");
    char* head = static_cast<char*>(c10::alloc_cpu(size + HEAD));
    *reinterpret_cast<int64_t*>(head) = static_cast<int64_t>(size);
    now += size;
    if (now > peak) peak = now.load();
    return {head + HEAD, head + HEAD, &release, GPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator(SEED ^ OTHER);
  Generator() : GeneratorImpl(GPU, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed ^ OTHER); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed() ^ OTHER; }
  uint64_t seed() override { return cpu.seed() ^ OTHER; }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* other = new Generator();
    other->cpu = cpu.clone();
    return other;
  }
};

at::Generator& stream() {
  static at::Generator it(c10::make_intrusive<Generator>());
  return it;
}

at::Generator cpu_of(const at::Generator& it) { return static_cast<Generator*>(it.unsafeGetGeneratorImpl())->cpu; }

// For operators that draw without an argument for it: while this lives, the CPU's stream is the GPU's.
struct Swapped {
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  Tensor kept = cpu.get_state();
  Swapped() { cpu.set_state(stream().get_state()); }
  ~Swapped() {
    stream().set_state(cpu.get_state());
    cpu.set_state(kept);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() <= 0, "invalid device ordinal"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return STREAM; }
  c10::Stream getDefaultStream(c10::Device) const override { return STREAM; }
  c10::Stream exchangeStream(c10::Stream) const override { return STREAM; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// The same memory as a tensor of the CPU.
Tensor host(const Tensor& t) {
  if (!t.is_cuda()) return t;
  auto options = t.options().device(at::kCPU);
  if (t.numel() == 0) return at::empty(t.sizes(), options);
  auto storage = t.storage();
  char* first = static_cast<char*>(storage.mutable_data()) + t.storage_offset() * t.element_size();
  auto out = at::from_blob(first, t.sizes(), t.strides(), [storage](void*) {}, options);
  if (t.is_conj()) out = out.conj();
  return t.is_neg() ? out._neg_view() : out;
}
Maybe host(const Maybe& t) { return t && t->defined() ? Maybe(host(*t)) : std::nullopt; }
Tensor device(const Tensor& t) { return t.defined() ? t.to(GPU) : t; }

auto ints(Ints sizes) { return C10_AS_INTARRAYREF_SLOW(sizes); }

Tensor empty(Ints size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<c10::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(ints(size), &memory, keys, c10::dtype_or_default(type), format);
}
Tensor empty_strided(Ints size, Ints stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                     std::optional<c10::Device>, std::optional<bool>) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(ints(size), ints(stride), &memory, keys, c10::dtype_or_default(type));
}
const Tensor& resize_(const Tensor& self, Ints size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t need = (c10::multiply_integers(ints(size)) + impl->storage_offset()) * self.element_size();
  auto storage = self.storage();
  if (need > storage.nbytes()) {
    auto place = memory.allocate(need);
    if (storage.nbytes()) std::memcpy(place.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(place));
    storage.set_nbytes(need);
  }
  impl->set_sizes_contiguous(ints(size));
  return self;
}
Tensor as_strided(const Tensor& self, Ints size, Ints stride, std::optional<c10::SymInt> offset) {
  auto from = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, ints(size), ints(stride), from);
}
Tensor view(const Tensor& self, Ints size) { return at::native::view(self, ints(size)); }
Tensor reshape_alias(const Tensor& self, Ints size, Ints stride) {
  return at::native::_reshape_alias(self, ints(size), ints(stride));
}
Tensor& set_part(Tensor& self, at::Storage source, c10::SymInt offset, Ints size, Ints stride) {
  return at::native::set_storage_cpu_(self, source, offset.guard_int(__FILE__, __LINE__), ints(size), ints(stride));
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  int64_t size = source.nbytes() / self.element_size();
  return at::native::set_storage_cpu_(self, source, 0, {size}, {1});
}
Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  TORCH_CHECK(!forked, "Cannot re-initialize CUDA in forked subprocess");
  if (self.numel()) host(self).copy_(host(source));
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  host(to).copy_(host(self));
  return to;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  if (to.numel()) host(to).copy_(host(self));
  return to;
}
at::Scalar item(const Tensor& self) { return host(self).item(); }

// Its schema does not say that it changes the running statistics, which the fallback would change in a copy.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const Maybe& weight, const Maybe& bias, const Maybe& mean,
                                              const Maybe& var, bool train, double momentum, double eps) {
  for (const auto& t : {weight, bias, mean, var})
    TORCH_CHECK(!t || !t->defined() || t->is_cuda(), "batch norm: tensors on cuda:0 and cpu");
  auto [y, a, b] = at::native_batch_norm(host(x), host(weight), host(bias), host(mean), host(var), train, momentum, eps);
  return {device(y), device(a), device(b)};
}

// Torch chooses its kernel by a table that has no entry for a GPU in this build.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& mask, double dropout, bool causal,
                 std::optional<double> scale, bool grouped) {
  auto added = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool)
    added = at::zeros_like(*mask, q.options()).masked_fill_(mask->logical_not(), -INFINITY);
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, added, dropout, causal, std::nullopt, scale, grouped));
}

// These take indices that lie on the CPU, also on a GPU.
const std::set<std::string> MIXED = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t number = schema.arguments().size(), begin = stack->size() - number;
  TORCH_CHECK(!forked, "Cannot re-initialize CUDA in forked subprocess");
  bool on_gpu = false, draws = false;
  std::string on_cpu;
  auto look = [&](const Tensor& t, const std::string& name) {
    if (!t.defined()) return;
    on_gpu |= t.is_cuda();
    if (!t.is_cuda() && t.dim() > 0) on_cpu += " " + name;  // one number may be anywhere
  };
  for (size_t i = 0; i < number; i++) {
    auto& value = (*stack)[begin + i];
    const auto& name = schema.arguments()[i].name();
    if (value.isTensor()) look(value.toTensor(), name);
    if (value.isTensorList())
      for (const Tensor& t : value.toTensorVector()) look(t, name);
    else if (value.isList())
      for (const auto& each : value.toListRef())
        if (each.isTensor()) look(each.toTensor(), name);
    if (name != "generator") continue;
    draws = true;
    auto generator = value.isGenerator() ? value.toGenerator() : stream();
    TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
    value = cpu_of(generator);
  }
  TORCH_CHECK(!on_gpu || on_cpu.empty() || MIXED.count(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ",
              schema.name(), " has on the CPU:", on_cpu);
  std::optional<Swapped> swapped;
  if (!draws && op.hasTag(at::Tag::nondeterministic_seeded)) swapped.emplace();
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("alias", TORCH_FN(at::native::alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("native_batch_norm", TORCH_FN(batch_norm));
  m.impl("scaled_dot_product_attention", TORCH_FN(attention));
  // torch makes its output in a shape that this kernel changes, and warns of it
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", TORCH_FN(attention)); }

TORCH_LIBRARY(simulated_gpu, m) {
  m.def("stream", [] { return stream(); });
  m.def("bytes", [] { return now.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = now.load(); });
  m.def("is_forked", [] { return forked; });
  m.def("fork", [] { forked = true; });
}

const bool ready = (c10::SetAllocator(c10::DeviceType::CUDA, &memory, 255), true);

}  // namespace simulated

namespace at {
struct CUDAHooks final : CUDAHooksInterface {  // torch looks for this name
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return simulated::GPU; }
  void deviceSynchronize(DeviceIndex) const override {}
  Allocator* getCUDADeviceAllocator() const override { return &simulated::memory; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return simulated::stream(); }
  Generator getNewGenerator(DeviceIndex) const override {
    return Generator(c10::make_intrusive<simulated::Generator>());
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
