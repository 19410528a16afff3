// Runs cuDNN's finished plans: what lives once per process, per device, and per custom call.
// cuDNN and the CUDA driver are found at run time and declared by hand, so that one binary serves
// CUDA 12 and 13 and needs no CUDA toolkit. The numbers are cuDNN 9's ABI. Failures are thrown
// without the graph's name, which handler.cc adds; only that knows XLA's call frames.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "xla/ffi/api/ffi.h"

#define JAX_CUDNN_EXPORT extern "C" __attribute__((visibility("default")))

namespace jax_cudnn {
namespace ffi = xla::ffi;

using Status = int;        // cudnnStatus_t and CUresult; 0 is success in both
using Stream = void*;      // CUstream
using Context = void*;     // CUcontext
using Handle = void*;      // cudnnHandle_t
using Descriptor = void*;  // cudnnBackendDescriptor_t
using CudaGraph = void*;   // CUgraph

#define JAX_CUDNN_OF_CUDNN(F)                                                           \
  F(size_t, cudnnGetVersion, ())                                                        \
  F(const char*, cudnnGetErrorString, (Status))                                         \
  F(void, cudnnGetLastErrorString, (char* message, size_t size))                        \
  F(Status, cudnnCreate, (Handle*))                                                     \
  F(Status, cudnnSetStream, (Handle, Stream))                                           \
  F(Status, cudnnBackendCreateDescriptor, (int type, Descriptor*))                      \
  F(Status, cudnnBackendDestroyDescriptor, (Descriptor))                                \
  F(Status, cudnnBackendSetAttribute, (Descriptor, int, int, int64_t, const void*))     \
  F(Status, cudnnBackendGetAttribute, (Descriptor, int, int, int64_t, int64_t*, void*)) \
  F(Status, cudnnBackendFinalize, (Descriptor))                                         \
  F(Status, cudnnBackendExecute, (Handle, Descriptor plan, Descriptor pack))            \
  F(Status, cudnnBackendPopulateCudaGraph, (Handle, Descriptor, Descriptor, CudaGraph)) \
  F(Status, cudnnBackendUpdateCudaGraph, (Handle, Descriptor, Descriptor, CudaGraph))
// cuda.h maps unversioned names to those with _v2; the unversioned symbols are an older ABI.
#define JAX_CUDNN_OF_DRIVER(F)                                      \
  F(Status, cuGetErrorString, (Status, const char**))               \
  F(Status, cuStreamGetCtx, (Stream, Context*))                     \
  F(Status, cuCtxPushCurrent_v2, (Context))                         \
  F(Status, cuCtxPopCurrent_v2, (Context*))                         \
  F(Status, cuCtxGetDevice, (int*))                                 \
  F(Status, cuDeviceGetName, (char*, int length, int device))       \
  F(Status, cuMemsetD8Async, (uint64_t, uint8_t, size_t, Stream))   \
  F(Status, cuMemsetD32Async, (uint64_t, uint32_t, size_t, Stream)) \
  F(Status, cuGraphGetNodes, (CudaGraph, void** nodes, size_t* count))
#define JAX_CUDNN_DECLARE(result, name, parameters) result(*name) parameters;

// The process's cuDNN and driver. No global is destroyed: executables are released late, at exit.
struct Api {
  JAX_CUDNN_OF_CUDNN(JAX_CUDNN_DECLARE)
  JAX_CUDNN_OF_DRIVER(JAX_CUDNN_DECLARE)
  int64_t version;   // cudnnGetVersion(): 91900 is 9.19.0
  const char* path;  // of cuDNN
};
extern Api api;

// Loads cuDNN, and perhaps the driver, unless they are loaded. Failures are not remembered.
void Load(bool driver);
template <typename... Parts>
void Expect(bool holds, const Parts&... otherwise) {
  if (holds) return;
  std::ostringstream text;
  (text << ... << otherwise);
  throw std::runtime_error(text.str());
}
void Check(Status status, const char* step);        // fails with what cuDNN says
void CheckDriver(Status status, const char* step);  // fails with what the driver says
std::string VersionText(int64_t version);           // "9.19.0" for 91900

enum { kPlan = 5, kPlanHandle = 400, kPlanWorkspaceSize = 402, kPlanJson = 405 };
enum { kPack = 16, kPackUids = 1000, kPackPointers = 1001, kPackWorkspace = 1003 };
enum { kTypeHandle = 0, kTypeInt64 = 3, kTypePointer = 6, kTypeChar = 24 };
using BackendAttribute = std::tuple<int, int, int64_t, const void*>;  // name, type, count, elements
// A finalized descriptor.
Descriptor Finalized(int type, std::initializer_list<BackendAttribute> attributes,
                     const char* step);

// What tests and benchmarks/host.py look at, in this order; the second line while `timed`.
enum { kHandlesMade, kPlansMade, kPlansAlive, kPacksMade, kPacksAlive, kCallSitesAlive };
enum { kInitializeNs = 6, kExecuteNs, kCudnnNs, kCounts };
extern std::atomic<int64_t> counts[kCounts];
extern std::atomic<bool> timed;
struct Timer {  // adds a scope's nanoseconds, while `timed`
  using Clock = std::chrono::steady_clock;
  ~Timer() {
    if (start != Clock::time_point()) total += (Clock::now() - start).count();
  }
  std::atomic<int64_t>& total;
  const Clock::time_point start = timed ? Clock::now() : Clock::time_point();
};

// Fails if this process may no longer use cuDNN: after its exit handlers ran, and in a child forked
// from a process that had used it.
void FailIfEnded();
// Refuses new work, waits about a second for work in flight, and leaves everything allocated. An
// exit handler: those run in reverse order, and cuDNN loads parts of itself when plans first need
// them; so each use that may have loaded something registers it again, before their destructors.
void CloseDevices();

struct ContextScope {  // makes a CUDA context current on this thread
  explicit ContextScope(Context context) {
    CheckDriver(api.cuCtxPushCurrent_v2(context), "enter a context");
  }
  ~ContextScope() { api.cuCtxPopCurrent_v2(&popped); }
  Context popped;
};

struct Device {  // never destroyed
  struct Plan {  // a finalized one; the last call site to let go of it destroys it
    ~Plan();
    Device& device;
    Descriptor descriptor = nullptr;
    int64_t workspace_bytes = 0;  // that cuDNN needs
  };
  // cuDNN forbids two threads in one handle: whoever holds the mutex may use it. Handles are not
  // free, so more threads than there are lanes take turns.
  struct alignas(64) Lane {
    std::mutex mutex;
    Handle handle = nullptr;
  };
  static constexpr int kMaxLanes = 16;
  // The device of a stream's context, made at the first call.
  static Device& OfStream(Stream stream);
  // Takes a lane with a handle; that of this thread's last call, if it is free.
  std::unique_lock<std::mutex> Acquire(int& lane);
  // Makes a handle if there is none, or executions had to wait and there may be more. Not while
  // executing: handles cannot be created under stream capture.
  void AddHandle();
  // The plan of this text, finalized unless some call site holds it already.
  std::shared_ptr<const Plan> GetPlan(const std::string& text);
  // Locked while cuDNN objects are made or destroyed; not owned once the process has ended, and
  // then they must be leaked.
  std::unique_lock<std::mutex> LockUnlessEnded();

