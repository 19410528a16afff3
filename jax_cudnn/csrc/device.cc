#include "device.h"

#include <link.h>
#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

namespace jax_cudnn {
namespace {

using std::chrono::steady_clock;

constexpr auto kExitPatience = std::chrono::seconds(1);
constexpr auto kPollInterval = std::chrono::microseconds(20);
constexpr int kSpins = 200;  // a few microseconds, about one cudnnBackendExecute

// Constant-initialised and trivially destroyed, so that both are readable at any point of exit.
std::atomic<bool> g_closed{false};
std::atomic<bool> g_forked{false};

// How many shared libraries this process has ever loaded.
unsigned long long LibrariesLoaded() {
  unsigned long long loaded = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        *static_cast<unsigned long long*>(out) = info->dlpi_adds;
        return 1;  // every entry carries the same count
      },
      &loaded);
  return loaded;
}

// Has CloseDevices run at exit before the destructors of every library loaded so far. Exit handlers
// run in reverse order of registration, and cuDNN loads parts of itself when plans first need
// them; so this is called again after each use of cuDNN that may have loaded something.
void CloseAtExit() {
  static std::atomic<unsigned long long> registered_at{0};
  const unsigned long long loaded = LibrariesLoaded();
  if (registered_at.exchange(loaded) != loaded) std::atexit(CloseDevices);
}

struct Registry {
  std::mutex mutex;
  std::vector<Device*> devices;
  std::vector<Context> contexts;
};

Registry& registry() {
  static auto* registry = new Registry;
  return *registry;
}

bool TryLockFor(std::mutex& mutex, steady_clock::time_point deadline) {
  while (!mutex.try_lock()) {
    if (steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kPollInterval);
  }
  return true;
}

}  // namespace

Counters& counters() {
  static auto* counters = new Counters;
  return *counters;
}

bool Ended() {
  return g_closed.load(std::memory_order_relaxed) || g_forked.load(std::memory_order_relaxed);
}

ffi::Error EndedError(std::string_view name) {
  if (g_forked) {
    return Failure(ffi::ErrorCode::kFailedPrecondition,
                   "this process was forked from one that had used cuDNN, and CUDA does not "
                   "survive a fork. Start processes with 'spawn': "
                   "multiprocessing.set_start_method('spawn')",
                   name);
  }
  return Failure(ffi::ErrorCode::kUnavailable, "the process is shutting down and cuDNN was closed",
                 name);
}

void CloseDevices() {
  // In a forked child no thread is left to give anything back.
  if (g_forked || g_closed.exchange(true)) return;
  const auto deadline = steady_clock::now() + kExitPatience;
  Registry& all = registry();
  if (!TryLockFor(all.mutex, deadline)) return;
  for (Device* device : all.devices) {
    // Wait for a plan being finalised or destroyed, then for executions: a handle taken here is
    // never given back.
    if (TryLockFor(device->mutex_, deadline)) device->mutex_.unlock();
    int slot;
    for (int left = device->pool_size_.load(std::memory_order_acquire); left > 0;) {
      if (device->TryLease(slot) != nullptr) {
        --left;
      } else if (steady_clock::now() > deadline) {
        break;
      } else {
        std::this_thread::sleep_for(kPollInterval);
      }
    }
  }
  all.mutex.unlock();
}

FinalizedPlan::FinalizedPlan(Device& device, std::string text, Descriptor descriptor,
                             int64_t workspace_bytes)
    : device_(device),
      text_(new std::string(std::move(text))),
      descriptor_(descriptor),
      workspace_bytes_(workspace_bytes) {
  ++counters().plans_finalized;
  ++counters().plans_alive;
}

FinalizedPlan::~FinalizedPlan() {
  const auto lock = device_.LockToDestroy();
  if (!lock.owns_lock()) {
    text_.release();  // a thread that is late may still compare it
    return;
  }
  // Another thread may have finalised the same plan again since our last owner let go.
  const auto entry = device_.plans_.find(*text_);
  if (entry != device_.plans_.end() && entry->first.data() == text_->data()) {
    device_.plans_.erase(entry);
  }
  ContextScope scope(device_.driver_, device_.context_);
  // Without a context its kernels are gone with it, and there is nothing left to free.
  if (scope.status() == 0) device_.cudnn_.destroy_descriptor(descriptor_);
  --counters().plans_alive;
}

ffi::ErrorOr<Device*> Device::OfStream(Stream stream, std::string_view name) {
  const auto cudnn = FindCudnn();
  if (!cudnn.has_value()) return ffi::Unexpected(cudnn.error());
  const auto driver = FindDriver();
  if (!driver.has_value()) return ffi::Unexpected(driver.error());

  Context context = nullptr;
  if (Status status = (*driver)->stream_get_context(stream, &context)) {
    return ffi::Unexpected(DriverFailure(**driver, "find a stream's context", status, name));
  }
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (Ended()) return ffi::Unexpected(EndedError(name));
  for (size_t i = 0; i < all.devices.size(); ++i) {
    if (all.contexts[i] == context) return all.devices[i];
  }

  ContextScope scope(**driver, context);
  if (scope.status() != 0) {
    return ffi::Unexpected(
        DriverFailure(**driver, "enter a stream's context", scope.status(), name));
  }
  int ordinal = 0;
  char device_name[256] = "";
  Status status = (*driver)->context_get_device(&ordinal);
  if (status == 0) {
    status = (*driver)->device_get_name(device_name, sizeof(device_name) - 1, ordinal);
  }
  if (status != 0) {
    return ffi::Unexpected(DriverFailure(**driver, "name a stream's device", status, name));
  }

  if (all.devices.empty()) {
    pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
    CloseAtExit();
  }
  all.devices.push_back(new Device(**cudnn, **driver, context, device_name));
  all.contexts.push_back(context);
  return all.devices.back();
}

