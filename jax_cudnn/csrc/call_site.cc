#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string_view>

#include "executor.h"

namespace jax_cudnn {
namespace {

using std::chrono::steady_clock;

constexpr int64_t kAlignment = 16;  // of what begins inside of other memory
constexpr size_t kMaxPacks = 4;     // of a call site and a lane

// Whether [offset, offset + bytes) lies within [0, size), without overflow.
bool Within(int64_t offset, int64_t bytes, int64_t size) {
  return offset >= 0 && bytes >= 0 && offset <= size && bytes <= size - offset;
}

template <typename... Parts>
void Require(bool holds, const Parts&... otherwise) {
  if (!holds) Fail(ffi::ErrorCode::kInvalidArgument, "malformed custom call: ", otherwise...);
}

const std::string& Bytes(const Attributes& attributes, const char* name) {
  const auto found = attributes.find(name);
  Require(found != attributes.end(), "it has no ", name);
  return found->second;
}

template <typename T>
std::vector<T> Rows(const Attributes& attributes, const char* name) {
  const std::string& bytes = Bytes(attributes, name);
  Require(bytes.size() % sizeof(T) == 0, name, " does not consist of rows");
  std::vector<T> rows(bytes.size() / sizeof(T));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(rows.data()));
  return rows;
}

int64_t Number(const Attributes& attributes, const char* name) {
  const auto numbers = Rows<int64_t>(attributes, name);
  Require(numbers.size() == 1, name, " is not a number");
  return numbers[0];
}

// What follows `field` within an object of a text, up to the end of the text; "" without it.
const char* After(std::string_view object, std::string_view field) {
  const size_t at = object.find(field);
  return at == object.npos ? "" : object.data() + at + field.size();
}

bool StartsWith(const char* text, const char* what) {
  return std::strncmp(text, what, std::strlen(what)) == 0;
}

// The least bytes of a tensor in cuDNN's text of a plan, 0 where that does not say: neither the
// parts of a packed tensor nor reordered elements lie where its dimensions and strides lead.
// Booleans may be bits.
double LeastBytes(std::string_view object) {
  static constexpr std::pair<const char*, int> kBits[] = {
      {"FLOAT\"", 32}, {"HALF\"", 16},  {"BFLOAT16\"", 16}, {"DOUBLE\"", 64}, {"INT8\"", 8},
      {"UINT8\"", 8},  {"INT32\"", 32}, {"INT64\"", 64},    {"BOOLEAN\"", 1}, {"FP8_", 8}};
  constexpr double kFar = 1e15;  // bytes that no memory has
  const char* const order = After(object, "\"reordering\":\"CUDNN_TENSOR_REORDERING_");
  if (!StartsWith(order, "NONE") || *After(object, "\"isRagged\":") != 0) return 0;
  double last = 0;
  const char *dim = After(object, "\"dim\":["), *stride = After(object, "\"stride\":[");
  for (bool more = true; more; more = *dim++ == ',' && *stride++ == ',') {
    char *dim_end, *stride_end;  // not as floats: their decimal point is the locale's
    const auto size = static_cast<double>(std::strtoll(dim, &dim_end, 10));
    last += (size - 1) * static_cast<double>(std::strtoll(stride, &stride_end, 10));
    dim = dim_end, stride = stride_end;
  }
  if (!(last >= 0 && last < kFar)) return kFar;
  const char* const dtype = After(object, "\"dataType\":\"CUDNN_DATA_");
  for (const auto& [name, bits] : kBits) {
    if (StartsWith(dtype, name)) return (last + 1) * bits / 8;
  }
  return 0;
}

}  // namespace

int64_t Checksum(const Attributes& attributes) {
  uint32_t crc = ~0u;
  for (const auto& [name, bytes] : attributes) {
    for (const uint8_t byte : name == "checksum" ? std::string() : bytes) {
      crc ^= byte;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (0xedb88320u & -(crc & 1));
    }
  }
  return static_cast<uint32_t>(~crc);
}

