#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

namespace jax_cudnn {
namespace {

constexpr size_t kRowLength = 4;    // of bindings and of fills
constexpr int64_t kAlignment = 16;  // of constants, and of what begins inside of other memory

// Whether [offset, offset + bytes) lies within [0, size), without overflow.
bool Within(int64_t offset, int64_t bytes, int64_t size) {
  return offset >= 0 && bytes >= 0 && offset <= size && bytes <= size - offset;
}

std::string Row(const char* attribute, size_t row) {
  return std::string("row ") + std::to_string(row) + " of " + attribute;
}

}  // namespace

ffi::TypeId CallSite::id = {};  // unknown until JaxCudnnInstantiate registers it
ffi::TypeInfo CallSite::info = ffi::MakeTypeInfo<CallSite>();

int64_t Checksum(const Attributes& a) {
  static const auto* const table = [] {
    auto* made = new std::array<uint32_t, 256>;
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t& crc = (*made)[i] = i;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320u : 0);
    }
    return made;
  }();
  uint32_t crc = ~0u;
  const auto add = [&crc](const void* data, size_t bytes) {
    const auto* const byte = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < bytes; ++i) crc = crc >> 8 ^ (*table)[(crc ^ byte[i]) & 0xff];
  };
  add(a.bindings.data(), a.bindings.size() * sizeof(int64_t));
  add(&a.cudnn_version, sizeof(int64_t));
  add(a.device_name.data(), a.device_name.size());
  add(a.fills.data(), a.fills.size() * sizeof(int64_t));
  add(a.initial.data(), a.initial.size() * sizeof(int64_t));
  add(a.name.data(), a.name.size());
  add(a.plan.data(), a.plan.size());
  add(&a.plan_workspace_offset, sizeof(int64_t));
  add(a.scalars.data(), a.scalars.size());
  add(&a.workspace_bytes, sizeof(int64_t));
  return ~crc;
}

Timings& timings() {
  static auto* timings = new Timings;
  return *timings;
}

CallSite::CallSite(Attributes attributes) : attributes_(std::move(attributes)) {
  ++counters().call_sites_alive;
}

CallSite::~CallSite() {
  for (auto& state : states_) delete state.load(std::memory_order_acquire);
  --counters().call_sites_alive;
}

ffi::Error CallSite::Invalid(const std::string& what) const {
  return Failure(ffi::ErrorCode::kInvalidArgument, "malformed custom call: " + what, name());
}

ffi::ErrorOr<std::unique_ptr<CallSite>> CallSite::Create(Attributes attributes) {
  std::unique_ptr<CallSite> site(new CallSite(std::move(attributes)));
  const Attributes& a = site->attributes_;
  if (a.plan.empty()) return ffi::Unexpected(site->Invalid("plan is empty"));
  if (a.checksum != Checksum(a)) {
    return ffi::Unexpected(
        site->Invalid("its checksum is not that of its attributes, so the program was altered or "
                      "damaged after it was lowered. Lower the function again"));
  }
  if (a.workspace_bytes < 0) return ffi::Unexpected(site->Invalid("workspace_bytes is negative"));
  const int64_t plan_begins = a.plan_workspace_offset;
  if (!Within(plan_begins, 0, a.workspace_bytes) || plan_begins % kAlignment != 0) {
    return ffi::Unexpected(site->Invalid("plan_workspace_offset " + std::to_string(plan_begins) +
                                         " is not a multiple of 16 up to " +
                                         std::to_string(a.workspace_bytes)));
  }
  site->scalars_.resize((a.scalars.size() + kAlignment - 1) / kAlignment);
  if (!a.scalars.empty()) std::memcpy(site->scalars_.data(), a.scalars.data(), a.scalars.size());
  if (ffi::Error error = site->DecodeBindings(); error.failure()) return ffi::Unexpected(error);
  if (ffi::Error error = site->DecodeFills(); error.failure()) return ffi::Unexpected(error);
  // Only the decoded forms are used from here on.
  Attributes& own = site->attributes_;
  for (auto* rows : {&own.bindings, &own.fills, &own.initial}) rows->clear();
  return site;
}