Handle Device::TryLease(int& slot) {
  const int size = pool_size_.load(std::memory_order_acquire);
  for (int i = 0; i < size; ++i) {
    // Looking before the exchange keeps a taken slot's cache line with its holder.
    if (slots_[i].free.load(std::memory_order_relaxed) == nullptr) continue;
    if (Handle handle = slots_[i].free.exchange(nullptr, std::memory_order_acquire)) {
      slot = i;
      return handle;
    }
  }
  return nullptr;
}

Handle Device::Lease(int& slot) {
  // Asked first, so that executions cannot keep CloseDevices() from a handle by taking turns.
  if (Ended()) return nullptr;
  if (Handle handle = TryLease(slot)) return handle;
  waits_.fetch_add(1, std::memory_order_relaxed);
  for (int spin = 0; !Ended(); ++spin) {
    if (spin < kSpins) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPollInterval);
    }
    if (Handle handle = TryLease(slot)) return handle;
  }
  return nullptr;
}

std::unique_lock<std::mutex> Device::LockToDestroy() {
  if (Ended()) return {};
  std::unique_lock<std::mutex> lock(mutex_);
  if (Ended()) lock.unlock();
  return lock;
}

ffi::Error Device::GrowPool(std::string_view name) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Ended()) return EndedError(name);
  const int size = pool_size_.load(std::memory_order_relaxed);
  if (size != 0 && !wants_handle()) return ffi::Error::Success();

  ContextScope scope(driver_, context_);
  if (scope.status() != 0) return DriverFailure(driver_, "enter a context", scope.status(), name);
  Handle handle = nullptr;
  if (Status status = cudnn_.create(&handle)) {
    return CudnnFailure(cudnn_, "create a handle", status, name);
  }
  ++counters().handles_created;
  waits_.store(0, std::memory_order_relaxed);
  slots_[size].free.store(handle, std::memory_order_release);
  pool_size_.store(size + 1, std::memory_order_release);
  CloseAtExit();
  return ffi::Error::Success();
}

ffi::ErrorOr<std::shared_ptr<FinalizedPlan>> Device::GetPlan(const std::string& text,
                                                             std::string_view name) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Ended()) return ffi::Unexpected(EndedError(name));
  if (const auto entry = plans_.find(text); entry != plans_.end()) {
    if (auto plan = entry->second.lock()) return plan;
    plans_.erase(entry);  // its text goes with the plan that is being destroyed
  }
  auto plan = FinalizePlan(text, name);
  if (plan.has_value()) plans_.emplace((*plan)->text(), *plan);
  CloseAtExit();
  return plan;
}

ffi::ErrorOr<std::shared_ptr<FinalizedPlan>> Device::FinalizePlan(const std::string& text,
                                                                  std::string_view name) {
  ContextScope scope(driver_, context_);
  if (scope.status() != 0) {
    return ffi::Unexpected(DriverFailure(driver_, "enter a context", scope.status(), name));
  }
  HandleLease lease(*this);
  const Handle handle = lease.get();
  if (handle == nullptr) return ffi::Unexpected(EndedError(name));

  Descriptor plan = nullptr;
  const char* step = "create a plan descriptor";
  Status status = cudnn_.create_descriptor(kExecutionPlanDescriptor, &plan);
  if (status == 0) {
    step = "give a plan its handle";
    status = cudnn_.set_attribute(plan, kExecutionPlanHandle, kTypeHandle, 1, &handle);
  }
  if (status == 0) {
    step = "read a plan's text";
    status = cudnn_.set_attribute(plan, kExecutionPlanJson, kTypeChar,
                                  static_cast<int64_t>(text.size()), text.c_str());
  }
  if (status == 0) {
    step = "finalize a plan";
    status = cudnn_.finalize(plan);
  }
  int64_t workspace_bytes = 0, count = 0;
  if (status == 0) {
    step = "tell a plan's workspace";
    status = cudnn_.get_attribute(plan, kExecutionPlanWorkspaceSize, kTypeInt64, 1, &count,
                                  &workspace_bytes);
  }
  if (status == 0) return std::make_shared<FinalizedPlan>(*this, text, plan, workspace_bytes);
  // The message first: destroying the descriptor may replace cuDNN's last error.
  ffi::Error error = CudnnFailure(
      cudnn_, step, status, name,
      ". The plan was built with another driver or installation of cuDNN, or is damaged: lower the "
      "function again on this machine");
  if (plan != nullptr) cudnn_.destroy_descriptor(plan);
  return ffi::Unexpected(std::move(error));
}

}  // namespace jax_cudnn