CallSite::CallSite(const Attributes& attributes)
    : plan_(Bytes(attributes, "plan")),
      name_(Bytes(attributes, "name")),
      device_name_(Bytes(attributes, "device_name")),
      cudnn_version_(Number(attributes, "cudnn_version")),
      workspace_bytes_(Number(attributes, "workspace_bytes")),
      plan_workspace_offset_(Number(attributes, "plan_workspace_offset")),
      bindings_(Rows<Binding>(attributes, "bindings")),
      memsets_(Rows<Memset>(attributes, "memsets")) {
  Require(Number(attributes, "checksum") == Checksum(attributes),
          "its checksum is not that of its attributes, so the program was altered or damaged after "
          "it was lowered. Lower the function again");
  Require(Within(plan_workspace_offset_, 0, workspace_bytes_) &&
              plan_workspace_offset_ % kAlignment == 0 && !plan_.empty(),
          "its plan is empty, or does not begin at a multiple of 16 in the workspace");
  CheckBindings();
  CheckMemsets();
  ++counts.call_sites_alive;
}

CallSite::~CallSite() {
  for (auto& here : devices_) delete here.load(std::memory_order_acquire);
  --counts.call_sites_alive;
}

// The bytes from a row's pointer on; -1 if the row is malformed.
int64_t CallSite::SizeOf(size_t row, bool listed, const std::vector<int64_t>& sizes) const {
  const auto& [uid, kind, value, bytes] = bindings_[row];
  if (kind == kScalar) return sizeof(value) + sizeof(bytes);
  if (value < 0 || bytes < 0) return -1;
  if (kind == kOperand && value < int64_t{kMaxBindings}) return bytes;
  if (kind == kResult && listed) return bytes;
  if ((kind == kView ? bytes : value) % kAlignment != 0) return -1;
  const int64_t size = plan_workspace_offset_;
  if (kind == kWorkspace && Within(value, bytes, size)) return size - value;
  const bool is_view = kind == kView && value < int64_t(row) && bindings_[value].kind != kScalar;
  return is_view && bytes < sizes[value] ? sizes[value] - bytes : -1;
}

void CallSite::CheckBindings() {
  int64_t arrays = 0;  // rows so far
  std::vector<int64_t> sizes;
  for (size_t row = 0; row < bindings_.size(); ++row) {
    const auto& [uid, kind, value, bytes] = bindings_[row];
    // The graph's operands, then its results, in order and with uids from 1; then what is added.
    const bool in_order = kind == kResult    ? value == results_
                          : kind == kOperand ? value == arrays && results_ == 0
                                             : false;
    const bool listed = in_order && arrays == int64_t(row);
    arrays += listed;
    results_ += listed && kind == kResult;
    const bool named = listed ? uid == arrays : uid > arrays || (kind == kScalar && uid >= 0);
    const bool again = std::count(uids_.begin(), uids_.end(), uid) != 0;
    sizes.push_back(SizeOf(row, listed, sizes));
    Require(sizes[row] >= 0 && (named || uid == kNoUid) && !again && row < kMaxBindings, "row ",
            row, " of bindings: ", uid, " ", kind, " ", value, " ", bytes);
    if (kind == kOperand) operands_ = std::max(operands_, value + 1);
    if (uid != kNoUid) uids_.push_back(uid);
  }
  Require(!uids_.empty(), "bindings has no uid, so the plan would have no data");
  first_result_ = arrays - results_;
  CheckTensors(sizes);
}

// Compares the bindings with the tensors in cuDNN's text, but for those that stay within kernels.
// It has none where it has another form, such as that of a later cuDNN; some are there twice.
void CallSite::CheckTensors(const std::vector<int64_t>& sizes) const {
  constexpr std::string_view kTensor = "{\"name\":\"";
  std::set<std::array<int64_t, 3>> parts;  // of the workspace: begin, end, uid
  for (size_t at = plan_.find(kTensor); at != plan_.npos; at = plan_.find(kTensor, at + 1)) {
    const auto object = std::string_view(plan_).substr(at, plan_.find('}', at) - at);
    if (!StartsWith(After(object, "\"isVirtual\":"), "false")) continue;
    const int64_t uid = std::strtoll(object.data() + kTensor.size(), nullptr, 10);
    const auto bytes = static_cast<int64_t>(std::ceil(LeastBytes(object)));
    const bool by_value = StartsWith(After(object, "\"isByValue\":"), "true");
    size_t row = 0;
    while (row < bindings_.size() && (bindings_[row].uid != uid || uid == kNoUid)) ++row;
    Require(row < bindings_.size(), "tensor ", uid, " of the plan is in no row of bindings");
    const auto& [unused, kind, start, size] = bindings_[row];
    Require(by_value == (kind == kScalar) && bytes <= sizes[row], "tensor ", uid, " of the plan, ",
            by_value ? "by value, " : "", "has ", bytes, " bytes, but row ", row,
            " of bindings, of kind ", kind, ", leads to ", sizes[row]);
    if (kind == kWorkspace) parts.insert({start, start + bytes, uid});
  }
  for (auto part = parts.begin(); part != parts.end() && std::next(part) != parts.end(); ++part) {
    const auto& next = *std::next(part);
    Require((*part)[1] <= next[0], "tensors ", (*part)[2], " and ", next[2],
            " of the plan overlap in the workspace");
  }
}