  const Context context;
  const std::string name;  // "NVIDIA H200"
  std::array<Lane, kMaxLanes> lanes{};
  std::atomic<int> handles{0};  // of the first lanes
  std::atomic<bool> wants_handle{true};
  std::mutex mutex{};  // of creation and destruction; never held by an execution
  std::map<std::string, std::weak_ptr<const Plan>> plans{};  // by their texts
};

struct Buffer {
  void* data;
  int64_t bytes;
};
using Buffers = ffi::Span<const Buffer>;

// One custom call of one executable: its plan, and where the plan's pointers come from. Everything
// is decoded and checked once; then it serves all devices of its executable, from many threads.
class CallSite {
 public:
  static constexpr size_t kMaxRows = 512;  // on the stack; the largest graphs have dozens
  static constexpr int32_t kMaxDevices = 64;
  // The custom call's attributes: `attributes` of _core/ffi.py writes them.
  CallSite(std::string_view device_name, std::string_view name, std::string_view plan,
           ffi::Span<const int64_t> rows, int64_t checksum);
  ~CallSite();
  // Makes handle and plan ready on a device. XLA calls it before every execution.
  void Initialize(int32_t ordinal, Stream stream);
  // Runs the plan on a stream; or gives its kernels to a CUDA graph that is empty, or to one that
  // has them (update) these pointers. The last result is the workspace.
  void Execute(int32_t ordinal, Stream stream, Buffers operands, Buffers results,
               CudaGraph graph = nullptr, bool update = false);
  const std::string& name() const { return name_; }
  // CRC-32 of the other attributes, in this order.
  static int64_t Checksum(std::initializer_list<std::string_view> attributes);
  static ffi::TypeId id;  // required of an XLA FFI state, as is the next
  static ffi::TypeInfo info;

 private:
  enum Kind : int64_t { kOperand, kResult, kWorkspace, kScalar, kView, kMemset };
  static constexpr int64_t kNoUid = -1;
  struct alignas(16) Row {  // cuDNN reads the last 16 bytes of a scalar's
    int64_t uid, kind, value, bytes;
  };
  using Pack = std::pair<std::vector<void*>, Descriptor>;  // a finalized one
  struct OnDevice {
    ~OnDevice();
    Descriptor PackOf(int lane, void* const* pointers, const std::vector<int64_t>& uids);
    Device& device;
    const std::shared_ptr<const Device::Plan> plan;
    // The last few of each lane, guarded by it: building one takes up to 2.3 us, and XLA mostly
    // passes the same pointers again.
    std::array<std::vector<Pack>, Device::kMaxLanes> packs{};
  };

  int64_t SizeOf(size_t row, bool listed, const std::vector<int64_t>& sizes) const;
  void CheckTensors(const std::vector<int64_t>& sizes) const;
  std::atomic<OnDevice*>& On(int32_t ordinal);

  const std::string device_name_, name_, plan_;
  std::vector<Row> rows_;
  int64_t cudnn_version_, workspace_bytes_, plan_offset_;  // where cuDNN's workspace begins
  std::vector<int64_t> uids_;                              // of the rows that have one
  int64_t operands_ = 0, results_ = 0;                     // at least; without the workspace
  std::mutex mutex_;                                       // creation of what follows
  std::array<std::atomic<OnDevice*>, kMaxDevices> devices_{};
};

}  // namespace jax_cudnn
