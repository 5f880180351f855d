// A simulated accelerator: torch's PrivateUse1 device over host memory.
//
// Everything that torch does with an accelerator is real here: streams, events, guards, the device thread of autograd,
// pinned memory, storages that are resized, copies that do not wait. Only the computing is not: each operator runs at
// once, on the CPU, in the order in which the host calls it, and is *logged* with its stream, what it reads and what it
// writes. From the log, races.py finds what a device whose streams run by themselves could do in another order, and
// replay.py computes how long such a device would take.
//
// Copies between the device and pinned memory that do not wait are the exception: they happen *late*. What was copied to
// the host is there once the host has synchronised with it, and until then the host finds POISON. What is copied to the
// device is read from pinned memory when the device first needs it, or when the host synchronises. So a program that
// does not wait computes wrong numbers, as well as being found by the checker.
//
// Every function that says `locked` needs `mutex`.

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

namespace {

constexpr auto SIMULATED = c10::DeviceType::PrivateUse1;
constexpr int POISON = 0xCB;  // as a float32: -26711958; new memory and copies that have not landed consist of it
constexpr int QUERIES_UNTIL_DONE = 2;  // the second question about an event or a stream that is unfinished finds it done

const c10::Device the_device() { return {SIMULATED, 0}; }

// ---------------------------------------------------------------------------------------------------------------------
// The log. log.py has the same numbers.

enum class Kind : int {
  KERNEL, COLLECTIVE, TO_HOST, TO_DEVICE, HOST_ACCESS, ALLOCATE, FREE,
  RECORD, WAIT, SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE, QUERY, RECORD_STREAM, MARK, PRIORITY,
};

struct Access {
  int64_t block, begin, end;  // bytes of a block of memory
  bool writes;
};

struct Record {
  Kind kind;
  int64_t stream;
  std::string name;
  std::vector<Access> accesses;
  int64_t subject = 0;  // the number of the event or of the block that it is about
  int64_t extra = 0;    // an event's version, or a number of bytes
  int64_t thread = 0;
};

// How the device behaves. Tests plant bugs by these.
struct Behaviour {
  bool host_waits = true;            // if not, `synchronize` returns at once
  bool records_streams = true;       // if not, the allocator does not hear of `record_stream`
  bool has_priorities = true;        // if not, a stream with one is refused
  bool data_changes_device = false;  // torch refuses `.data =` between the CPU and a device that it does not know
} behaviour;

std::recursive_mutex mutex;  // guards everything down to the operators
using Lock = std::lock_guard<std::recursive_mutex>;

std::vector<Record> records;
bool logging = false;
std::unordered_map<std::thread::id, int64_t> threads;
thread_local int64_t current_stream = 0;
thread_local int kernels_running = 0;  // operators that an operator of the device calls are not the host's own

struct InKernel {
  InKernel() { ++kernels_running; }
  ~InKernel() { --kernels_running; }
};

void log_locked(Record record) {
  if (!logging) return;
  record.thread = threads.emplace(std::this_thread::get_id(), threads.size()).first->second;
  records.push_back(std::move(record));
}

// ---------------------------------------------------------------------------------------------------------------------
// Time: how far each stream is known to have come, from the point of view of a stream, an event or the host.

using Clock = std::map<int64_t, int64_t>;  // of each stream, how many of its operations are in the past

std::unordered_map<int64_t, Clock> clocks;  // of each stream
Clock host_clock;
int64_t next_stream = 1, next_event = 1;
std::map<int64_t, int64_t> priorities;  // of each stream that was given one; the lower the number, the sooner it is served

void join(Clock& clock, const Clock& other) {
  for (auto& [stream, position] : other) clock[stream] = std::max(clock[stream], position);
}
bool is_past(const Clock& clock, int64_t stream, int64_t position) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= position;
}
bool is_past(const Clock& clock, const Clock& other) {
  return std::all_of(other.begin(), other.end(), [&](auto& entry) { return is_past(clock, entry.first, entry.second); });
}
Clock& tick_locked(int64_t stream) {
  auto& clock = clocks[stream];
  ++clock[stream];
  return clock;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

struct Block {
  int64_t number;
  size_t nbytes;
  bool pinned;
  int64_t stream;  // whose pool it comes from
  int64_t graph = 0;  // in whose capture it was allocated
  bool dead = false;  // freed, and kept by that graph
};
std::map<uintptr_t, Block> blocks;  // what is allocated, by address
int64_t next_block = 1, bytes_in_use = 0, bytes_at_peak = 0;

const std::pair<const uintptr_t, Block>* find_block_locked(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return nullptr;
  auto& found = *--after;
  return address < found.first + std::max<size_t>(found.second.nbytes, 1) ? &found : nullptr;
}

bool is_simulated(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == SIMULATED; }

// The bytes from the first element to the last, within the tensor's storage.
std::pair<int64_t, int64_t> extent_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  auto size = static_cast<int64_t>(tensor.itemsize());
  return {tensor.storage_offset() * size, (tensor.storage_offset() + last + 1) * size};
}