void CallSite::CheckMemsets() const {
  for (size_t row = 0; row < memsets_.size(); ++row) {
    const auto& [result, offset, bytes, word] = memsets_[row];
    const int64_t size = result < 0 || result > results_ ? -1
                         : result == results_            ? workspace_bytes_
                                                         : bindings_[first_result_ + result].bytes;
    const int64_t unit = word == 0 ? 1 : 4;
    Require(Within(offset, bytes, size) && offset % unit == 0 && bytes % unit == 0 &&
                Within(word, 0, 0xffffffff),
            "row ", row, " of memsets: ", result, " ", offset, " ", bytes, " ", word);
  }
}

std::atomic<CallSite::OnDevice*>& CallSite::On(int32_t ordinal) {
  if (ordinal >= 0 && ordinal < kMaxDevices) return devices_[ordinal];
  Fail(ffi::ErrorCode::kUnimplemented, "device ", ordinal, " is beyond the ", kMaxDevices,
       " supported devices of a process");
}

void CallSite::Initialize(int32_t ordinal, Stream stream) {
  FailIfEnded();
  std::atomic<OnDevice*>& on = On(ordinal);
  if (OnDevice* here = on.load(std::memory_order_acquire)) return here->device.AddHandle();
  // Executions never wait for this; other devices of this call site do, once.
  std::lock_guard<std::mutex> lock(mutex_);
  if (on.load(std::memory_order_relaxed) != nullptr) return;
  Device& device = Device::OfStream(stream);
  if (api.version != cudnn_version_) {
    Fail(ffi::ErrorCode::kFailedPrecondition, "the plan was built with cuDNN ",
         VersionText(cudnn_version_), ", but this process has loaded cuDNN ",
         VersionText(api.version), " from ", api.path,
         ". A plan runs only with the version that built it: lower the function again in this "
         "process, or install the same cuDNN");
  }
  if (device.name != device_name_) {
    Fail(ffi::ErrorCode::kFailedPrecondition, "the plan was built for ", device_name_,
         ", but this device is ", device.name,
         ". Lower the function again on this machine, or under jax_cudnn.target for this device");
  }
  device.AddHandle();
  auto plan = device.GetPlan(plan_);
  const int64_t given = workspace_bytes_ - plan_workspace_offset_;
  Require(plan->workspace_bytes <= given, "its plan has ", given,
          " bytes of workspace, and cuDNN needs ", plan->workspace_bytes,
          ". Lower the function again on this machine; if it fails again, run python -m jax_cudnn "
          "cache clear, because the stored plan is wrong");
  on.store(new OnDevice{device, std::move(plan)}, std::memory_order_release);
}

