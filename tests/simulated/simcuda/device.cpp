// What torch asks a CUDA build for in C++, answered by a simulated device: the current device and stream, events, pinned
// memory, hooks. A stream is the moment at which it will be done; the host has a clock of its own. No work is done here:
// Python computes on the CPU and calls simulated_launch with the seconds that the device would take.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <set>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr int kMostDevices = 8;
constexpr int kPool = 32;  // streams that libraries share, after the default one
constexpr double kRecordSeconds = 1e-6;

struct Queue {
  std::vector<double> done = std::vector<double>(1 + kPool, 0.0);  // by stream
  int next_of_pool = 0;
  double busy = 0.0;        // seconds in which any stream worked
  double busy_until = 0.0;
};

struct Moment {
  double at;
  bool timed;
};

struct Copy {  // of bytes that are on their way to the host
  double at;
  void* target;
  std::vector<char> bytes;
};

std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;
double host = 1000.0;
int devices = 1;
double wait_seconds = 0.0;  // of the host, beside the time until the device is done
int64_t waits = 0;  // how often the host waited for a device
Queue queues[kMostDevices];
std::list<Copy> copies;
std::set<const void*> pinned;
thread_local DeviceIndex device_now = 0;
thread_local c10::StreamId streams_now[kMostDevices] = {};  // by device

Device device_of(DeviceIndex index) {
  return Device(DeviceType::CUDA, index);
}

Stream stream_of(DeviceIndex index, c10::StreamId id) {
  return Stream(Stream::UNSAFE, device_of(index), id);
}

double& done_at(const Stream& stream) {
  return queues[stream.device_index()].done.at(stream.id());
}

void host_waits_until(double moment) {
  Locked locked(lock);
  waits += 1;
  host = std::max(host, moment) + wait_seconds;
  copies.remove_if([](const Copy& copy) {
    if (copy.at > host) return false;
    std::memcpy(copy.target, copy.bytes.data(), copy.bytes.size());
    return true;
  });
}

double all_done(DeviceIndex index) {
  const auto& done = queues[index].done;
  return *std::max_element(done.begin(), done.end());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return device_of(device_now); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < devices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) device_now = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return devices; }

  Stream getStream(Device device) const override {
    DeviceIndex index = device.has_index() ? device.index() : device_now;
    return stream_of(index, streams_now[index]);
  }
  Stream getDefaultStream(Device device) const override { return stream_of(device.index(), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    Locked locked(lock);
    DeviceIndex index = device.has_index() ? device.index() : device_now;
    Queue& queue = queues[index];
    queue.next_of_pool = (queue.next_of_pool + 1) % kPool;
    return stream_of(index, 1 + queue.next_of_pool);
  }
  Stream getNewStream(Device device, int) const override {
    Locked locked(lock);
    DeviceIndex index = device.has_index() ? device.index() : device_now;
    queues[index].done.push_back(0.0);
    return stream_of(index, queues[index].done.size() - 1);
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    streams_now[stream.device_index()] = stream.id();
    return before;
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag flag) const override {
    Locked locked(lock);
    if (!*event) *event = new Moment{0.0, flag == c10::EventFlag::BACKEND_DEFAULT};
    host += kRecordSeconds;
    static_cast<Moment*>(*event)->at = std::max(host, done_at(stream));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  void block(void* event, const Stream& stream) const override {
    Locked locked(lock);
    done_at(stream) = std::max(done_at(stream), static_cast<Moment*>(event)->at);
  }
  bool queryEvent(void* event) const override { return host >= static_cast<Moment*>(event)->at; }
  void synchronizeEvent(void* event) const override { host_waits_until(static_cast<Moment*>(event)->at); }
  double elapsedTime(void* first, void* last, const DeviceIndex) const override {
    const auto& began = *static_cast<Moment*>(first);
    const auto& ended = *static_cast<Moment*>(last);
    TORCH_CHECK(began.timed && ended.timed, "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(
        host >= began.at && host >= ended.at, "Both events must be completed before calculating elapsed time.");
    return 1e3 * (ended.at - began.at);
  }

  bool queryStream(const Stream& stream) const override { return host >= done_at(stream); }
  void synchronizeStream(const Stream& stream) const override { host_waits_until(done_at(stream)); }
  void synchronizeDevice(const DeviceIndex index) const override { host_waits_until(all_done(index)); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

void unpin(void* memory) {
  Locked locked(lock);
  pinned.erase(memory);
  std::free(memory);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Locked locked(lock);
    void* memory = std::aligned_alloc(64, (bytes / 64 + 1) * 64);
    pinned.insert(memory);
    return {memory, memory, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};
Pinned pinned_allocator;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex current_device() const override { return device_now; }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(DeviceIndex index) const override { device_now = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(device_now, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  void deviceSynchronize(DeviceIndex index) const override { host_waits_until(all_done(index)); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* memory) const override {
    Locked locked(lock);
    return pinned.count(memory) > 0;
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)  // the name that torch looks up

struct ReducerTimer final : c10d::Timer {
  explicit ReducerTimer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return {}; }
};

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ReducerTimer)
}

// For Python. Moments and spans are seconds; streams are those that are current in the calling thread.
extern "C" {

void simulated_start(int count, double seconds_of_a_wait) {
  devices = count;
  wait_seconds = seconds_of_a_wait;
}

double simulated_host() {
  return host;
}

void simulated_host_works(double seconds) {
  Locked locked(lock);
  host += seconds;
}

void simulated_host_waits_until(double moment) {
  host_waits_until(moment);
}

int64_t simulated_waits() {
  return waits;
}

double simulated_done_at() {
  return queues[device_now].done[streams_now[device_now]];
}

// Put work on the current stream; return when it will be done.
double simulated_launch(double seconds) {
  Locked locked(lock);
  Queue& queue = queues[device_now];
  double& done = queue.done[streams_now[device_now]];
  double began = std::max(done, host);
  done = began + seconds;
  queue.busy += std::max(0.0, done - std::max(began, queue.busy_until));
  queue.busy_until = std::max(queue.busy_until, done);
  return done;
}

// Let the current stream wait for a moment.
void simulated_stream_waits_until(double moment) {
  Locked locked(lock);
  double& done = queues[device_now].done[streams_now[device_now]];
  done = std::max(done, moment);
}

// Copy to the host's memory at the next wait of the host that ends after ``moment``.
void simulated_copy(double moment, void* target, const char* source, int64_t bytes) {
  Locked locked(lock);
  copies.push_back({moment, target, std::vector<char>(source, source + bytes)});
}

double simulated_busy(int device) {
  return queues[device].busy;
}

int simulated_is_pinned(const void* memory) {
  Locked locked(lock);
  return pinned.count(memory) > 0;
}
}
