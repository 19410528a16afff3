#include <link.h>
#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "executor.h"

namespace jax_cudnn {

using std::chrono::steady_clock;

Counts counts{};
std::atomic<bool> timed{false};

namespace {

enum { kRunning, kClosed, kForked };
std::atomic<int> g_state{kRunning};
std::mutex g_mutex;
std::vector<Device*>& g_devices = *new std::vector<Device*>;

bool Ended() { return g_state.load(std::memory_order_relaxed) != kRunning; }

// Has CloseDevices run at exit before the destructors of every library loaded so far. Exit handlers
// run in reverse order of registration, and cuDNN loads parts of itself when plans first need
// them; so this is called again after each use of cuDNN that may have loaded something.
void CloseAtExit() {
  static std::atomic<unsigned long long> registered_at{0};
  unsigned long long loaded = 0;  // how many libraries this process has ever loaded
  const auto read = [](dl_phdr_info* info, size_t, void* out) {
    *static_cast<unsigned long long*>(out) = info->dlpi_adds;
    return 1;  // every entry carries the same count
  };
  dl_iterate_phdr(read, &loaded);
  if (registered_at.exchange(loaded) != loaded) std::atexit(CloseDevices);
}

// Waits for whoever holds a mutex; who takes it later sees that the process has ended.
bool Passed(std::mutex& mutex, steady_clock::time_point deadline) {
  while (!mutex.try_lock()) {
    if (steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  mutex.unlock();
  return true;
}

}  // namespace

void FailIfEnded() {
  if (!Ended()) return;
  if (g_state == kForked) {
    Fail(ffi::ErrorCode::kFailedPrecondition,
         "this process was forked from one that had used cuDNN, and CUDA does not survive a fork. "
         "Start processes with 'spawn': multiprocessing.set_start_method('spawn')");
  }
  Fail(ffi::ErrorCode::kUnavailable, "the process is shutting down and cuDNN was closed");
}

void CloseDevices() {
  int running = kRunning;  // in a forked child no thread is left to give anything back
  if (!g_state.compare_exchange_strong(running, kClosed)) return;
  const auto deadline = steady_clock::now() + std::chrono::seconds(1);
  if (!Passed(g_mutex, deadline)) return;
  for (Device* device : g_devices) {
    Passed(device->mutex, deadline);
    for (Device::Lane& lane : device->lanes) Passed(lane.mutex, deadline);
  }
}

Device& Device::OfStream(Stream stream) {
  Load(true);
  Context context = nullptr;
  CheckDriver(api.cuStreamGetCtx(stream, &context), "find a stream's context");
  std::lock_guard<std::mutex> lock(g_mutex);
  FailIfEnded();
  for (Device* device : g_devices) {
    if (device->context == context) return *device;
  }
  ContextScope scope(context);
  CheckDriver(scope.status, "enter a stream's context");
  int ordinal = 0;
  char name[256] = "";
  CheckDriver(api.cuCtxGetDevice(&ordinal), "find a stream's device");
  CheckDriver(api.cuDeviceGetName(name, sizeof(name) - 1, ordinal), "name a stream's device");
  if (g_devices.empty()) {
    pthread_atfork(nullptr, nullptr, [] { g_state = kForked; });
    CloseAtExit();
  }
  g_devices.push_back(new Device{context, name});
  return *g_devices.back();
}

std::unique_lock<std::mutex> Device::Acquire(int& lane) {
  thread_local int last = 0;  // the packs of this thread's pointers are there
  FailIfEnded();              // first, so that executions cannot keep CloseDevices() from a lane
  const int count = handles.load(std::memory_order_acquire);
  std::unique_lock<std::mutex> held;
  for (int i = 0; i < count && !held.owns_lock(); ++i) {
    lane = (last + i) % count;
    held = std::unique_lock<std::mutex>(lanes[lane].mutex, std::try_to_lock);
  }
  if (!held.owns_lock()) {
    wants_handle.store(count < kMaxLanes, std::memory_order_relaxed);
    held.lock();
  }
  FailIfEnded();
  last = lane;
  return held;
}

std::unique_lock<std::mutex> Device::LockUnlessEnded() {
  if (Ended()) return {};  // first, since a forked child could wait without end
  std::unique_lock<std::mutex> lock(mutex);
  if (Ended()) lock.unlock();
  return lock;
}

void Device::AddHandle() {
  if (!wants_handle.load(std::memory_order_relaxed)) return;
  const auto lock = LockUnlessEnded();
  FailIfEnded();
  const int lane = handles.load(std::memory_order_relaxed);
  if (wants_handle.load(std::memory_order_relaxed) && lane < kMaxLanes) {
    ContextScope scope(context);
    CheckDriver(scope.status, "enter a context");
    Check(api.cudnnCreate(&lanes[lane].handle), "create a handle");
    ++counts.handles_created;
    handles.store(lane + 1, std::memory_order_release);
    CloseAtExit();
  }
  wants_handle.store(false, std::memory_order_relaxed);
}

std::shared_ptr<const Device::Plan> Device::GetPlan(const std::string& text) {
  std::shared_ptr<Plan> plan(new Plan{*this});  // before the lock, which its destructor takes
  const auto lock = LockUnlessEnded();
  FailIfEnded();
  for (auto entry = plans.begin(); entry != plans.end();) {
    entry = entry->second.expired() ? plans.erase(entry) : std::next(entry);
  }
  std::weak_ptr<const Plan>& known = plans[text];
  if (auto alive = known.lock()) return alive;
  ContextScope scope(context);
  CheckDriver(scope.status, "enter a context");
  int lane = 0;
  const auto held = Acquire(lane);
  plan->descriptor = Finalized(
      kPlan,
      {{kPlanHandle, kTypeHandle, 1, &lanes[lane].handle},
       {kPlanJson, kTypeChar, static_cast<int64_t>(text.size()), text.c_str()}},
      "finalize a plan",
      ". The plan was built with another driver or installation of cuDNN, or is damaged: lower the "
      "function again on this machine");
  ++counts.plans_finalized;
  ++counts.plans_alive;
  CloseAtExit();
  int64_t count = 0;
  Check(api.cudnnBackendGetAttribute(plan->descriptor, kPlanWorkspaceSize, kTypeInt64, 1, &count,
                                     &plan->workspace_bytes),
        "read a plan's workspace");
  known = plan;
  return plan;
}

Device::Plan::~Plan() {
  if (descriptor == nullptr) return;
  const auto lock = device.LockUnlessEnded();
  if (!lock.owns_lock()) return;
  ContextScope scope(device.context);
  // Without a context its kernels are gone with it, and there is nothing left to free.
  if (scope.status == 0) api.cudnnBackendDestroyDescriptor(descriptor);
  --counts.plans_alive;
}

}  // namespace jax_cudnn
