// A device that does not exist, for torch: tensors of PrivateUse1 in memory that is closed to the host, kernels
// that are the CPU's on copies, streams and events that are vector clocks (order.h). It tells of accesses that
// nothing orders, of memory given back too early, of accesses by the host, of calls with tensors of two devices,
// and of every time the host waits for the device.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <signal.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>
#include <time.h>
#include <cstdlib>
#include <cstring>
#include <unordered_set>
#include "order.h"

extern "C" int Py_AddPendingCall(int (*call)(void*), void* with);

namespace {
using at::Tensor;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
using Lock = std::lock_guard<std::recursive_mutex>;

sim::Order order;
void (*tell)(const char* kind, const char* what) = nullptr;
thread_local int device_here = 0;
thread_local std::map<int, sim::Stream> streams_here;  // the current one, by device
thread_local int emulating = 0;                        // the copies in it are no program's
bool tells_kernels = false;                            // every operator, while asked to
thread_local const char* doing = "copy";               // the operator that they are made for

int devices() {
  const char* n = getenv("SIM_DEVICES");
  return n ? atoi(n) : 1;
}
sim::Stream stream_of(int device) {
  auto i = streams_here.find(device);
  return i == streams_here.end() ? 0 : i->second;
}
c10::Device device(int index) { return c10::Device(kSim, (c10::DeviceIndex)(index < 0 ? device_here : index)); }
bool on_sim(const Tensor& t) { return t.defined() && t.device().type() == kSim; }

// Python is told, and looks where it stands: never with the lock in hand, for that waits for the interpreter's.
void say(const char* kind, const std::string& what) {
  if (tell) tell(kind, what.c_str());
}
void say(const std::vector<sim::Finding>& findings) {
  for (auto& f : findings) say(f.kind, f.what);
}
void access(const void* p, size_t bytes, bool write, sim::Stream stream, const char* by) {
  std::vector<sim::Finding> findings;
  {
    Lock g(order.lock);
    findings = order.access(p, bytes, write, stream, by);
  }
  say(findings);
}
void host_waits(sim::Stream stream, const std::string& why) {
  say("sync", why);
  Lock g(order.lock);
  order.host_waits(order.now(stream));
}

// ---- memory

class Opened {
 public:
  explicit Opened(const void* p) {
    Lock g(order.lock);
    base_ = order.open(p);
  }
  explicit Opened(const Tensor& t) : Opened(t.defined() ? t.storage().data() : nullptr) {}
  Opened(const Opened&) = delete;
  ~Opened() {
    Lock g(order.lock);
    if (base_) order.close(base_);
  }

 private:
  char* base_;
};

void give_back(void* p) {
  std::vector<sim::Finding> findings;
  {
    Lock g(order.lock);
    findings = order.free((char*)p);
  }
  say(findings);
}

// As torch's allocator of pinned memory: a power of two, up to a size that can be set, in torch 2.11 any.
size_t taken(size_t bytes) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 11
  if (bytes > c10::CachingAllocator::AcceleratorAllocatorConfig::pinned_max_round_threshold()) return bytes;
#endif
  size_t power = 1;
  while (power < bytes) power *= 2;
  return power;
}

template <bool pinned>
struct Memory final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    c10::Device where = pinned ? c10::Device(c10::DeviceType::CPU) : device(device_here);
    if (!bytes) return {nullptr, nullptr, &give_back, where};
    Lock g(order.lock);
    char* p = order.allocate(bytes, pinned, pinned ? 0 : stream_of(device_here), taken(bytes));
    TORCH_CHECK(p, "sim: out of memory");
    return {p, p, &give_back, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Opened a(to), b(from);
    memcpy(to, from, bytes);
  }
};
Memory<false> device_memory;
Memory<true> pinned_memory;

struct sigaction before;
int tell_touched(void* finding) {
  std::unique_ptr<sim::Finding> f((sim::Finding*)finding);
  say(f->kind, f->what);
  return 0;
}
void on_fault(int, siginfo_t* info, void*) {
  Lock g(order.lock);
  auto findings = order.touched(info->si_addr);
  if (findings.empty()) sigaction(SIGSEGV, &before, nullptr);  // another's: it comes again
  for (auto& f : findings) {
    auto* kept = new sim::Finding(f);
    if (Py_AddPendingCall(&tell_touched, kept)) delete kept;
  }
}

// ---- streams and events