void note_locked(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  auto* start = tensor.storage().data();
  auto* found = find_block_locked(start);
  if (!found) return;  // the host's ordinary memory
  auto [begin, end] = extent_of(tensor);
  auto shift = static_cast<int64_t>(reinterpret_cast<uintptr_t>(start) - found->first);
  accesses.push_back({found->second.number, begin + shift, end + shift, writes});
}

// ---------------------------------------------------------------------------------------------------------------------
// Copies that have not landed

struct LateCopy {
  bool to_host;
  int64_t stream, position;
  Access host, device;
  at::Tensor source, target;  // to the host: the bytes that were copied, and pinned memory; to the device: two aliases
};
std::list<LateCopy> late_copies;  // in the order in which they were queued

// Whoever watches operators (a dispatch mode, the host's log) does not see these.
void copy_unseen(const at::Tensor& target, const at::Tensor& source) {
  InKernel running;
  c10::InferenceMode inference;  // an alias that was made in it may be written to in it alone
  c10::impl::ExcludeDispatchKeyGuard guard(c10::python_ks | c10::autograd_dispatch_keyset);
  target.copy_(source);
}

void poison(const at::Tensor& tensor) {
  InKernel running;
  c10::InferenceMode inference;
  c10::impl::ExcludeDispatchKeyGuard guard(c10::python_ks | c10::autograd_dispatch_keyset);
  auto nbytes = tensor.numel() * static_cast<int64_t>(tensor.itemsize());
  auto bytes = at::full({nbytes}, POISON, at::TensorOptions().dtype(at::kByte));
  tensor.copy_(at::from_blob(bytes.mutable_data_ptr(), tensor.sizes(), tensor.options().device(at::kCPU)));
}

template <typename Condition>
void land_locked(Condition condition) {
  for (auto copy = late_copies.begin(); copy != late_copies.end();) {
    if (condition(*copy)) {
      copy_unseen(copy->target, copy->source);
      copy = late_copies.erase(copy);
    } else {
      ++copy;
    }
  }
}

// The host knows that everything in `clock` is over.
void reach_host_locked(const Clock& clock) {
  join(host_clock, clock);
  land_locked([](const LateCopy& copy) { return is_past(host_clock, copy.stream, copy.position); });
}

bool overlap(const Access& one, const Access& other) {
  return one.block == other.block && one.begin < other.end && other.begin < one.end;
}

// An operation of the device is about to do this: what was queued before it happens first; what was not, does not.
void prepare_locked(const Clock& clock, const std::vector<Access>& accesses) {
  if (late_copies.empty()) return;
  land_locked([&](const LateCopy& copy) {
    if (!is_past(clock, copy.stream, copy.position)) return false;
    for (auto& access : accesses)
      if (overlap(access, copy.host) || overlap(access, copy.device)) return true;
    return false;
  });
}

// A real allocator keeps pinned memory until the copies from it are over; and nobody reads what was freed.
void forget_block_locked(uintptr_t address) {
  auto block = blocks.at(address);
  land_locked([&](const LateCopy& copy) { return !copy.to_host && copy.host.block == block.number; });
  late_copies.remove_if([&](const LateCopy& copy) {
    return copy.to_host ? copy.host.block == block.number : copy.device.block == block.number;
  });
  log_locked({Kind::FREE, block.stream, block.pinned ? "pinned" : "device", {}, block.number, static_cast<int64_t>(block.nbytes)});
  if (!block.pinned) bytes_in_use -= block.nbytes;
  blocks.erase(address);
}

// ---------------------------------------------------------------------------------------------------------------------

#include "capture.h"

// ---------------------------------------------------------------------------------------------------------------------
// The host stands still: somebody may want to know from where. Called without the lock, since it takes that of Python.

std::function<void(const std::string&)> tell_of_wait;