ffi::Error CallSite::DecodeBindings() {
  const std::vector<int64_t>& flat = attributes_.bindings;
  if (flat.size() % kRowLength != 0) {
    return Invalid("bindings has " + std::to_string(flat.size()) +
                   " numbers, expected rows of (uid, kind, value, bytes)");
  }
  if (flat.size() / kRowLength > kMaxBindings) {
    return Invalid("bindings has " + std::to_string(flat.size() / kRowLength) + " rows, at most " +
                   std::to_string(kMaxBindings) + " are supported");
  }
  const auto scalar_bytes = static_cast<int64_t>(attributes_.scalars.size());
  const int64_t before_own = attributes_.plan_workspace_offset;
  int64_t arrays = 0, results = 0;  // rows so far
  std::vector<int64_t> sizes;       // bytes behind each row's pointer, for views
  for (size_t row = 0; row < flat.size() / kRowLength; ++row) {
    const int64_t* number = &flat[row * kRowLength];
    const Binding binding{number[0], BindingKind{number[1]}, number[2], number[3]};
    const std::string where = Row("bindings", row);
    if (binding.uid < kNoUid) return Invalid(where + " has a negative uid");
    if (binding.value < 0 || binding.bytes < 0) return Invalid(where + " has a negative number");
    // The graph's operands, then its results, in order and with uids from 1; then what is added.
    const bool is_result = binding.kind == BindingKind::kResult;
    const bool is_operand = binding.kind == BindingKind::kOperand && results == 0;
    const bool listed = arrays == static_cast<int64_t>(row) && (is_operand || is_result) &&
                        binding.value == (is_result ? results : arrays);
    arrays += listed;
    results += listed && is_result;
    const bool added = binding.kind == BindingKind::kScalar || binding.uid > arrays;
    if (is_result > listed ||
        (binding.uid != kNoUid && (listed ? binding.uid != arrays : !added))) {
      return Invalid(where + " is not in the order of the operands and results");
    }
    const bool inside =
        binding.kind != BindingKind::kOperand && binding.kind != BindingKind::kResult;
    const int64_t offset = binding.kind == BindingKind::kView ? binding.bytes : binding.value;
    if (inside && offset % kAlignment != 0) {
      return Invalid(where + " begins at an offset that is not a multiple of 16");
    }
    switch (binding.kind) {
      case BindingKind::kOperand:
        if (binding.value >= static_cast<int64_t>(kMaxBindings)) {
          return Invalid(where + " names operand " + std::to_string(binding.value));
        }
        operands_needed_ = std::max<size_t>(operands_needed_, binding.value + 1);
        sizes.push_back(binding.bytes);
        break;
      case BindingKind::kResult:
        // One more, the workspace, comes after it.
        results_needed_ = std::max<size_t>(results_needed_, binding.value + 2);
        sizes.push_back(binding.bytes);
        break;
      case BindingKind::kWorkspace:
        if (!Within(binding.value, binding.bytes, before_own)) {
          return Invalid(where + " ends outside the " + std::to_string(before_own) +
                         " bytes of workspace before cuDNN's own");
        }
        sizes.push_back(before_own - binding.value);
        break;
      case BindingKind::kScalar:
        if (!Within(binding.value, kAlignment, scalar_bytes)) {
          return Invalid(where + " ends outside the " + std::to_string(scalar_bytes) +
                         " bytes of scalars");
        }
        sizes.push_back(kAlignment);
        break;
      case BindingKind::kView:
        if (binding.value >= static_cast<int64_t>(row)) {
          return Invalid(where + " is a view of row " + std::to_string(binding.value) +
                         ", which is not an earlier one");
        }
        if (bindings_[binding.value].kind == BindingKind::kScalar) {
          return Invalid(where + " is a view of a constant, which is in the host's memory");
        }
        if (binding.bytes >= sizes[binding.value]) {
          return Invalid(where + " is a view that begins " + std::to_string(binding.bytes) +
                         " bytes into " + std::to_string(sizes[binding.value]));
        }
        sizes.push_back(sizes[binding.value] - binding.bytes);
        break;
      default:
        return Invalid(where + " has the unknown kind " + std::to_string(number[1]));
    }
    if (binding.uid != kNoUid) {
      if (std::count(pack_uids_.begin(), pack_uids_.end(), binding.uid) != 0) {
        return Invalid(where + " binds uid " + std::to_string(binding.uid) + " again");
      }
      pack_rows_.push_back(row);
      pack_uids_.push_back(binding.uid);
    }
    bindings_.push_back(binding);
  }
  if (pack_uids_.empty()) return Invalid("bindings binds no uid, so the plan would have no data");
  return CheckTensors(sizes);
}

