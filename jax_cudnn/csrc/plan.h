// One custom call of one executable: its plan, and where the plan's pointers come from.
//
// Everything is decoded and checked once, when XLA instantiates the call. One call site serves all
// devices of its executable, from many threads at once. It knows nothing of XLA's call frames
// (handler.cc does), so that it can be tested without them.
#ifndef JAX_CUDNN_CSRC_PLAN_H_
#define JAX_CUDNN_CSRC_PLAN_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "variant_pack.h"

namespace jax_cudnn {

// The custom call's attributes; jax_cudnn/_core/ffi.py writes them.
struct Attributes {
  std::string plan;               // cuDNN's JSON text of a finalised execution plan
  int64_t checksum;               // of the others, see Checksum()
  std::string name;               // the user's function, for messages
  std::string device_name;        // the GPU model the plan was built for: "NVIDIA H200"
  int64_t cudnn_version;          // cudnnGetVersion() of the cuDNN the plan was built with
  std::vector<int64_t> bindings;  // rows of (uid, kind, value, bytes); see Binding
  std::vector<uint8_t> scalars;   // by-value constants, each at a multiple of 16
  std::vector<int64_t> fills;     // rows of (offset, unit, count, word); see Fill
  std::vector<int64_t> initial;   // pairs (result, word): what it holds where nothing is written
  int64_t workspace_bytes;        // of the last result
  int64_t plan_workspace_offset;  // where cuDNN's own workspace begins in it
};

// CRC-32 of the other attributes, in alphabetical order: altered or damaged programs are refused
// before cuDNN sees them. It is no protection against those who write another checksum, too.
int64_t Checksum(const Attributes& attributes);

enum class BindingKind : int64_t {
  kOperand = 0,    // value: operand number; bytes: its exact size
  kResult = 1,     // value: result number; bytes: its exact size
  kWorkspace = 2,  // value: byte offset in the workspace before cuDNN's own; its text has the size
  kScalar = 3,     // value: offset of 16 bytes in the scalars; cuDNN reads it on the host
  kView = 4,       // value: an earlier row; bytes: offset from that row's pointer
};

struct Binding {
  int64_t uid;  // kNoUid: not the plan's, only checked or a source of views
  BindingKind kind;
  int64_t value;
  int64_t bytes;
};
inline constexpr int64_t kNoUid = -1;

// Written before every execution, by memset: a captured copy from host memory would read its source
// again at each replay of the command buffer, and where XLA fuses the call with slices of its
// operands, it passes a result another buffer than the operand that the result should alias.
struct Fill {
  int64_t place;  // an offset in the workspace, or the number of a result
  int64_t unit;   // bytes of a word: 1 or 4
  int64_t count;
  int64_t word;
};

// What cuDNN's text of a plan says of a tensor that its kernels read or write.
struct PlanTensor {
  int64_t uid;
  bool by_value;  // read on the host
  double bytes;   // at least, from its first element to its last; 0 where the text does not say
};

// Without the tensors that stay within kernels. Empty where the text has another form, such as that
// of a later cuDNN.
std::vector<PlanTensor> TensorsOf(const std::string& text);

struct Buffer {
  void* data;
  int64_t bytes;
};

// Sums over the executions of the timed handlers.
struct Timings {
  std::atomic<int64_t> initialize_ns{0};
  std::atomic<int64_t> execute_ns{0};
  std::atomic<int64_t> cudnn_ns{0};  // cudnnBackendExecute alone
  std::atomic<int64_t> executions{0};
};
Timings& timings();

class CallSite {
 public:
  // Pointers are gathered on the stack. The largest cuDNN graphs have some dozens.
  static constexpr size_t kMaxBindings = 256;
  static constexpr int32_t kMaxDevices = 64;

  // Checks the attributes; the error names the first that is wrong.
  static ffi::ErrorOr<std::unique_ptr<CallSite>> Create(Attributes attributes);
  ~CallSite();

  // Makes handle and plan ready on a device. XLA calls it before every execution.
  ffi::Error Initialize(int32_t ordinal, Stream stream) {
    if (ordinal >= 0 && ordinal < kMaxDevices && !Ended()) {
      const DeviceState* state = states_[ordinal].load(std::memory_order_acquire);
      if (state != nullptr && !state->device.wants_handle()) return ffi::Error::Success();
    }
    return InitializeSlowly(ordinal, stream);
  }

  // Runs the plan on a stream. The last result is the workspace. `kTimed` adds the time within
  // cuDNN to timings().
  template <bool kTimed>
  ffi::Error Execute(int32_t ordinal, Stream stream, const Buffer* operands, size_t operand_count,
                     const Buffer* results, size_t result_count);

  // Puts the plan's kernels with these pointers into a CUDA graph of the user's that is empty, or
  // gives those that it put there other pointers. The stream says which device it is.
  ffi::Error Record(int32_t ordinal, Stream stream, const Buffer* operands, size_t operand_count,
                    const Buffer* results, size_t result_count, CudaGraph graph, bool update);

  const std::string& name() const { return attributes_.name; }

  // Required of an XLA FFI state.
  static ffi::TypeId id;
  static ffi::TypeInfo info;

 private:
  struct DeviceState {
    DeviceState(Device& device, std::shared_ptr<FinalizedPlan> plan,
                const std::vector<int64_t>& uids)
        : device(device), plan(std::move(plan)), packs(device, uids) {}
    Device& device;
    const std::shared_ptr<FinalizedPlan> plan;
    VariantPackCache packs;
  };
  struct alignas(16) ScalarBlock {
    uint8_t bytes[16];
  };