void host_waits_for(const std::string& what) {
  refuse_in_capture(what);
  if (logging && tell_of_wait) tell_of_wait(what);
}

// ---------------------------------------------------------------------------------------------------------------------
// Allocators. Memory is really given back, so that its size counts; that a caching allocator would give it out again at
// once is what races.py works out from ALLOCATE, FREE and RECORD_STREAM.

struct Allocator final : c10::Allocator {
  explicit Allocator(bool pins) : pinned(pins) {}

  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device = pinned ? c10::Device(c10::DeviceType::CPU) : the_device();
    if (nbytes == 0) return {nullptr, nullptr, &free_block, device};
    void* pointer = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
    TORCH_CHECK(pointer, "the simulated device is out of memory");
    std::memset(pointer, POISON, nbytes);
    Lock lock(mutex);
    blocks[reinterpret_cast<uintptr_t>(pointer)] = Block{next_block, nbytes, pinned, current_stream, capturing};
    log_locked({Kind::ALLOCATE, current_stream, name(), {}, next_block++, static_cast<int64_t>(nbytes)});
    if (!pinned) bytes_at_peak = std::max(bytes_at_peak, bytes_in_use += nbytes);
    return {pointer, pointer, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override { std::memcpy(target, source, nbytes); }

 private:
  bool pinned;
  const char* name() const { return pinned ? "pinned" : "device"; }

  static void free_block(void* pointer) {
    if (!pointer) return;
    Lock lock(mutex);
    auto found = blocks.find(reinterpret_cast<uintptr_t>(pointer));
    if (found != blocks.end()) {
      auto& block = found->second;
      if (keeps_block_locked(block.graph)) {
        block.dead = true;
        return;
      }
      forget_block_locked(found->first);
    }
    std::free(pointer);
  }
};
Allocator device_allocator{false}, pinned_allocator{true};

void record_stream_locked(const void* pointer, int64_t stream) {
  if (!behaviour.records_streams) return;
  if (auto* found = find_block_locked(pointer)) log_locked({Kind::RECORD_STREAM, stream, "", {}, found->second.number});
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams and events

struct Event {
  int64_t number, version = 0;
  int questions = 0;  // since it was last recorded
  int64_t captured_by = 0;
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

std::unordered_map<int64_t, int> questions_about_streams;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIMULATED; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(int64_t number) { return c10::Stream(c10::Stream::UNSAFE, the_device(), number); }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int priority) const override {
    TORCH_CHECK(behaviour.has_priorities || priority == 0, "the simulated device has no priorities now");
    Lock lock(mutex);
    if (priority) {
      priorities[next_stream] = priority;
      log_locked({Kind::PRIORITY, next_stream, "", {}, 0, priority});
    }
    return stream(next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto last = current_stream;
    current_stream = next.id();
    return stream(last);
  }
  bool queryStream(const c10::Stream& asked) const override {
    refuse_in_capture("a query of a stream");
    Lock lock(mutex);
    auto& clock = clocks[asked.id()];
    auto& questions = questions_about_streams[asked.id()];
    if (!is_past(host_clock, clock) && ++questions < QUERIES_UNTIL_DONE) return false;
    questions = 0;
    log_locked({Kind::QUERY, asked.id(), "query of a stream", {}});
    reach_host_locked(clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& asked) const override {
    host_waits_for("synchronize a stream");
    Lock lock(mutex);
    if (!behaviour.host_waits) return;
    log_locked({Kind::SYNC_STREAM, asked.id(), "synchronize", {}});
    reach_host_locked(clocks[asked.id()]);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    host_waits_for("synchronize the device");
    Lock lock(mutex);
    if (!behaviour.host_waits) return;
    log_locked({Kind::SYNC_DEVICE, 0, "synchronize", {}});
    for (auto& [number, clock] : clocks) reach_host_locked(clock);
  }

  void record(void** event, const c10::Stream& recorded, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event{next_event++};
    auto& made = *static_cast<Event*>(*event);
    ++made.version;
    made.questions = 0;
    made.clock = clocks[recorded.id()];
    made.captured_by = capturing && graphs[capturing].streams.count(recorded.id()) ? capturing : 0;
    made.time = std::chrono::steady_clock::now();
    log_locked({Kind::RECORD, recorded.id(), "", {}, made.number, made.version});
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (!event) return;
    Lock lock(mutex);
    auto& awaited = *static_cast<Event*>(event);
    fork_locked(waiting.id(), awaited.captured_by);
    join(clocks[waiting.id()], awaited.clock);
    log_locked({Kind::WAIT, waiting.id(), "", {}, awaited.number, awaited.version});
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    refuse_in_capture("a query of an event");
    Lock lock(mutex);
    auto& asked = *static_cast<Event*>(event);
    check_event(asked.captured_by);
    if (!is_past(host_clock, asked.clock) && ++asked.questions < QUERIES_UNTIL_DONE) return false;
    log_locked({Kind::QUERY, -1, "query of an event", {}, asked.number, asked.version});
    reach_host_locked(asked.clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    host_waits_for("synchronize an event");
    if (event) check_event(static_cast<Event*>(event)->captured_by);
    Lock lock(mutex);
    if (!event || !behaviour.host_waits) return;
    auto& awaited = *static_cast<Event*>(event);
    log_locked({Kind::SYNC_EVENT, -1, "synchronize", {}, awaited.number, awaited.version});
    reach_host_locked(awaited.clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    using milliseconds = std::chrono::duration<double, std::milli>;
    return milliseconds(static_cast<Event*>(second)->time - static_cast<Event*>(first)->time).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& used) const override {
    Lock lock(mutex);
    record_stream_locked(data.get(), used.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------------------------------------------------------------
// What torch asks of a device beyond its operators

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return the_device(); }
  bool isPinnedPtr(const void* pointer) const override {
    Lock lock(mutex);
    auto* found = find_block_locked(pointer);
    return found && found->second.pinned;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  // The CPU's, since the CPU computes: so random numbers are those of a model on the CPU.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::detail::createCPUGenerator();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    if (nbytes == 0) {
      impl->set_data_ptr(c10::DataPtr(nullptr, the_device()));
      impl->set_nbytes(0);
      return;
    }
    auto data = device_allocator.allocate(nbytes);
    if (impl->data() && impl->nbytes()) {
      Lock lock(mutex);
      auto kept = static_cast<int64_t>(std::min<size_t>(nbytes, impl->nbytes()));
      std::vector<Access> accesses{{find_block_locked(impl->data())->second.number, 0, kept, false},
                                   {find_block_locked(data.get())->second.number, 0, kept, true}};
      check_stream_locked(current_stream, "storage.resize_");
      prepare_locked(tick_locked(current_stream), accesses);
      std::memcpy(data.get(), impl->data(), kept);
      capture_locked("storage.resize_", accesses, [to = data.get(), from = impl->data(), kept] { std::memcpy(to, from, kept); });
      log_locked({Kind::KERNEL, current_stream, "storage.resize_", std::move(accesses), 0, kept});
    }
    impl->set_data_ptr(std::move(data));
    impl->set_nbytes(nbytes);
  }
};
Hooks hooks;

// ---------------------------------------------------------------------------------------------------------------------
// Operators

// The same memory as a tensor of the CPU.
at::Tensor cpu_alias(const at::Tensor& tensor) {
  auto options = at::TensorOptions().device(at::kCPU).dtype(tensor.dtype());
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto needed = static_cast<size_t>(extent_of(tensor).second);
  TORCH_CHECK(tensor.storage().nbytes() >= needed, "simulated device: use after free: a tensor of ", tensor.sizes(), " needs ",
              needed, " bytes, and its storage has ", tensor.storage().nbytes());
  auto* start = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(start, tensor.sizes(), tensor.strides(), [](void*) {}, options, at::Device(at::kCPU));
}

constexpr c10::DispatchKeySet DEVICE_KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor to_device_memory(const at::Tensor& result) {
  at::Tensor made = at::detail::empty_strided_generic(result.sizes(), result.strides(), &device_allocator, DEVICE_KEYS, result.scalar_type());
  if (result.numel()) copy_unseen(cpu_alias(made), result);
  return made;
}

// These return numbers or shapes that depend on values, so the host waits for them.
bool reads_on_host(const std::string& name, const std::vector<c10::IValue>& arguments) {
  static const std::set<std::string> waiting = {
      "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::repeat_interleave",
      "aten::_linalg_eigh", "aten::_linalg_svd"};  // CUDA's look whether they have converged
  if (waiting.count(name)) return true;
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return false;
  for (auto& argument : arguments) {
    if (!argument.isOptionalTensorList()) continue;
    for (const auto& index : argument.toOptionalTensorVector())
      if (index.has_value() && index->defined() && index->scalar_type() == at::kBool) return true;
  }
  return false;
}

// One call of an operator: its arguments become aliases on the CPU, the CPU's kernel runs, its results become the device's.
struct Call {
  std::vector<Access> accesses;
  std::vector<std::pair<at::Tensor, at::Tensor>> unsized;  // an empty `out` that the kernel will size, and what stands for it
  bool on_device = false;

  at::Tensor argument(const at::Tensor& tensor, bool writes) {
    // A graph has the values that the host's numbers had when it was captured.
    if (!is_simulated(tensor)) return is_capturing && !writes && tensor.defined() ? tensor.clone() : tensor;
    on_device = true;
    {
      Lock lock(mutex);
      note_locked(accesses, tensor, writes);
    }
    if (!writes || tensor.numel()) return cpu_alias(tensor);
    unsized.emplace_back(tensor, at::empty(tensor.sizes(), at::TensorOptions().device(at::kCPU).dtype(tensor.dtype())));
    return unsized.back().second;
  }
  void replace(c10::IValue& value, bool writes) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = argument(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(argument(tensor, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor.has_value() ? std::optional<at::Tensor>(argument(*tensor, writes)) : tensor);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == SIMULATED) {
      value = c10::Device(at::kCPU);
      on_device = true;
    }
  }
  void size_outputs() {
    for (auto& [tensor, stand_in] : unsized) {
      if (stand_in.numel() == 0) continue;
      tensor.unsafeGetTensorImpl()->set_sizes_contiguous(stand_in.sizes());
      hooks.resizePrivateUse1Bytes(tensor.storage(), stand_in.numel() * stand_in.itemsize());
      copy_unseen(cpu_alias(tensor), stand_in);
      Lock lock(mutex);
      note_locked(accesses, tensor, true);
    }
  }
  at::Tensor result(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    auto made = to_device_memory(tensor);
    Lock lock(mutex);
    note_locked(accesses, made, true);
    return made;
  }
};

// The same call when a graph is replayed: with the same memory for its arguments and its results.
struct Again {
  c10::OperatorHandle handle;
  torch::jit::Stack arguments;
  std::vector<std::pair<size_t, std::vector<at::Tensor>>> results;  // which, and aliases of what the device has of it
  std::vector<std::pair<at::Tensor, at::Tensor>> sized;             // an alias of an `out`, and what stands for it

  void keep(size_t index, const std::vector<at::Tensor>& tensors) {
    if (!is_capturing) return;
    results.emplace_back(index, std::vector<at::Tensor>());
    for (auto& tensor : tensors) results.back().second.push_back(tensor.defined() ? cpu_alias(tensor) : tensor);
  }
  void operator()() const {
    auto stack = arguments;
    handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    auto first = stack.size() - handle.schema().returns().size();
    for (auto& [index, targets] : results) {
      auto& value = stack[first + index];
      auto made = value.isTensor() ? std::vector<at::Tensor>{value.toTensor()} : value.toTensorVector();
      for (size_t i = 0; i < targets.size(); ++i)
        if (targets[i].defined() && targets[i].numel()) copy_unseen(targets[i], made[i]);
    }
    for (auto& [target, stand_in] : sized) copy_unseen(target, stand_in);
  }
};

bool writes_to(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// `_foreach_copy_` between the host and the device is several copies.
bool copies_between_host_and_device(const c10::OperatorHandle& handle, const torch::jit::Stack& stack) {
  if (handle.operator_name().name != "aten::_foreach_copy_") return false;
  auto on_device = [](const std::vector<at::Tensor>& list) { return std::all_of(list.begin(), list.end(), is_simulated); };
  return !on_device(stack[stack.size() - 3].toTensorVector()) || !on_device(stack[stack.size() - 2].toTensorVector());
}

void copy_one_by_one(torch::jit::Stack* stack) {
  auto non_blocking = torch::jit::pop(*stack).toBool();
  auto sources = torch::jit::pop(*stack).toTensorVector();
  auto targets = torch::jit::pop(*stack).toTensorVector();
  for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(sources[i], non_blocking);
}

// What CUDA's kernels for lists do, since autograd does not do it for them.
void count_versions(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& given) {
  if (schema.name().rfind("aten::_foreach_", 0) != 0) return;
  for (size_t i = 0; i < given.size(); ++i)
    if (given[i].isTensorList() && writes_to(schema.arguments()[i]))
      for (const at::Tensor& tensor : given[i].toTensorVector()) tensor.unsafeGetTensorImpl()->bump_version();
}

void run_operator(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  if (copies_between_host_and_device(handle, *stack)) return copy_one_by_one(stack);
  InKernel running;
  const auto& schema = handle.schema();
  const auto& parameters = schema.arguments();
  auto first = stack->size() - parameters.size();
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  bool waits = reads_on_host(schema.name(), given);
  if (waits) host_waits_for(schema.name());
  Call call;
  for (size_t i = 0; i < parameters.size(); ++i) call.replace((*stack)[first + i], writes_to(parameters[i]));
  {
    Lock lock(mutex);
    check_stream_locked(current_stream, schema.name());
    prepare_locked(tick_locked(current_stream), call.accesses);
  }
  Again again{handle};
  if (is_capturing) again.arguments.assign(stack->begin() + first, stack->end());
  handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.size_outputs();
  count_versions(schema, given);
  const auto& returns = schema.returns();
  auto first_result = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[first_result + i];
    if (writes_to(returns[i])) {  // one of the arguments, itself
      for (size_t j = 0; j < parameters.size(); ++j)
        if (writes_to(parameters[j]) && *parameters[j].alias_info() == *returns[i].alias_info()) value = given[j];
      continue;
    }
    if (!call.on_device || !(value.isTensor() || value.isTensorList())) continue;
    TORCH_CHECK(!returns[i].alias_info(), "the simulated device lacks the view ", schema.operator_name());
    if (value.isTensor()) {
      value = call.result(value.toTensor());
      again.keep(i, {value.toTensor()});
    } else {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.result(tensor));
      again.keep(i, list.vec());
      value = list;
    }
  }
  for (auto& [tensor, stand_in] : call.unsized)
    if (is_capturing && tensor.numel()) again.sized.emplace_back(cpu_alias(tensor), stand_in);
  Lock lock(mutex);
  capture_locked(schema.name(), call.accesses, again);
  log_locked({Kind::KERNEL, current_stream, c10::toString(handle.operator_name()), std::move(call.accesses)});
  if (!waits) return;
  log_locked({Kind::SYNC_STREAM, current_stream, schema.name(), {}});
  reach_host_locked(clocks[current_stream]);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, DEVICE_KEYS, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
                                           DEVICE_KEYS, c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (self.storage().nbytes() < needed) hooks.resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t numel = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {c10::SymInt(numel)}, {c10::SymInt(1)});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_storage_offset(source.storage_offset());
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  return self;
}
void record_stream(at::Tensor& self, c10::Stream stream) {
  Lock lock(mutex);
  record_stream_locked(self.storage().data(), stream.id());
}

bool can_take_data_of(const at::Tensor& self, const at::Tensor& other) {
  if (behaviour.data_changes_device && self.layout() == at::kStrided && other.layout() == at::kStrided) return true;
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(other.key_set());
}

bool is_pinned_locked(const at::Tensor& tensor) {
  auto* found = tensor.numel() ? find_block_locked(tensor.storage().data()) : nullptr;
  return found && found->second.pinned;
}

// An alias has the bytes of a tensor; this has its values, where they are conjugate or negative views of those.
at::Tensor as_seen(const at::Tensor& alias, const at::Tensor& tensor) {
  auto seen = tensor.is_conj() ? alias.conj() : alias;
  return tensor.is_neg() ? seen._neg_view() : seen;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  bool to_device = !is_simulated(source), to_host = !is_simulated(target);
  if (target.numel() == 0) return target;
  auto from = to_device ? source : as_seen(cpu_alias(source), source), to = to_host ? target : as_seen(cpu_alias(target), target);
  bool late = false;
  if (non_blocking && (to_device || to_host)) {
    Lock lock(mutex);
    late = is_pinned_locked(to_device ? source : target);
  }
  auto kind = to_host ? Kind::TO_HOST : to_device ? Kind::TO_DEVICE : Kind::KERNEL;
  auto name = to_host ? "copy to the host" : to_device ? "copy to the device" : "aten::copy_";
  if ((to_host || to_device) && !late) host_waits_for(std::string(name) + " that waits");
  {  // the result is returned without the lock: to count another reference may take the lock of Python
    Lock lock(mutex);
    check_stream_locked(current_stream, name);
    Access read{-1, 0, 0, false}, written{-1, 0, 0, true};  // of no block: the host's ordinary memory
    std::vector<Access> accesses, one;
    note_locked(one, source, false);
    if (!one.empty()) accesses.push_back(read = one[0]);
    one.clear();
    note_locked(one, target, true);
    if (!one.empty()) accesses.push_back(written = one[0]);
    prepare_locked(tick_locked(current_stream), accesses);

    auto position = clocks[current_stream][current_stream];
    if (capturing) {
      auto host = to_device ? cpu_alias(source) : from, back = to_host ? cpu_alias(target) : to;
      if (!to_host) copy_unseen(back, host);
      capture_locked(name, accesses, [host, back] { copy_unseen(back, host); });
    } else if (late && to_host) {
      auto snapshot = at::empty(target.sizes(), target.options().device(at::kCPU).pinned_memory(false));
      copy_unseen(snapshot, from);
      auto memory = cpu_alias(target);  // does not keep the pinned memory alive
      poison(memory);
      late_copies.push_back({true, current_stream, position, written, read, snapshot, memory});
    } else if (late) {
      late_copies.push_back({false, current_stream, position, read, written, cpu_alias(source), to});
    } else {
      copy_unseen(to, from);
    }
    log_locked({kind, current_stream, name, std::move(accesses), 0, target.numel() * static_cast<int64_t>(target.itemsize())});
    if ((to_host || to_device) && !late) {
      log_locked({Kind::SYNC_STREAM, current_stream, std::string(name) + " that waits", {}});
      reach_host_locked(clocks[current_stream]);
    }
  }
  return target;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("resize_", &resize_);
  library.impl("_copy_from", &copy_from);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &can_take_data_of);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
}
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FULL_PRECISION)
}