ffi::Error CallSite::CheckTensors(const std::vector<int64_t>& sizes) const {
  std::vector<std::tuple<int64_t, int64_t, int64_t>> parts;  // of the workspace: begin, end, uid
  for (const PlanTensor& tensor : TensorsOf(attributes_.plan)) {  // some more than once
    const std::string what = "tensor " + std::to_string(tensor.uid) + " of the plan ";
    const auto uid = std::find(pack_uids_.begin(), pack_uids_.end(), tensor.uid);
    if (uid == pack_uids_.end()) return Invalid(what + "is in no row of bindings");
    const size_t row = pack_rows_[uid - pack_uids_.begin()];
    if (tensor.by_value != (bindings_[row].kind == BindingKind::kScalar)) {
      return Invalid(what + (tensor.by_value ? "is read on the host" : "is in the GPU's memory") +
                     ", but " + Row("bindings", row) + " leads elsewhere");
    }
    if (tensor.bytes > static_cast<double>(sizes[row])) {
      return Invalid(what + "has " + std::to_string(static_cast<int64_t>(tensor.bytes)) +
                     " bytes, but " + Row("bindings", row) + " leads to " +
                     std::to_string(sizes[row]));
    }
    if (const Binding& part = bindings_[row]; part.kind == BindingKind::kWorkspace) {
      const auto bytes = static_cast<int64_t>(std::ceil(tensor.bytes));
      parts.emplace_back(part.value, part.value + bytes, part.uid);
    }
  }
  std::sort(parts.begin(), parts.end());
  parts.erase(std::unique(parts.begin(), parts.end()), parts.end());
  for (size_t i = 1; i < parts.size(); ++i) {
    if (std::get<1>(parts[i - 1]) <= std::get<0>(parts[i])) continue;
    return Invalid("tensors " + std::to_string(std::get<2>(parts[i - 1])) + " and " +
                   std::to_string(std::get<2>(parts[i])) + " of the plan overlap in the workspace");
  }
  return ffi::Error::Success();
}

ffi::Error CallSite::DecodeFills() {
  const std::vector<int64_t>& flat = attributes_.fills;
  if (flat.size() % kRowLength != 0) {
    return Invalid("fills has " + std::to_string(flat.size()) +
                   " numbers, expected rows of (offset, unit, count, word)");
  }
  for (size_t row = 0; row < flat.size() / kRowLength; ++row) {
    const int64_t* number = &flat[row * kRowLength];
    const Fill fill{number[0], number[1], number[2], number[3]};
    const std::string where = Row("fills", row);
    if (fill.unit != 1 && fill.unit != 4) {
      return Invalid(where + " has words of " + std::to_string(fill.unit) +
                     " bytes, expected 1 or 4");
    }
    if (fill.count < 0 || fill.count > attributes_.workspace_bytes / fill.unit ||
        !Within(fill.place, fill.count * fill.unit, attributes_.workspace_bytes)) {
      return Invalid(where + " ends outside the workspace of " +
                     std::to_string(attributes_.workspace_bytes) + " bytes");
    }
    if (fill.place % fill.unit != 0) return Invalid(where + " is not aligned to its words");
    if (fill.word < 0 || fill.word > (fill.unit == 1 ? 0xff : int64_t{0xffffffff})) {
      return Invalid(where + " has the word " + std::to_string(fill.word) + ", which is not of " +
                     std::to_string(fill.unit) + " bytes");
    }
    fills_.push_back(fill);
  }
  const std::vector<int64_t>& initial = attributes_.initial;
  if (initial.size() % 2 != 0) return Invalid("initial has an odd number of numbers");
  for (size_t i = 0; i < initial.size(); i += 2) {
    const int64_t result = initial[i], word = initial[i + 1];
    const auto row = std::find_if(bindings_.begin(), bindings_.end(), [&](const Binding& binding) {
      return binding.kind == BindingKind::kResult && binding.value == result;
    });
    if (row == bindings_.end() || word < 0 || word > int64_t{0xffffffff} ||
        (word != 0 && row->bytes % 4 != 0)) {
      return Invalid("initial names result " + std::to_string(result) + " and the word " +
                     std::to_string(word) + ", expected a result of the plan and 4 bytes");
    }
    const int64_t unit = word == 0 ? 1 : 4;
    initial_.push_back({result, unit, row->bytes / unit, word});
  }
  return ffi::Error::Success();
}

ffi::Error CallSite::CheckDevice(const Device& device) const {
  const Cudnn& cudnn = device.cudnn();
  if (cudnn.version != attributes_.cudnn_version) {
    return Failure(
        ffi::ErrorCode::kFailedPrecondition,
        "the plan was built with cuDNN " + VersionText(attributes_.cudnn_version) +
            ", but this process has loaded cuDNN " + VersionText(cudnn.version) + " from " +
            cudnn.path +
            ". A plan runs only with the version that built it: lower the function again in this "
            "process, or install the same cuDNN",
        name());
  }
  if (device.name() != attributes_.device_name) {
    return Failure(ffi::ErrorCode::kFailedPrecondition,
                   "the plan was built for " + attributes_.device_name + ", but this device is " +
                       device.name() +
                       ". Lower the function again on this machine, or under jax_cudnn.target for "
                       "this device",
                   name());
  }
  return ffi::Error::Success();
}