  explicit CallSite(Attributes attributes);
  ffi::Error DecodeBindings();
  ffi::Error CheckTensors(const std::vector<int64_t>& sizes) const;
  ffi::Error DecodeFills();
  ffi::Error Invalid(const std::string& what) const;
  ffi::Error CheckDevice(const Device& device) const;
  ffi::Error InitializeSlowly(int32_t ordinal, Stream stream);
  ffi::Error CountError(const char* what, size_t got, size_t expected) const;
  ffi::Error SizeError(size_t row, int64_t got) const;
  ffi::Error RunFills(const Driver& driver, const Buffer* results, char* workspace,
                      Stream stream) const;

  // Gathers the pointers and calls `use(state, handle, variant pack, workspace)` with what is
  // leased.
  template <typename Use>
  ffi::Error WithPack(int32_t ordinal, Stream stream, const Buffer* operands, size_t operand_count,
                      const Buffer* results, size_t result_count, Use use);

  Attributes attributes_;
  std::vector<Binding> bindings_;
  std::vector<size_t> pack_rows_;  // the bindings that have a uid
  std::vector<int64_t> pack_uids_;
  std::vector<Fill> fills_;           // of the workspace
  std::vector<Fill> initial_;         // of whole results
  std::vector<ScalarBlock> scalars_;  // aligned; cuDNN keeps pointers into it
  size_t operands_needed_ = 0;
  size_t results_needed_ = 1;  // the workspace

  std::mutex mutex_;  // creation of states
  std::array<std::atomic<DeviceState*>, kMaxDevices> states_{};
};

template <typename Use>
ffi::Error CallSite::WithPack(int32_t ordinal, Stream stream, const Buffer* operands,
                              size_t operand_count, const Buffer* results, size_t result_count,
                              Use use) {
  DeviceState* state = ordinal >= 0 && ordinal < kMaxDevices
                           ? states_[ordinal].load(std::memory_order_acquire)
                           : nullptr;
  if (state == nullptr) {
    return Failure(ffi::ErrorCode::kFailedPrecondition,
                   "this call was executed on device " + std::to_string(ordinal) +
                       " without being initialized there; cuDNN calls run on CUDA devices only",
                   name());
  }
  if (operand_count < operands_needed_) {
    return CountError("operands", operand_count, operands_needed_);
  }
  if (result_count != results_needed_) return CountError("results", result_count, results_needed_);
  const Buffer& workspace = results[result_count - 1];
  if (workspace.bytes < attributes_.workspace_bytes) {
    return CountError("bytes of workspace", workspace.bytes, attributes_.workspace_bytes);
  }
  char* const workspace_data = static_cast<char*>(workspace.data);

  char* rows[kMaxBindings];
  for (size_t row = 0; row < bindings_.size(); ++row) {
    const Binding& binding = bindings_[row];
    switch (binding.kind) {
      case BindingKind::kOperand:
      case BindingKind::kResult: {
        const Buffer& buffer = binding.kind == BindingKind::kOperand ? operands[binding.value]
                                                                     : results[binding.value];
        if (buffer.bytes != binding.bytes) return SizeError(row, buffer.bytes);
        rows[row] = static_cast<char*>(buffer.data);
        break;
      }
      case BindingKind::kWorkspace:
        rows[row] = workspace_data + binding.value;
        break;
      case BindingKind::kScalar:
        rows[row] = reinterpret_cast<char*>(scalars_.data()) + binding.value;
        break;
      case BindingKind::kView:
        rows[row] = rows[binding.value] + binding.bytes;
        break;
    }
  }
  void* pointers[kMaxBindings + 1];
  for (size_t i = 0; i < pack_rows_.size(); ++i) pointers[i] = rows[pack_rows_[i]];
  pointers[pack_rows_.size()] = workspace_data + attributes_.plan_workspace_offset;

  const Cudnn& cudnn = state->device.cudnn();
  Device::HandleLease handle(state->device);
  if (handle.get() == nullptr) return EndedError(name());
  VariantPackCache::Lease pack(state->packs);
  if (ffi::Error error = pack.Acquire(pointers, name()); error.failure()) return error;
  if (Status status = cudnn.set_stream(handle.get(), stream)) {
    return CudnnFailure(cudnn, "set the stream", status, name());
  }
  return use(*state, handle.get(), pack.descriptor(), workspace_data);
}

template <bool kTimed>
ffi::Error CallSite::Execute(int32_t ordinal, Stream stream, const Buffer* operands,
                             size_t operand_count, const Buffer* results, size_t result_count) {
  const auto execute = [&](const DeviceState& state, Handle handle, Descriptor pack,
                           char* workspace) -> ffi::Error {
    if (!fills_.empty() || !initial_.empty()) {
      ffi::Error error = RunFills(state.device.driver(), results, workspace, stream);
      if (error.failure()) return error;
    }
    const Cudnn& cudnn = state.device.cudnn();
    std::chrono::steady_clock::time_point start;
    if constexpr (kTimed) start = std::chrono::steady_clock::now();
    const Status status = cudnn.execute(handle, state.plan->descriptor(), pack);
    if constexpr (kTimed) {
      timings().cudnn_ns += (std::chrono::steady_clock::now() - start).count();
      ++timings().executions;
    }
    if (status != 0) return CudnnFailure(cudnn, "execute a plan", status, name());
    return ffi::Error::Success();
  };
  return WithPack(ordinal, stream, operands, operand_count, results, result_count, execute);
}

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CSRC_PLAN_H_