// Torch would make these of other operators on a device that it does not know. A real device has kernels of its own for
// them: one kernel for a whole list; and so the numbers of a norm are those of the CPU.
const std::set<std::string> OF_OUR_OWN = {"aten::native_layer_norm", "aten::native_group_norm", "aten::split_with_sizes_copy",
                                          "aten::_chunk_cat", "aten::convolution", "aten::convolution_backward"};

void register_kernels_of_our_own() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    bool is_list = name.name.rfind("aten::_foreach_", 0) == 0;
    if (!is_list && !OF_OUR_OWN.count(name.name)) continue;
    library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What the host itself does with pinned memory: operators of the CPU

// Operators that call others, or that look at no value.
const std::set<std::string> NOT_THE_HOSTS_OWN = {
    "aten::to", "aten::_to_copy", "aten::cpu", "aten::contiguous", "aten::reshape", "aten::detach", "aten::detach_", "aten::alias",
    "aten::resize_", "aten::is_pinned", "aten::lift_fresh", "aten::_has_compatible_shallow_copy_type", "aten::split",
    "aten::split_with_sizes", "aten::unbind", "aten::chunk", "aten::unflatten_dense_tensors", "aten::narrow", "aten::zeros_like",
    "aten::empty_like", "aten::new_empty", "aten::new_zeros", "aten::type_as", "aten::set_data", "aten::pin_memory",
    "aten::_pin_memory", "aten::copy", "aten::item", "aten::set_", "aten::record_stream"};