ffi::Error CallSite::InitializeSlowly(int32_t ordinal, Stream stream) {
  if (Ended()) return EndedError(name());
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    return Failure(ffi::ErrorCode::kUnimplemented,
                   "device " + std::to_string(ordinal) + " is beyond the " +
                       std::to_string(kMaxDevices) + " supported devices of a process",
                   name());
  }
  // Executions never wait for this; other devices of this call site do, once.
  std::lock_guard<std::mutex> lock(mutex_);
  if (DeviceState* state = states_[ordinal].load(std::memory_order_relaxed)) {
    return state->device.GrowPool(name());
  }
  const auto device = Device::OfStream(stream, name());
  if (!device.has_value()) return device.error();
  if (ffi::Error error = CheckDevice(**device); error.failure()) return error;
  if (ffi::Error error = (*device)->GrowPool(name()); error.failure()) return error;
  auto plan = (*device)->GetPlan(attributes_.plan, name());
  if (!plan.has_value()) return plan.error();
  const int64_t given = attributes_.workspace_bytes - attributes_.plan_workspace_offset;
  if ((*plan)->workspace_bytes() > given) {
    return Invalid("its plan has " + std::to_string(given) + " bytes of workspace, and cuDNN " +
                   "needs " + std::to_string((*plan)->workspace_bytes()) +
                   ". Lower the function again on this machine; if it fails again, run "
                   "python -m jax_cudnn cache clear, because the stored plan is wrong");
  }
  states_[ordinal].store(new DeviceState(**device, std::move(*plan), pack_uids_),
                         std::memory_order_release);
  return ffi::Error::Success();
}

ffi::Error CallSite::CountError(const char* what, size_t got, size_t expected) const {
  return Invalid("the call has " + std::to_string(got) + " " + what + ", its plan needs " +
                 std::to_string(expected));
}

ffi::Error CallSite::SizeError(size_t row, int64_t got) const {
  const Binding& binding = bindings_[row];
  const char* what = binding.kind == BindingKind::kOperand ? "operand " : "result ";
  return Invalid(what + std::to_string(binding.value) + " has " + std::to_string(got) +
                 " bytes, its plan was built for " + std::to_string(binding.bytes));
}

ffi::Error CallSite::RunFills(const Driver& driver, const Buffer* results, char* workspace,
                              Stream stream) const {
  const auto run = [&](const Fill& fill, char* start, const char* what) {
    if (fill.count == 0) return ffi::Error::Success();
    const auto address = reinterpret_cast<uint64_t>(start);
    const Status status =
        fill.unit == 1 ? driver.memset_d8_async(address, static_cast<unsigned char>(fill.word),
                                                fill.count, stream)
                       : driver.memset_d32_async(address, static_cast<unsigned int>(fill.word),
                                                 fill.count, stream);
    return status == 0 ? ffi::Error::Success() : DriverFailure(driver, what, status, name());
  };
  for (const Fill& fill : fills_) {
    ffi::Error error = run(fill, workspace + fill.place, "fill a workspace");
    if (error.failure()) return error;
  }
  for (const Fill& fill : initial_) {
    ffi::Error error = run(fill, static_cast<char*>(results[fill.place].data), "fill a result");
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error CallSite::Record(int32_t ordinal, Stream stream, const Buffer* operands,
                            size_t operand_count, const Buffer* results, size_t result_count,
                            CudaGraph graph, bool update) {
  if (!fills_.empty() || !initial_.empty()) {
    return Failure(ffi::ErrorCode::kUnimplemented,
                   "this plan sets memory before each execution, and cuDNN's CUDA graph does "
                   "not contain that",
                   name());
  }
  const auto record = [&](const DeviceState& state, Handle handle, Descriptor pack,
                          char*) -> ffi::Error {
    const Cudnn& cudnn = state.device.cudnn();
    const Driver& driver = state.device.driver();
    ContextScope scope(driver, state.device.context());
    if (scope.status() != 0)
      return DriverFailure(driver, "enter a context", scope.status(), name());
    size_t nodes = 0;
    if (Status status = driver.graph_get_nodes(graph, nullptr, &nodes)) {
      return DriverFailure(driver, "look into a CUDA graph", status, name());
    }
    if ((nodes != 0) != update) {
      return Failure(ffi::ErrorCode::kInvalidArgument,
                     update ? "the CUDA graph to be updated is empty: populate it first"
                            : "the CUDA graph to be populated has nodes, cuDNN wants an empty one",
                     name());
    }
    const auto call = update ? cudnn.update_cuda_graph : cudnn.populate_cuda_graph;
    if (call == nullptr) {
      return Failure(ffi::ErrorCode::kUnimplemented,
                     "cuDNN " + VersionText(cudnn.version) + " has no native CUDA graphs", name());
    }
    if (Status status = call(handle, state.plan->descriptor(), pack, graph)) {
      return CudnnFailure(cudnn, update ? "update a CUDA graph" : "populate a CUDA graph", status,
                          name());
    }
    return ffi::Error::Success();
  };
  return WithPack(ordinal, stream, operands, operand_count, results, result_count, record);
}

}  // namespace jax_cudnn