void CallSite::Execute(int32_t ordinal, Stream stream, Buffers operands, Buffers results,
                       const Recording* into) {
  OnDevice* const here = On(ordinal).load(std::memory_order_acquire);
  if (here == nullptr) {
    Fail(ffi::ErrorCode::kFailedPrecondition, "this call was executed on device ", ordinal,
         " without being initialized there; cuDNN calls run on CUDA devices only");
  }
  constexpr char kWant[] = ", its plan was built for ";
  Require(int64_t(operands.size()) >= operands_, "the call has ", operands.size(), " operands",
          kWant, operands_);
  Require(int64_t(results.size()) == results_ + 1, "the call has ", results.size(), " results",
          kWant, results_ + 1);
  auto* const workspace = static_cast<char*>(results[results_].data);
  Require(results[results_].bytes >= workspace_bytes_, "the call has ", results[results_].bytes,
          " bytes of workspace", kWant, workspace_bytes_);
  char* rows[kMaxBindings];
  void* pointers[kMaxBindings + 1];
  size_t count = 0;
  for (size_t row = 0; row < bindings_.size(); ++row) {
    const auto& [uid, kind, value, bytes] = bindings_[row];
    if (kind == kOperand || kind == kResult) {
      const Buffer& buffer = kind == kOperand ? operands[value] : results[value];
      Require(buffer.bytes == bytes, kind == kOperand ? "operand " : "result ", value, " has ",
              buffer.bytes, " bytes", kWant, bytes);
      rows[row] = static_cast<char*>(buffer.data);
    } else if (kind == kScalar) {
      rows[row] = reinterpret_cast<char*>(const_cast<int64_t*>(&value));
    } else {
      rows[row] = kind == kView ? rows[value] + bytes : workspace + value;
    }
    if (uid != kNoUid) pointers[count++] = rows[row];
  }
  pointers[count] = workspace + plan_workspace_offset_;

  int lane = 0;
  const auto held = here->device.Acquire(lane);
  const Handle handle = here->device.lanes[lane].handle;
  const Descriptor pack = here->PackOf(lane, pointers, uids_);
  Check(api.cudnnSetStream(handle, stream), "set the stream");
  if (into != nullptr) return Record(*here, handle, pack, *into);
  for (const auto& [result, offset, bytes, word] : memsets_) {
    const auto address = reinterpret_cast<uint64_t>(results[result].data) + offset;
    CheckDriver(word == 0 ? api.cuMemsetD8Async(address, 0, bytes, stream)
                          : api.cuMemsetD32Async(address, word, bytes / 4, stream),
                "set memory before a plan");
  }
  const bool timing = timed.load(std::memory_order_relaxed);
  const auto start = timing ? steady_clock::now() : steady_clock::time_point();
  const Status status = api.cudnnBackendExecute(handle, here->plan->descriptor, pack);
  if (timing) {
    counts.cudnn_ns += (steady_clock::now() - start).count();
    ++counts.executions;
  }
  Check(status, "execute a plan");
}

Descriptor CallSite::OnDevice::PackOf(int lane, void* const* pointers,
                                      const std::vector<int64_t>& uids) {
  std::vector<Pack>& known = packs[lane];
  for (const Pack& pack : known) {
    if (std::equal(pack.pointers.begin(), pack.pointers.end(), pointers)) return pack.descriptor;
  }
  known.reserve(kMaxPacks);  // so that nothing is thrown after the descriptor is made
  const auto count = static_cast<int64_t>(uids.size());
  Pack pack{{pointers, pointers + count + 1}, nullptr};
  pack.descriptor = Finalized(kPack,
                              {{kPackUids, kTypeInt64, count, uids.data()},
                               {kPackPointers, kTypePointer, count, pointers},
                               {kPackWorkspace, kTypePointer, 1, pointers + count}},
                              "finalize a variant pack");
  if (known.size() == kMaxPacks) {  // a finalized one takes no other pointers
    api.cudnnBackendDestroyDescriptor(known.front().descriptor);
    known.erase(known.begin());
    --counts.packs_alive;
  }
  known.push_back(std::move(pack));
  ++counts.packs_built;
  ++counts.packs_alive;
  return known.back().descriptor;
}

CallSite::OnDevice::~OnDevice() {
  const auto lock = device.LockUnlessEnded();
  if (!lock.owns_lock()) return;
  for (const auto& lane : packs) {
    for (const Pack& pack : lane) api.cudnnBackendDestroyDescriptor(pack.descriptor);
    counts.packs_alive -= static_cast<int64_t>(lane.size());
  }
}

void CallSite::Record(const OnDevice& here, Handle handle, Descriptor pack,
                      const Recording& into) const {
  const auto call =
      into.update ? api.cudnnBackendUpdateCudaGraph : api.cudnnBackendPopulateCudaGraph;
  if (call == nullptr) {
    Fail(ffi::ErrorCode::kUnimplemented, "cuDNN ", VersionText(api.version),
         " has no native CUDA graphs");
  }
  if (!memsets_.empty()) {
    Fail(ffi::ErrorCode::kUnimplemented,
         "this plan sets memory before each execution, and cuDNN's CUDA graph does not contain "
         "that");
  }
  ContextScope scope(here.device.context);
  CheckDriver(scope.status, "enter a context");
  size_t nodes = 0;
  CheckDriver(api.cuGraphGetNodes(into.graph, nullptr, &nodes), "read a CUDA graph");
  if ((nodes != 0) != into.update) {
    Fail(ffi::ErrorCode::kInvalidArgument,
         into.update ? "the CUDA graph to be updated is empty: populate it first"
                     : "the CUDA graph to be populated has nodes, cuDNN wants an empty one");
  }
  Check(call(handle, here.plan->descriptor, pack, into.graph),
        into.update ? "update a CUDA graph" : "populate a CUDA graph");
}

}  // namespace jax_cudnn