std::unique_ptr<at::ObserverContext> watch_host(const at::RecordFunction& function) {
  if (!logging || kernels_running) return nullptr;
  auto schema = function.operator_schema();
  if (!schema || schema->name().rfind("aten::", 0) != 0 || NOT_THE_HOSTS_OWN.count(schema->name())) return nullptr;
  for (auto& result : schema->returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return nullptr;  // a view
  std::vector<Access> accesses;
  bool on_device = false;
  Lock lock(mutex);
  auto look_at = [&](const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return;
    on_device = on_device || is_simulated(tensor);
    if (tensor.device().is_cpu() && tensor.has_storage() && is_pinned_locked(tensor)) note_locked(accesses, tensor, writes);
  };
  auto inputs = function.inputs();
  auto& parameters = schema->arguments();
  for (size_t i = 0; i < std::min<size_t>(inputs.size(), parameters.size()); ++i) {
    bool writes = writes_to(parameters[i]);
    if (inputs[i].isTensor()) look_at(inputs[i].toTensor(), writes);
    if (inputs[i].isTensorList())
      for (const at::Tensor& tensor : inputs[i].toTensorVector()) look_at(tensor, writes);
  }
  if (!on_device && !accesses.empty()) log_locked({Kind::HOST_ACCESS, -1, schema->name(), std::move(accesses)});
  return nullptr;
}

// Torch reads these without an operator: device.py tells of them.
void host_reads(const at::Tensor& tensor, const std::string& how) {
  if (!logging || !tensor.device().is_cpu() || !tensor.has_storage()) return;
  Lock lock(mutex);
  std::vector<Access> accesses;
  if (is_pinned_locked(tensor)) note_locked(accesses, tensor, false);
  if (!accesses.empty()) log_locked({Kind::HOST_ACCESS, -1, how, std::move(accesses)});
}

// ---------------------------------------------------------------------------------------------------------------------
// Collectives: device.py moves the bytes between these two calls

std::vector<Access> accesses_of_locked(const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes) {
  std::vector<Access> accesses;
  for (auto& tensor : reads) note_locked(accesses, tensor, false);
  for (auto& tensor : writes) note_locked(accesses, tensor, true);
  return accesses;
}

void begin_collective(int64_t stream, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes) {
  Lock lock(mutex);
  check_stream_locked(stream, "a collective");
  prepare_locked(tick_locked(stream), accesses_of_locked(reads, writes));
}

void end_collective(int64_t stream, std::string name, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes,
                    std::function<void()> again) {
  Lock lock(mutex);
  capture_locked(name, accesses_of_locked(reads, writes), std::move(again));
  int64_t read = 0, written = 0;
  for (auto& tensor : reads) read += tensor.numel() * tensor.itemsize();
  for (auto& tensor : writes) written += tensor.numel() * tensor.itemsize();
  log_locked({Kind::COLLECTIVE, stream, std::move(name), accesses_of_locked(reads, writes), 0, std::max(read, written)});
}

// Values are copied out under the lock, and Python's objects made outside: making them may collect garbage, which frees
// tensors of the device.
pybind11::list take_records() {
  std::vector<Record> taken;
  {
    Lock lock(mutex);
    taken = records;
  }
  pybind11::list list;
  for (auto& record : taken) {
    pybind11::list accesses;
    for (auto& a : record.accesses) accesses.append(pybind11::make_tuple(a.block, a.begin, a.end, a.writes));
    list.append(pybind11::make_tuple(static_cast<int>(record.kind), record.stream, record.name, accesses, record.subject, record.extra,
                                     record.thread));
  }
  return list;
}

}  // namespace

