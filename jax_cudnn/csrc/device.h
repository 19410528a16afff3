// What lives once per device: a pool of cuDNN handles and the finalised plans.
//
// cuDNN forbids two threads in one handle at a time, and objects made for one GPU on another; so
// handles are leased, and a plan is finalised once per device and shared by all its call sites.
// Devices are never destroyed: executables may be released after the CUDA driver was torn down.
#ifndef JAX_CUDNN_CSRC_DEVICE_H_
#define JAX_CUDNN_CSRC_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "cudnn_api.h"

namespace jax_cudnn {

// What tests look at to see that plans are shared and memory is stable.
struct Counters {
  std::atomic<int64_t> handles_created{0};
  std::atomic<int64_t> plans_finalized{0};
  std::atomic<int64_t> plans_alive{0};
  std::atomic<int64_t> packs_built{0};
  std::atomic<int64_t> packs_alive{0};
  std::atomic<int64_t> call_sites_alive{0};
};
Counters& counters();

// Whether this process may no longer use cuDNN: after its exit handlers ran, and in a child forked
// from a process that had used it (CUDA contexts do not survive a fork).
bool Ended();

// The error for work after the process ended, in words.
ffi::Error EndedError(std::string_view name);

// Refuses new work, waits about a second for work in flight, and leaves everything allocated. Runs
// as an exit handler, before the driver's teardown; public for tests.
void CloseDevices();

// Makes a CUDA context current on this thread for a scope.
class ContextScope {
 public:
  ContextScope(const Driver& driver, Context context)
      : driver_(driver), status_(driver.context_push(context)) {}
  ~ContextScope() {
    Context popped;
    if (status_ == 0) driver_.context_pop(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  Status status() const { return status_; }

 private:
  const Driver& driver_;
  const Status status_;
};

class Device;

// A finalised execution plan; the last call site to let go of it destroys it.
class FinalizedPlan {
 public:
  FinalizedPlan(Device& device, std::string text, Descriptor descriptor, int64_t workspace_bytes);
  ~FinalizedPlan();
  FinalizedPlan(const FinalizedPlan&) = delete;
  FinalizedPlan& operator=(const FinalizedPlan&) = delete;
  Descriptor descriptor() const { return descriptor_; }
  std::string_view text() const { return *text_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }  // as cuDNN tells

 private:
  Device& device_;
  std::unique_ptr<const std::string> text_;
  const Descriptor descriptor_;
  const int64_t workspace_bytes_;
};

class Device {
 public:
  // cuDNN's handles are cheap but not free; more threads than this take turns.
  static constexpr int kMaxHandles = 16;

  // The device of a stream's context. The first call for a context makes it.
  static ffi::ErrorOr<Device*> OfStream(Stream stream, std::string_view name);

  const Cudnn& cudnn() const { return cudnn_; }
  const Driver& driver() const { return driver_; }
  Context context() const { return context_; }
  const std::string& name() const { return name_; }

  // A handle held by one thread for a scope. Empty when the process is shutting down.
  class HandleLease {
   public:
    explicit HandleLease(Device& device) : device_(device) { handle_ = device.Lease(slot_); }
    ~HandleLease() {
      if (handle_ != nullptr) device_.slots_[slot_].free.store(handle_, std::memory_order_release);
    }
    HandleLease(const HandleLease&) = delete;
    HandleLease& operator=(const HandleLease&) = delete;
    Handle get() const { return handle_; }

   private:
    Device& device_;
    int slot_ = 0;
    Handle handle_;
  };

  // True when executions had to wait for a handle since the pool last grew, and it may grow.
  bool wants_handle() const {
    return waits_.load(std::memory_order_relaxed) != 0 &&
           pool_size_.load(std::memory_order_relaxed) < kMaxHandles;
  }

  // Makes the first handle, or one more if executions had to wait. Never called while executing:
  // that may be under stream capture, where handles cannot be created.
  ffi::Error GrowPool(std::string_view name);

  // The plan of this text, finalised unless some call site holds it already.
  ffi::ErrorOr<std::shared_ptr<FinalizedPlan>> GetPlan(const std::string& text,
                                                       std::string_view name);

  // Locked while cuDNN objects may be destroyed; not owned once the process has ended, and then
  // they must be leaked. CloseDevices() waits for it.
  std::unique_lock<std::mutex> LockToDestroy();

 private:
  friend class FinalizedPlan;
  friend void CloseDevices();

  // One cache line each, so that threads with different handles do not slow each other down.
  struct alignas(64) Slot {
    std::atomic<Handle> free{nullptr};  // null while leased, or not yet created
  };

  Device(const Cudnn& cudnn, const Driver& driver, Context context, std::string name)
      : cudnn_(cudnn), driver_(driver), context_(context), name_(std::move(name)) {}

  Handle TryLease(int& slot);
  Handle Lease(int& slot);
  ffi::ErrorOr<std::shared_ptr<FinalizedPlan>> FinalizePlan(const std::string& text,
                                                            std::string_view name);

  const Cudnn& cudnn_;
  const Driver& driver_;
  const Context context_;
  const std::string name_;  // "NVIDIA H200"

  Slot slots_[kMaxHandles];
  std::atomic<int> pool_size_{0};
  std::atomic<int64_t> waits_{0};

  std::mutex mutex_;  // creation and destruction of what follows; never held by an execution
  std::unordered_map<std::string_view, std::weak_ptr<FinalizedPlan>> plans_;  // by their texts
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CSRC_DEVICE_H_
