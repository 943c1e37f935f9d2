// A device for tests, on which whoever does not wait reads poison, every time.
//
// Registered with torch as its PrivateUse1 back end, it has two devices and these properties:
//
// * Memory is mapped twice: `data_ptr()` points at pages without any access, so that a touch by the host is a SIGSEGV
//   where it happens, and the device's own loops use another mapping.
// * A stream runs nothing before somebody waits for it: a synchronisation, an event, `.item()`, a copy that blocks, or
//   the next operator on the same stream whose result has to be computed. In-place operators and copies within the
//   device are queued; results of others are computed and their delivery is queued.
// * A launch keeps nothing alive. Memory is poison when it is fresh and once it is freed, in the order of its stream, on
//   which it is used again; `record_stream` has the effect that it has on CUDA.
// * Copies to and from the host are asynchronous only where they are asked to be and the host's memory is pinned.
// * Tensors of two devices, or of a device and the host, do not meet in an operator.
// * Memory may be unmapped and mapped again, as by engines that sleep, and mapped by another process.
// * What makes the host wait is counted.
//
// All operators are the CPU's, by one boxed fallback.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/library.h>
#include <unistd.h>

#include <bit>
#include <deque>
#include <map>
#include <mutex>
#include <set>

using namespace c10;

namespace {

constexpr int kDevices = 2;
constexpr int kPoison = 0xA5;
constexpr size_t kPage = 4096;
constexpr DeviceType kLag = DeviceType::PrivateUse1;

std::recursive_mutex g_lock;
using Lock = std::lock_guard<std::recursive_mutex>;
std::map<std::string, int64_t> g_counts;
bool g_available = false;

// Streams: queues of tasks, by device and number.

struct Queue {
  std::deque<std::function<void()>> tasks;
  uint64_t queued = 0, done = 0;
};
std::map<std::pair<int, int64_t>, Queue> g_queues;
int64_t g_next_stream = 1;
thread_local int t_device = 0;
thread_local int64_t t_stream[kDevices] = {0, 0};

int index_of(Device device) { return device.index() < 0 ? t_device : device.index(); }

void drain(int device, int64_t stream, uint64_t upto = UINT64_MAX) {
  Lock lock(g_lock);
  auto& queue = g_queues[{device, stream}];
  while (!queue.tasks.empty() && queue.done < upto) {
    auto task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    ++queue.done;
    task();
  }
}

void enqueue(int device, int64_t stream, std::function<void()> task) {
  Lock lock(g_lock);
  auto& queue = g_queues[{device, stream}];
  queue.tasks.push_back(std::move(task));
  ++queue.queued;
}

// Have a stream run on only after what another one has in its queue now.
void enqueue_wait(int device, int64_t stream, int other, int64_t its) {
  Lock lock(g_lock);
  uint64_t upto = g_queues[{other, its}].queued;
  enqueue(device, stream, [=] { drain(other, its, upto); });
}

void host_waits(const char* why, int device, int64_t stream) {
  Lock lock(g_lock);
  ++g_counts[why];
  drain(device, stream);
}

// Memory of the device: blocks of whole pages, each of which is a file in memory.

struct Memory {
  char* shadow;  // where loops of the device reach it
  size_t size;
  int device;
  int64_t stream;
  int fd = -1;             // of the file, where another process maps it
  std::set<int64_t> used;  // streams that `record_stream` named
};
std::map<char*, Memory> g_memory;
std::map<std::tuple<int, int64_t, size_t>, std::vector<char*>> g_free;

std::map<char*, Memory>::iterator memory_at(const void* pointer) {
  auto found = g_memory.upper_bound((char*)pointer);
  TORCH_CHECK(found != g_memory.begin(), "this is no memory of the device");
  --found;
  TORCH_CHECK((char*)pointer <= found->first + found->second.size, "this is no memory of the device");
  return found;
}

char* shadow(const void* pointer) {
  Lock lock(g_lock);
  auto found = memory_at(pointer);
  return found->second.shadow + ((char*)pointer - found->first);
}

// Map a file twice, without and with access.
std::pair<char*, char*> map_twice(int fd, size_t size, void* at = nullptr, void* its_shadow = nullptr) {
  int fixed = at ? MAP_FIXED : 0;
  void* seen = mmap(at, size, PROT_NONE, MAP_SHARED | fixed, fd, 0);
  void* used = mmap(its_shadow, size, PROT_READ | PROT_WRITE, MAP_SHARED | fixed, fd, 0);
  TORCH_CHECK(seen != MAP_FAILED && used != MAP_FAILED, "the device has no memory left");
  return {(char*)seen, (char*)used};
}

int new_file(size_t size) {
  int fd = memfd_create("lag", MFD_CLOEXEC);
  TORCH_CHECK(fd >= 0 && ftruncate(fd, size) == 0, "the device has no memory left");
  return fd;
}

char* map_block(int fd, size_t size, int device, int64_t stream) {
  auto [seen, used] = map_twice(fd, size);
  close(fd);  // a process may have few descriptors
  g_memory[seen] = {used, size, device, stream};
  return seen;
}

void release(void* pointer) {
  Lock lock(g_lock);
  Memory& memory = g_memory[(char*)pointer];
  for (int64_t stream : memory.used) enqueue_wait(memory.device, memory.stream, memory.device, stream);
  memory.used.clear();
  char* start = memory.shadow;
  size_t size = memory.size;
  enqueue(memory.device, memory.stream, [=] { memset(start, kPoison, size); });
  g_free[{memory.device, memory.stream, size}].push_back((char*)pointer);
}

void forget(void* pointer) {  // memory of another process
  Lock lock(g_lock);
  auto found = g_memory.find((char*)pointer);
  for (auto& [key, queue] : g_queues)
    if (key.first == found->second.device) drain(key.first, key.second);
  munmap(found->second.shadow, found->second.size);
  munmap(found->first, found->second.size);
  g_memory.erase(found);
}

void nothing(void*) {}

struct DeviceMemory final : Allocator {
  DataPtr allocate(size_t nbytes) override {
    Lock lock(g_lock);
    int device = t_device;
    if (nbytes == 0) return {nullptr, nullptr, &nothing, Device(kLag, device)};
    size_t size = (nbytes + kPage - 1) / kPage * kPage;
    auto& idle = g_free[{device, t_stream[device], size}];
    char* pointer;
    if (idle.empty()) {
      pointer = map_block(new_file(size), size, device, t_stream[device]);
      memset(shadow(pointer), kPoison, size);
    } else {
      pointer = idle.back();
      idle.pop_back();
    }
    return {pointer, pointer, &release, Device(kLag, device)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(shadow(to), shadow(from), nbytes); }
};
DeviceMemory g_device_memory;
REGISTER_ALLOCATOR(kLag, &g_device_memory);

// Pinned memory of the host. Sizes are rounded up to a power of two, as torch's own allocator rounds them.

std::map<char*, size_t> g_pinned;

struct PinnedMemory final : at::HostAllocator {
  DataPtr allocate(size_t nbytes) override {
    Lock lock(g_lock);
    if (nbytes == 0) return {nullptr, nullptr, &drop, Device(kCPU)};
    char* pointer = (char*)aligned_alloc(64, (nbytes + 63) / 64 * 64);
    g_pinned[pointer] = nbytes;
    int64_t& now = g_counts["pinned bytes"];
    now += std::bit_ceil(nbytes);
    g_counts["most pinned bytes"] = std::max(g_counts["most pinned bytes"], now);
    memset(pointer, kPoison, nbytes);
    return {pointer, pointer, &drop, Device(kCPU)};
  }
  static void drop(void* pointer) {
    Lock lock(g_lock);
    auto found = g_pinned.find((char*)pointer);
    if (found == g_pinned.end()) return;
    g_counts["pinned bytes"] -= std::bit_ceil(found->second);
    for (auto& [key, queue] : g_queues) drain(key.first, key.second);  // a late copy may use it
    g_pinned.erase(found);
    free(pointer);
  }
  DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t nbytes) const final { memcpy(to, from, nbytes); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory g_pinned_memory;
REGISTER_HOST_ALLOCATOR(kLag, &g_pinned_memory);

bool is_pinned(const void* pointer) {
  Lock lock(g_lock);
  auto found = g_pinned.upper_bound((char*)pointer);
  return found != g_pinned.begin() && (--found, (char*)pointer < found->first + found->second);
}

// What torch asks of a device: guards, streams and events.

struct Recorded {
  int device;
  int64_t stream;
  uint64_t upto;
  int asked = 0;
};

struct Guard final : impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(DeviceType) {}
  static constexpr DeviceType static_type = kLag;
  DeviceType type() const override { return kLag; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kLag, t_device); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) t_device = device.index();
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(kLag, index_of(device)), t_stream[index_of(device)]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kLag, index_of(device)));
  }
  Stream getNewStream(Device device, int = 0) const override {
    Lock lock(g_lock);
    return Stream(Stream::UNSAFE, Device(kLag, index_of(device)), g_next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    t_stream[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const Stream& stream) const override {
    Lock lock(g_lock);
    return g_queues[{stream.device_index(), stream.id()}].tasks.empty();
  }
  void synchronizeStream(const Stream& stream) const override {
    host_waits("synchronisations", stream.device_index(), stream.id());
  }
  void synchronizeDevice(DeviceIndex index) const override {
    Lock lock(g_lock);
    ++g_counts["synchronisations"];
    for (auto& [key, queue] : g_queues)
      if (key.first == index) drain(key.first, key.second);
  }
  void record(void** event, const Stream& stream, DeviceIndex, EventFlag) const override {
    Lock lock(g_lock);
    delete (Recorded*)*event;
    int device = stream.device_index();
    *event = new Recorded{device, stream.id(), g_queues[{device, stream.id()}].queued};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    Recorded at = *(Recorded*)event;
    enqueue(stream.device_index(), stream.id(), [at] { drain(at.device, at.stream, at.upto); });
  }
  bool queryEvent(void* event) const override {  // true in the end, for whoever polls
    if (!event) return true;
    auto& at = *(Recorded*)event;
    if (++at.asked > 3) drain(at.device, at.stream, at.upto);
    Lock lock(g_lock);
    return g_queues[{at.device, at.stream}].done >= at.upto;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto& at = *(Recorded*)event;
    Lock lock(g_lock);
    ++g_counts["synchronisations"];
    drain(at.device, at.stream, at.upto);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete (Recorded*)event; }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return g_available; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { t_device = device; }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(t_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? t_device : exchangeDevice(device);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_memory; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
};
bool g_hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

// Operators.

at::Tensor empty(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<MemoryFormat> format) {
  const DeviceGuard guard(device_or_default(device));
  return at::detail::empty_generic(
      size, &g_device_memory, DispatchKeySet(DispatchKey::PrivateUse1), dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>) {
  const DeviceGuard guard(device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &g_device_memory, DispatchKeySet(DispatchKey::PrivateUse1), dtype_or_default(dtype));
}

at::Tensor over(void* memory, const at::Tensor& tensor) {
  auto made = at::from_blob(memory, tensor.sizes(), tensor.strides(), tensor.options().device(kCPU));
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// The memory of a tensor as loops of the device see it; as a launch, it keeps nothing alive.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kLag) return tensor;
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kCPU));
  return over(shadow(tensor.data_ptr()), tensor);
}

// The same of the host's tensors. What a queue holds must not be the last to let go of a tensor that Python knows: its
// end needs the interpreter's lock, whose holder may wait for ours.
at::Tensor unowned(const at::Tensor& tensor) {
  return tensor.is_cpu() ? over(tensor.data_ptr(), tensor) : on_host(tensor);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool up = from.is_cpu(), down = to.is_cpu();
  int device = (up ? to : from).device().index();
  int64_t stream = t_stream[device];
  auto source = unowned(from), target = unowned(to);
  auto task = [source, target]() mutable { target.copy_(source); };
  if (!up && !down) {
    int other = to.device().index();
    if (other != device) enqueue_wait(device, stream, other, t_stream[other]);
    enqueue(device, stream, task);
    if (other != device) enqueue_wait(other, t_stream[other], device, stream);
  } else if (non_blocking && is_pinned((up ? from : to).data_ptr())) {
    Lock lock(g_lock);
    ++g_counts["late copies"];
    enqueue(device, stream, task);
  } else {
    host_waits("blocking copies", device, stream);
    task();
  }
  return to;
}

at::Scalar item(const at::Tensor& tensor) {
  int device = tensor.device().index();
  host_waits("items", device, t_stream[device]);
  return on_host(tensor).item();
}

at::Tensor as_strided(
    const at::Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  auto at = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

at::Tensor view(const at::Tensor& tensor, SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return tensor;
}

const at::Tensor& resize(const at::Tensor& tensor, SymIntArrayRef size, std::optional<MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  size_t needed = (tensor.numel() + tensor.storage_offset()) * tensor.element_size();
  if (storage->nbytes() < needed) {
    const DeviceGuard guard(tensor.device());
    storage->set_data_ptr(g_device_memory.allocate(needed));
    storage->set_nbytes(needed);
  }
  return tensor;
}

void record_stream(at::Tensor& tensor, Stream stream) {
  Lock lock(g_lock);
  auto found = g_memory.find((char*)tensor.storage().mutable_data());
  if (found != g_memory.end()) found->second.used.insert(stream.id());
}

// What an argument becomes for the CPU's operator, and what the arguments say of the device.
struct Call {
  const FunctionSchema& schema;
  std::optional<Device> device;
  bool foreign = false;

  at::Tensor take(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kLag) {
      foreign |= tensor.dim() > 0;
      return tensor.clone();  // see `unowned`
    }
    TORCH_CHECK(
        !device || *device == tensor.device(), "Expected all tensors to be on the same device, but found ", *device,
        " and ", tensor.device(), " in ", schema.name());
    device = tensor.device();
    return on_host(tensor);
  }

  IValue take(const IValue& value) {
    if (value.isTensor()) return take(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> taken;
      for (const at::Tensor& tensor : value.toTensorVector()) taken.push_back(take(tensor));
      return taken;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> taken;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (!tensor) taken.push_back(std::nullopt);
        else taken.push_back(tensor->device().type() == kLag ? take(*tensor) : tensor->clone());  // the host's may come
      }
      return taken;
    }
    if (!value.isDevice()) return value;
    if (value.toDevice().type() == kLag && !device) device = value.toDevice();
    return Device(kCPU);
  }
};