// Whoever waits for our lock must not hold that of Python, for which an operator may wait that has ours.
using WithoutPython = pybind11::call_guard<pybind11::gil_scoped_release>;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(SIMULATED, &device_allocator);
  register_kernels_of_our_own();
  at::addGlobalCallback(at::RecordFunctionCallback(&watch_host).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  module.def("start_log", [] {
    Lock lock(mutex);
    records.clear();
    logging = true;
    for (auto& [stream, priority] : priorities) log_locked({Kind::PRIORITY, stream, "", {}, 0, priority});
  }, WithoutPython());
  module.def("stop_log", [] {
    Lock lock(mutex);
    logging = false;
  }, WithoutPython());
  module.def("records", &take_records);
  module.def("mark", [](std::string name) {
    Lock lock(mutex);
    log_locked({Kind::MARK, current_stream, std::move(name), {}});
  }, WithoutPython());
  module.def("begin_collective", &begin_collective, WithoutPython());
  module.def("end_collective", &end_collective, WithoutPython());
  module.def("host_reads", &host_reads, WithoutPython());
  module.def("begin_capture", &begin_capture);
  module.def("end_capture", &end_capture);
  module.def("drop_capture", &drop_capture);
  module.def("is_capturing", [] { return is_capturing.load(); });
  module.def("replay", &replay);
  module.def("free_graph", &free_graph);
  module.def("on_wait_of_host", [](std::function<void(const std::string&)> call) { tell_of_wait = std::move(call); });
  module.def("cpu_alias", &cpu_alias);
  module.def("behave", [](const std::string& how, bool value) {
    Lock lock(mutex);
    if (how == "host_waits") return std::exchange(behaviour.host_waits, value);
    if (how == "has_priorities") return std::exchange(behaviour.has_priorities, value);
    if (how == "records_streams") return std::exchange(behaviour.records_streams, value);
    TORCH_CHECK(how == "data_changes_device", "the simulated device has no behaviour ", how);
    return std::exchange(behaviour.data_changes_device, value);
  });
  module.def("set_current_stream", [](int64_t number) { return std::exchange(current_stream, number); });
  module.def("memory", [] {
    Lock lock(mutex);
    return std::make_pair(bytes_in_use, bytes_at_peak);
  });
  module.def("reset_peak", [] {
    Lock lock(mutex);
    bytes_at_peak = bytes_in_use;
  });
}
