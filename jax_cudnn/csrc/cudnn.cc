#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>  // realpath

#include <cstdlib>
#include <thread>

#include "executor.h"

namespace jax_cudnn {
Api api{};
std::atomic<int64_t> counts[kCounts];
std::atomic<bool> timed{false};

namespace {
constexpr char kCudnn[] = "libcudnn.so.9";
std::mutex g_loading;  // and of the next two
std::string& g_fallback_path = *new std::string;
bool g_has_driver = false;

// One attempt to open a library; a failed one adds its reason to `tried`.
void* Open(const char* path, int flags, std::string& tried) {
  void* library = dlopen(path, flags | RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  const char* why = flags == RTLD_NOLOAD ? "not loaded in this process yet" : dlerror();
  tried += std::string("\n  ") + path + ": " + (why ? why : "no reason");
  return nullptr;
}

// Looks a function up; adds its name to `missing` when the library lacks it. Not every cuDNN 9 has
// CUDA graphs, and plans run without.
template <typename Function>
void Find(void* library, const std::string& name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(library, name.c_str()));
  if (function != nullptr || name.find("CudaGraph") != name.npos) return;
  missing += (missing.empty() ? "" : ", ") + name;
}
#define JAX_CUDNN_FIND(result, name, parameters) Find(library, #name, api.name, missing);

struct MayLoad {  // in the scope of what may load parts of cuDNN, also where it fails
  ~MayLoad() { std::atexit(CloseDevices); }
};
enum { kRunning, kClosed, kForked };
std::atomic<int> g_state{kRunning};
std::mutex g_mutex;
std::vector<Device*>& g_devices = *new std::vector<Device*>;
}  // namespace

// Where to load cuDNN from when the process has none at its first use. A loaded copy always wins:
// two copies in one process do not know of each other's plans.
JAX_CUDNN_EXPORT void JaxCudnnSetFallbackPath(const char* path) {
  std::lock_guard<std::mutex> lock(g_loading);
  g_fallback_path = path;
}

void Load(bool driver) {
  std::lock_guard<std::mutex> lock(g_loading);
  std::string tried, missing;
  if (api.version == 0) {
    void* library = Open(kCudnn, RTLD_NOLOAD, tried);
    if (!library && !g_fallback_path.empty()) library = Open(g_fallback_path.c_str(), 0, tried);
    if (!library) library = Open(kCudnn, 0, tried);
    Expect(library,
           "cuDNN 9 was not found. Install it with JAX: pip install 'jax-cudnn[cuda12]' or "
           "'jax-cudnn[cuda13]'. Tried, in this order:",
           tried);
    JAX_CUDNN_OF_CUDNN(JAX_CUDNN_FIND)
    Expect(missing.empty(), "the loaded cuDNN lacks ", missing, "; it is not cuDNN 9.");
    Dl_info info{};  // its path is not always real: dlopen may have followed a soname
    dladdr(reinterpret_cast<void*>(api.cudnnGetVersion), &info);
    api.path = realpath(info.dli_fname, nullptr);
    if (api.path == nullptr) api.path = "an unknown path";
    api.version = static_cast<int64_t>(api.cudnnGetVersion());
  }
  if (driver && !g_has_driver) {
    void* library = Open("libcuda.so.1", 0, missing);
    Expect(library, "the CUDA driver was not found:", missing);
    JAX_CUDNN_OF_DRIVER(JAX_CUDNN_FIND)
    Expect(missing.empty(), "the loaded CUDA driver lacks ", missing, ".");
    g_has_driver = true;
  }
}

std::string VersionText(int64_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void Check(Status status, const char* step) {
  if (status == 0) return;
  char why[2048] = "";
  api.cudnnGetLastErrorString(why, sizeof(why) - 1);
  Expect(false, "cuDNN ", VersionText(api.version), " failed to ", step, ": ",
         api.cudnnGetErrorString(status), " (", status, ")", *why ? ": " : "", why);
}

void CheckDriver(Status status, const char* step) {
  if (status == 0) return;
  const char* text = nullptr;
  api.cuGetErrorString(status, &text);
  Expect(false, "the CUDA driver failed to ", step, ": ", text ? text : "unknown error", " (",
         status, ")");
}

Descriptor Finalized(int type, std::initializer_list<BackendAttribute> attributes,
                     const char* step) {
  Descriptor made = nullptr;
  Check(api.cudnnBackendCreateDescriptor(type, &made), step);
  std::unique_ptr<void, Status (*)(Descriptor)> owned(made, api.cudnnBackendDestroyDescriptor);
  for (const auto& [name, element_type, count, elements] : attributes) {
    Check(api.cudnnBackendSetAttribute(made, name, element_type, count, elements), step);
  }
  Check(api.cudnnBackendFinalize(made), step);
  return owned.release();
}

void FailIfEnded() {
  const int state = g_state.load(std::memory_order_relaxed);
  Expect(state != kForked,
         "this process was forked from one that had used cuDNN, and CUDA does not survive a fork. "
         "Start processes with 'spawn': multiprocessing.set_start_method('spawn')");
  Expect(state != kClosed, "the process is shutting down and cuDNN was closed");
}

void CloseDevices() {
  int running = kRunning;  // in a forked child no thread is left to give anything back
  if (!g_state.compare_exchange_strong(running, kClosed)) return;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  // Waits for whoever holds a mutex; who takes it later sees that the process has ended.
  const auto passed = [&](std::mutex& mutex) {
    while (!mutex.try_lock()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    mutex.unlock();
    return true;
  };
  if (!passed(g_mutex)) return;
  for (Device* device : g_devices) {
    passed(device->mutex);
    for (Device::Lane& lane : device->lanes) passed(lane.mutex);
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
  int ordinal = 0;
  char name[256] = "";
  CheckDriver(api.cuCtxGetDevice(&ordinal), "find a stream's device");
  CheckDriver(api.cuDeviceGetName(name, sizeof(name) - 1, ordinal), "name a stream's device");
  if (g_devices.empty()) {
    pthread_atfork(nullptr, nullptr, [] { g_state = kForked; });
    std::atexit(CloseDevices);
  }
  g_devices.push_back(new Device{context, name});
  return *g_devices.back();
}

std::unique_lock<std::mutex> Device::Acquire(int& lane) {
  thread_local int last = 0;  // the packs of this thread's pointers are there
  FailIfEnded();              // first, so that executions cannot keep CloseDevices() from a lane
  const int count = handles.load(std::memory_order_acquire);
  std::unique_lock<std::mutex> held;
  for (int i = 0; !held.owns_lock(); ++i) {
    if (i != 0 && i % count == 0) {  // all are taken, one perhaps for long: a plan is finalized
      wants_handle.store(count < kMaxLanes, std::memory_order_relaxed);
      std::this_thread::sleep_for(std::chrono::microseconds(i < 200 ? 0 : 20));
      FailIfEnded();
    }
    lane = (last + i) % count;
    held = std::unique_lock<std::mutex>(lanes[lane].mutex, std::try_to_lock);
  }
  FailIfEnded();
  last = lane;
  return held;
}

std::unique_lock<std::mutex> Device::LockUnlessEnded() {
  if (g_state != kRunning) return {};  // first, since a forked child could wait without end
  std::unique_lock<std::mutex> lock(mutex);
  if (g_state != kRunning) lock.unlock();
  return lock;
}

void Device::AddHandle() {
  if (!wants_handle.load(std::memory_order_relaxed)) return;
  const auto lock = LockUnlessEnded();
  FailIfEnded();
  const int lane = handles.load(std::memory_order_relaxed);
  if (wants_handle.load(std::memory_order_relaxed) && lane < kMaxLanes) {
    const MayLoad guard;
    ContextScope scope(context);
    const Status status = api.cudnnCreate(&lanes[lane].handle);
    if (lane == 0) Check(status, "create a handle");  // with one, threads take turns
    counts[kHandlesMade] += status == 0;
    handles.store(lane + (status == 0), std::memory_order_release);
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
  int lane = 0;
  const auto held = Acquire(lane);
  const MayLoad guard;
  plan->descriptor =
      Finalized(kPlan,
                {{kPlanHandle, kTypeHandle, 1, &lanes[lane].handle},
                 {kPlanJson, kTypeChar, static_cast<int64_t>(text.size()), text.c_str()}},
                "finalize a plan, which was built with another driver or installation of cuDNN, or "
                "is damaged (lower the function again on this machine)");
  ++counts[kPlansMade];
  ++counts[kPlansAlive];
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
  --counts[kPlansAlive];
  try {
    ContextScope scope(device.context);
    api.cudnnBackendDestroyDescriptor(descriptor);
  } catch (const std::exception&) {  // without a context its kernels are gone with it
  }
}

}  // namespace jax_cudnn