struct Event {
  sim::Clock clock;
  double at = 0;
};
double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return device(device_here); }
  void setDevice(c10::Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) device_here = d.index();
  }
  c10::Stream getStream(c10::Device d) const override { return named(stream_of(device(d.index()).index()), d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return named(0, d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    Lock g(order.lock);
    return named(order.new_stream(), d);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    streams_here[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return (void*)s.id(); }
  bool queryStream(const c10::Stream& s) const override {
    Lock g(order.lock);
    order.host_waits(order.now(s.id()));  // the host knows now; it did not wait
    return true;
  }
  void synchronizeStream(const c10::Stream& s) const override { host_waits(s.id(), "synchronize a stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    say("sync", "synchronize the device");
    Lock g(order.lock);
    order.host_waits_for_all();
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock g(order.lock);
    if (!*event) *event = new Event();
    *(Event*)*event = {order.now(s.id()), seconds()};
  }
  void block(void* event, const c10::Stream& s) const override {
    Lock g(order.lock);
    if (event) order.stream_waits(s.id(), ((Event*)event)->clock);
  }
  bool queryEvent(void* event) const override {
    Lock g(order.lock);
    if (event) order.host_waits(((Event*)event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    say("sync", "synchronize an event");
    Lock g(order.lock);
    if (event) order.host_waits(((Event*)event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return (((Event*)b)->at - ((Event*)a)->at) * 1e3;
  }

  c10::DeviceIndex deviceCount() const noexcept override { return (c10::DeviceIndex)devices(); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    Lock g(order.lock);
    order.record_stream(p.get(), s.id());
  }

 private:
  static c10::Stream named(sim::Stream stream, c10::Device d) {
    return c10::Stream(c10::Stream::UNSAFE, device(d.index()), stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return (c10::DeviceIndex)devices(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { device_here = d; }
  c10::DeviceIndex getCurrentDevice() const override { return (c10::DeviceIndex)device_here; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto old = getCurrentDevice();
    device_here = d;
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return d < 0 ? getCurrentDevice() : exchangeDevice(d);
  }
  bool isPinnedPtr(const void* p) const override {
    Lock g(order.lock);
    return order.is_pinned(p);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Device getDeviceFromPtr(void*) const override { return device(device_here); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t bytes) const override {
    auto fresh = device_memory.allocate(bytes);
    if (size_t both = std::min(bytes, s.nbytes())) {
      access(s.data(), both, false, stream_of(device_here), "resize_");
      access(fresh.get(), both, true, stream_of(device_here), "resize_");
      device_memory.copy_data(fresh.get(), s.data(), both);
    }
    s.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
    s.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---- kernels

// What a tensor reaches over, gaps and all.
size_t extent(const Tensor& t) {
  if (!t.numel()) return 0;
  int64_t n = 1;
  for (int d = 0; d < t.dim(); d++) n += (t.size(d) - 1) * t.stride(d);
  return n * t.element_size();
}
Tensor as_cpu(const Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard g(c10::device_or_default(where));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> where, std::optional<bool>) {
  const c10::DeviceGuard g(c10::device_or_default(where));
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  int64_t n = self.element_size();
  for (auto length : size) n *= length;
  n += self.storage_offset() * self.element_size();
  if ((size_t)n > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), n);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool out = on_sim(from), in = on_sim(to);
  auto stream = stream_of((out ? from : to).device().index());
  const Tensor& outer = out ? to : from;
  bool beside = out != in && non_blocking && Hooks().isPinnedPtr(outer.data_ptr());
  if (!emulating && tells_kernels) say("kernel", out == in ? "copy" : out ? "copy to the host" : "copy from the host");
  if (!emulating && out != in && !beside && from.numel())
    host_waits(stream, out ? "copy to the host" : "copy from the host");
  if (out || beside) access(from.data_ptr(), extent(from), false, stream, doing);
  if (in || beside) access(to.data_ptr(), extent(to), true, stream, doing);
  Opened a(from), b(to);
  Tensor target = as_cpu(to);
  at::native::copy_(target, as_cpu(from), false);
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}
at::Scalar item(const Tensor& t) {
  auto stream = stream_of(t.device().index());
  if (!emulating) host_waits(stream, "item");
  access(t.data_ptr(), t.element_size(), false, stream, "item");
  Opened a(t);
  return at::native::_local_scalar_dense_cpu(as_cpu(t));
}
void record_stream(Tensor& t, c10::Stream s) { Guard().recordDataPtrOnStream(t.storage().data_ptr(), s); }

Tensor view(const Tensor& t, at::IntArrayRef size) { return at::native::view(t, size); }
Tensor reshape_alias(const Tensor& t, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(t, size, stride);
}
Tensor as_strided(const Tensor& t, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
Tensor unfold(const Tensor& t, int64_t dim, int64_t n, int64_t step) { return at::native::unfold(t, dim, n, step); }
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage_offset(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                           at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {  // none were given
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  return self;
}
// p.data = x may cross from the host to the device, as it may on CUDA.
bool may_take_data_of(const Tensor& self, const Tensor& other) { return self.layout() == other.layout(); }

// Their results' shapes, or what they return, hang on values: CUDA's kernels wait for these.
const std::set<std::string> kLooks{
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::equal", "aten::is_nonzero", "aten::_linalg_check_errors"};

// Why CUDA would have to wait for the values, if it would.
std::string looks(const std::string& name, const std::vector<c10::IValue>& given) {
  if (kLooks.count(name)) return name;
  if (name == "aten::repeat_interleave" && given.back().isNone()) return name + " without output_size";
  if (name.rfind("aten::index", 0) == 0)
    for (auto& v : given)
      if (v.isOptionalTensorList())
        for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
          if (t && t->defined() && t->scalar_type() == at::kBool) return name + " by a mask";
  return "";
}

// Every other operator: the CPU's, on copies.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  if (!emulating) {
    std::vector<c10::IValue> given(stack->end() - op.schema().arguments().size(), stack->end());
    std::unordered_set<c10::Device> where;
    auto see = [&](const Tensor& t) {
      if (t.defined() && (on_sim(t) || t.dim() > 0)) where.insert(t.device());
    };
    for (auto& v : given) {
      if (v.isTensor()) see(v.toTensor());
      if (v.isGenerator())  // which a program names: no device draws by another's
        TORCH_CHECK(v.toGenerator().device().type() == c10::DeviceType::PrivateUse1, "Expected a '",
                    c10::DeviceTypeName(c10::DeviceType::PrivateUse1, true), "' device type for generator but found '",
                    v.toGenerator().device(), "'");
      if (v.isTensorList())
        for (const Tensor& t : v.toTensorVector()) see(t);
      if (v.isOptionalTensorList())
        for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
          if (t) see(*t);
    }
    if (tells_kernels) say("kernel", name);
    if (where.size() > 1) say("mixed", name);
    auto why = looks(name, given);
    if (!why.empty()) host_waits(stream_of(device_here), why);
  }
  struct Within {
    const char* before = doing;
    explicit Within(const char* name) { doing = name, emulating++; }
    ~Within() { doing = before, emulating--; }
  } within(name.c_str());
  at::native::cpu_fallback(op, stack);
}

// Its schema keeps quiet of the statistics that it writes to; that of the other one tells of them.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, const std::optional<Tensor>& mean,
                                              const std::optional<Tensor>& var, bool training, double momentum,
                                              double eps) {
  if (!mean || !mean->defined()) return at::_native_batch_norm_legit(x, weight, bias, training, momentum, eps);
  Tensor followed = *mean, other = *var;
  return at::_native_batch_norm_legit(x, weight, bias, followed, other, training, momentum, eps);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("view", TORCH_FN(view));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("native_batch_norm", TORCH_FN(batch_norm));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_take_data_of));
}
}  // namespace

// What Python asks (device.py).
extern "C" {
void sim_start(void (*f)(const char*, const char*)) {
  static Hooks hooks;
  tell = f;
  c10::SetAllocator(kSim, &device_memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  struct sigaction fault {};
  fault.sa_sigaction = &on_fault;
  fault.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &fault, &before);
}
void sim_silence() { tell = nullptr; }
int sim_devices() { return devices(); }
int64_t sim_most() { return order.most(); }
int64_t sim_allocated() { return order.allocated(); }
void sim_tell_kernels(int on) { tells_kernels = on; }
int64_t sim_most_pinned() { return order.most_pinned(); }
int64_t sim_most_taken() { return order.most_taken(); }
void sim_restart_pinned() { order.restart_pinned(); }
void sim_restart_peak() { order.restart_peak(); }
// Copies from here on are the emulation's own.
void sim_emulate(int by) { emulating += by; }
void sim_access(void* p, int64_t bytes, int write, const char* by) {
  access(p, bytes, write, stream_of(device_here), by);
}
}