void fallback(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto args = torch::jit::pop(*stack, schema.arguments().size());
  Call call{schema};
  bool in_place = false;
  std::vector<size_t> outs;  // of `out=`, which operators give its size
  torch::jit::Stack host;
  for (size_t i = 0; i < args.size(); ++i) {
    auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && schema.arguments()[i].kwarg_only() && args[i].isTensor()) {
      auto out = args[i].toTensor();
      call.take(out);
      host.push_back(at::empty_strided(out.sizes(), out.strides(), out.options().device(kCPU)));
      outs.push_back(i);
      continue;
    }
    in_place |= alias && alias->isWrite();
    host.push_back(call.take(args[i]));
  }
  TORCH_CHECK(
      !call.foreign, "Expected all tensors to be on the same device, but ", schema.name(), " got some on the host");
  int device = index_of(call.device.value_or(Device(kLag, t_device)));
  int64_t stream = t_stream[device];
  if (in_place) {
    enqueue(device, stream, [op, host]() mutable { op.callBoxed(&host); });
    for (const auto& returned : schema.returns())
      for (size_t i = 0; i < args.size(); ++i) {
        auto *alias = schema.arguments()[i].alias_info(), *its = returned.alias_info();
        if (its && alias && alias->isWrite() && alias->beforeSets() == its->beforeSets()) {
          stack->push_back(args[i]);
          break;
        }
      }
    return;
  }
  drain(device, stream);
  std::vector<at::Tensor> made;
  for (size_t i : outs) made.push_back(host[i].toTensor());
  op.callBoxed(&host);
  auto deliver = [&](const at::Tensor& result, const at::Tensor& to) {
    if (!result.numel()) return;
    auto target = on_host(to);
    enqueue(device, stream, [result, target]() mutable { target.copy_(result); });
  };
  for (size_t k = 0; k < outs.size(); ++k) {
    at::Tensor out = args[outs[k]].toTensor();
    if (out.sizes() != made[k].sizes()) out.resize_(made[k].sizes());
    deliver(made[k], out);
    stack->push_back(out);
  }
  if (!outs.empty()) return;
  auto lift = [&](const at::Tensor& result) -> at::Tensor {
    if (!result.defined() || !result.is_cpu()) return result;
    auto there = result.options().device(Device(kLag, device));
    auto lifted = at::empty_strided(result.sizes(), result.strides(), there);
    deliver(result, lifted);
    return lifted;
  };
  for (auto& value : host) {
    if (value.isTensor()) {
      stack->push_back(lift(value.toTensor()));
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> lifted;
      for (const at::Tensor& tensor : value.toTensorVector()) lifted.push_back(lift(tensor));
      stack->push_back(lifted);
    } else {
      stack->push_back(value);
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("resize_", resize);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("unfold", [](const at::Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(tensor, dim, size, step);
  });
  m.impl("view_as_real", [](const at::Tensor& tensor) { return at::native::view_as_real(tensor); });
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// What tests ask, as torch.ops.lag.

int64_t count(std::string name) {
  Lock lock(g_lock);
  return g_counts[name];
}

int64_t pending(int64_t device, int64_t stream) {
  Lock lock(g_lock);
  return g_queues[{(int)device, stream}].tasks.size();
}

int64_t exchange_device(int64_t device) { return device < 0 ? t_device : std::exchange(t_device, (int)device); }

// Unmap the pages of a tensor, or map them again: as it was, or as poison. What the device does with them meanwhile is
// a SIGSEGV, as it would end a process with CUDA.
void map(const at::Tensor& tensor, bool mapped, bool kept) {
  Lock lock(g_lock);
  auto& memory = memory_at(tensor.storage().data())->second;
  drain(memory.device, memory.stream);
  mprotect(memory.shadow, memory.size, mapped ? PROT_READ | PROT_WRITE : PROT_NONE);
  if (mapped && !kept) memset(memory.shadow, kPoison, memory.size);
}

// Put the block of a tensor into a file that stays open: its descriptor, its size, and where in it the tensor begins.
std::tuple<int64_t, int64_t, int64_t> share(const at::Tensor& tensor) {
  Lock lock(g_lock);
  auto found = memory_at(tensor.data_ptr());
  Memory& memory = found->second;
  if (memory.fd < 0) {
    drain(memory.device, memory.stream);
    memory.fd = new_file(memory.size);
    TORCH_CHECK(write(memory.fd, memory.shadow, memory.size) == (ssize_t)memory.size);
    map_twice(memory.fd, memory.size, found->first, memory.shadow);
  }
  return {memory.fd, (int64_t)memory.size, (char*)tensor.data_ptr() - found->first};
}

// Map the block of another process, as bytes.
at::Tensor attach(std::string path, int64_t size, int64_t device) {
  Lock lock(g_lock);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(fd >= 0, "the memory of another process cannot be opened: ", path);
  char* pointer = map_block(fd, size, device, t_stream[device]);
  Device where(kLag, device);
  auto storage = c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), size, DataPtr(pointer, pointer, &forget, where), nullptr, false);
  auto bytes = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(where));
  return bytes.set_(at::Storage(storage), 0, {size}, {1});
}

// Where the device's own loops find a tensor: for what moves its bytes as DMA does.
int64_t address(const at::Tensor& tensor) { return (int64_t)shadow(tensor.data_ptr()); }

TORCH_LIBRARY(lag, m) {
  m.def("available(bool on) -> ()", [](bool on) { g_available = on; });
  m.def("count(str name) -> int", count);
  m.def("pending(int device, int stream) -> int", pending);
  m.def("exchange_device(int device) -> int", exchange_device);
  m.def("map(Tensor tensor, bool mapped, bool kept) -> ()");
  m.def("share(Tensor tensor) -> (int, int, int)");
  m.def("attach(str path, int size, int device) -> Tensor", attach);
  m.def("address(Tensor tensor) -> int");
}

TORCH_LIBRARY_IMPL(lag, PrivateUse1, m) {
  m.impl("map", map);
  m.impl("share", share);
  m.impl("address", address);
}

}  // namespace
