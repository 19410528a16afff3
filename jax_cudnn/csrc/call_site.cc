#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <set>

#include "executor.h"

namespace jax_cudnn {
namespace {
constexpr int64_t kAlignment = 16;  // of what begins inside of other memory
constexpr size_t kMaxPacks = 4;     // of a call site and a lane

// Whether [offset, offset + bytes) lies within [0, size), without overflow.
bool Within(int64_t offset, int64_t bytes, int64_t size) {
  return offset >= 0 && bytes >= 0 && offset <= size && bytes <= size - offset;
}

template <typename... Parts>
void Require(bool holds, const Parts&... otherwise) {
  Expect(holds, "malformed custom call: ", otherwise...);
}

// What follows `field` within an object of a text, up to the end of the text; "" without it.
const char* After(std::string_view object, std::string_view field) {
  const size_t at = object.find(field);
  return at == object.npos ? "" : object.data() + at + field.size();
}

bool Is(std::string_view object, std::string_view field, const char* value) {
  return std::strncmp(After(object, field), value, std::strlen(value)) == 0;
}

// The least bytes of a tensor in cuDNN's text of a plan, 0 where that does not say: neither the
// parts of a packed tensor nor reordered elements lie where its dimensions and strides lead.
// Booleans may be bits.
double LeastBytes(std::string_view object) {
  static constexpr std::pair<const char*, int> kBits[] = {
      {"FLOAT\"", 32}, {"HALF\"", 16},  {"BFLOAT16\"", 16}, {"DOUBLE\"", 64}, {"INT8\"", 8},
      {"UINT8\"", 8},  {"INT32\"", 32}, {"INT64\"", 64},    {"BOOLEAN\"", 1}, {"FP8_", 8}};
  constexpr double kFar = 1e15;  // bytes that no memory has
  const bool regular = Is(object, "\"reordering\":\"CUDNN_TENSOR_REORDERING_", "NONE");
  if (!regular || *After(object, "\"isRagged\":") != 0) return 0;
  double last = 0;
  const char *dim = After(object, "\"dim\":["), *stride = After(object, "\"stride\":[");
  for (bool more = true; more; more = *dim++ == ',' && *stride++ == ',') {
    char *dim_end, *stride_end;  // not as floats: their decimal point is the locale's
    const auto size = static_cast<double>(std::strtoll(dim, &dim_end, 10));
    last += (size - 1) * static_cast<double>(std::strtoll(stride, &stride_end, 10));
    dim = dim_end, stride = stride_end;
  }
  if (!(last >= 0 && last < kFar)) return kFar;
  for (const auto& [name, bits] : kBits) {
    if (Is(object, "\"dataType\":\"CUDNN_DATA_", name)) return (last + 1) * bits / 8;
  }
  return 0;
}
}  // namespace

int64_t CallSite::Checksum(std::initializer_list<std::string_view> attributes) {
  static constexpr uint32_t kOfBits[16] = {0,          0x1db71064, 0x3b6e20c8, 0x26d930ac,
                                           0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
                                           0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                           0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
  uint32_t crc = ~0u;
  for (const std::string_view bytes : attributes) {
    for (const char byte : bytes) {
      crc ^= static_cast<uint8_t>(byte);
      for (int half = 0; half < 2; ++half) crc = crc >> 4 ^ kOfBits[crc & 15];
    }
  }
  return static_cast<uint32_t>(~crc);
}

CallSite::CallSite(std::string_view device_name, std::string_view name, std::string_view plan,
                   ffi::Span<const int64_t> rows, int64_t checksum)
    : device_name_(device_name), name_(name), plan_(plan), rows_(rows.size() / 4) {
  const std::string_view bytes(reinterpret_cast<const char*>(rows.begin()), rows.size() * 8);
  Require(checksum == Checksum({device_name, name, plan, bytes}),
          "its checksum is not that of its attributes, so the program was altered or damaged after "
          "it was lowered. Lower the function again");
  Require(!plan.empty() && !rows_.empty() && rows.size() % 4 == 0 && rows_.size() <= kMaxRows,
          "it has no plan, or not 1 to ", kMaxRows, " rows of 4 numbers");
  std::memcpy(rows_.data(), bytes.data(), bytes.size());
  std::tie(cudnn_version_, workspace_bytes_, plan_offset_) = std::tie(rows[0], rows[1], rows[2]);
  rows_.erase(rows_.begin());
  Require(Within(plan_offset_, 0, workspace_bytes_) && plan_offset_ % kAlignment == 0,
          "its plan does not begin at a multiple of 16 in the workspace");
  int64_t arrays = 0;  // rows so far
  std::vector<int64_t> sizes;
  for (size_t row = 0; row < rows_.size(); ++row) {
    const auto& [uid, kind, value, bytes] = rows_[row];
    // The graph's operands, then its results, in order and with uids from 1; then what is added.
    const bool next =
        kind == kResult ? value == results_ : kind == kOperand && value == arrays && results_ == 0;
    const bool listed = next && arrays == int64_t(row);
    arrays += listed;
    results_ += listed && kind == kResult;
    bool named = listed ? uid == arrays : uid > arrays || (kind == kScalar && uid >= 0);
    named = named && std::count(uids_.begin(), uids_.end(), uid) == 0;
    sizes.push_back(SizeOf(row, listed, sizes));
    Require(sizes[row] >= 0 && (named || uid == kNoUid || kind == kMemset), "row ", row, ": ", uid,
            " ", kind, " ", value, " ", bytes);
    if (kind == kOperand) operands_ = std::max(operands_, value + 1);
    if (kind != kMemset && uid != kNoUid) uids_.push_back(uid);
  }
  Require(!uids_.empty(), "no row has a uid, so the plan would have no data");
  CheckTensors(sizes);
  ++counts[kCallSitesAlive];
}

CallSite::~CallSite() {
  for (auto& here : devices_) delete here.load(std::memory_order_acquire);
  --counts[kCallSitesAlive];
}

// The bytes from a row's pointer on; -1 if the row is malformed.
int64_t CallSite::SizeOf(size_t row, bool listed, const std::vector<int64_t>& sizes) const {
  const auto& [uid, kind, value, bytes] = rows_[row];
  if (kind == kScalar) return sizeof(value) + sizeof(bytes);
  if (value < 0 || bytes < 0) return -1;
  if (kind == kOperand && value < int64_t{kMaxRows}) return bytes;
  if (kind == kResult && listed) return bytes;
  const bool fits = value % kAlignment == 0 && Within(value, bytes, plan_offset_);
  if (kind == kWorkspace) return fits ? plan_offset_ - value : -1;
  if (value >= int64_t(row)) return -1;
  const int64_t of = rows_[value].kind, left = sizes[value] - bytes;
  const bool has_part = of != kScalar && of != kMemset && bytes % kAlignment == 0 && left > 0;
  if (kind == kView) return has_part ? left : -1;
  const bool is_word = Within(uid, 0, 0xffffffff) && (uid == 0 || bytes % 4 == 0);
  return kind == kMemset && (of == kResult || of == kWorkspace) && left >= 0 && is_word ? 0 : -1;
}

// Compares the rows with the tensors in cuDNN's text, but for those that stay within kernels.
// It has none where it has another form, such as that of a later cuDNN; some are there twice.
void CallSite::CheckTensors(const std::vector<int64_t>& sizes) const {
  constexpr std::string_view kTensor = "{\"name\":\"";
  std::set<std::array<int64_t, 3>> parts;  // of the workspace: begin, end, uid
  for (size_t at = plan_.find(kTensor); at != plan_.npos; at = plan_.find(kTensor, at + 1)) {
    const auto object = std::string_view(plan_).substr(at, plan_.find('}', at) - at);
    if (!Is(object, "\"isVirtual\":", "false")) continue;
    const int64_t uid = std::strtoll(object.data() + kTensor.size(), nullptr, 10);
    const auto bytes = static_cast<int64_t>(std::ceil(LeastBytes(object)));
    const bool by_value = Is(object, "\"isByValue\":", "true");
    size_t row = 0;
    while (row < rows_.size() && (rows_[row].uid != uid || rows_[row].kind == kMemset)) ++row;
    Require(row < rows_.size() && uid != kNoUid, "tensor ", uid, " of the plan is in no row");
    const auto& [unused, kind, start, size] = rows_[row];
    Require(by_value == (kind == kScalar) && bytes <= sizes[row], "tensor ", uid, " of the plan, ",
            by_value ? "by value, " : "", "has ", bytes, " bytes, but row ", row, ", of kind ",
            kind, ", leads to ", sizes[row]);
    if (kind == kWorkspace) parts.insert({start, start + bytes, uid});
  }
  for (auto part = parts.begin(); part != parts.end() && std::next(part) != parts.end(); ++part) {
    const auto& next = *std::next(part);
    Require((*part)[1] <= next[0], "tensors ", (*part)[2], " and ", next[2],
            " of the plan overlap in the workspace");
  }
}

std::atomic<CallSite::OnDevice*>& CallSite::On(int32_t ordinal) {
  Expect(ordinal >= 0 && ordinal < kMaxDevices, "device ", ordinal, " is beyond the ", kMaxDevices,
         " supported devices of a process");
  return devices_[ordinal];
}

void CallSite::Initialize(int32_t ordinal, Stream stream) {
  FailIfEnded();
  std::atomic<OnDevice*>& on = On(ordinal);
  if (OnDevice* here = on.load(std::memory_order_acquire)) return here->device.AddHandle();
  // Executions never wait for this; other devices of this call site do, once.
  std::lock_guard<std::mutex> lock(mutex_);
  if (on.load(std::memory_order_relaxed) != nullptr) return;
  Device& device = Device::OfStream(stream);
  Expect(api.version == cudnn_version_, "the plan was built with cuDNN ",
         VersionText(cudnn_version_), ", but this process has loaded cuDNN ",
         VersionText(api.version), " from ", api.path,
         ". A plan runs only with the version that built it: lower the function again in this "
         "process, or install the same cuDNN");
  Expect(device.name == device_name_, "the plan was built for ", device_name_,
         ", but this device is ", device.name,
         ". Lower the function again on this machine, or under jax_cudnn.target for this device");
  device.AddHandle();
  auto plan = device.GetPlan(plan_);
  const int64_t given = workspace_bytes_ - plan_offset_;
  Require(plan->workspace_bytes <= given, "its plan has ", given,
          " bytes of workspace, and cuDNN needs ", plan->workspace_bytes,
          ". Lower the function again on this machine; if it fails again, run python -m jax_cudnn "
          "cache clear, because the stored plan is wrong");
  on.store(new OnDevice{device, std::move(plan)}, std::memory_order_release);
}

void CallSite::Execute(int32_t ordinal, Stream stream, Buffers operands, Buffers results,
                       CudaGraph graph, bool update) {
  OnDevice* const here = On(ordinal).load(std::memory_order_acquire);
  Expect(here != nullptr, "this call was executed on device ", ordinal,
         " without being initialized there; cuDNN calls run on CUDA devices only");
  constexpr char kWant[] = ", its plan was built for ";
  Require(int64_t(operands.size()) >= operands_ && int64_t(results.size()) == results_ + 1,
          "the call has ", operands.size(), " operands and ", results.size(), " results", kWant,
          operands_, " and ", results_ + 1);
  auto* const workspace = static_cast<char*>(results[results_].data);
  Require(results[results_].bytes >= workspace_bytes_, "the call has ", results[results_].bytes,
          " bytes of workspace", kWant, workspace_bytes_);
  char* starts[kMaxRows];
  void* pointers[kMaxRows + 1];
  size_t count = 0;
  for (size_t row = 0; row < rows_.size(); ++row) {
    const auto& [uid, kind, value, bytes] = rows_[row];
    if (kind == kOperand || kind == kResult) {
      const Buffer& buffer = kind == kOperand ? operands[value] : results[value];
      Require(buffer.bytes == bytes, kind == kOperand ? "operand " : "result ", value, " has ",
              buffer.bytes, " bytes", kWant, bytes);
      starts[row] = static_cast<char*>(buffer.data);
    } else if (kind == kScalar) {
      starts[row] = reinterpret_cast<char*>(const_cast<int64_t*>(&value));
    } else {
      starts[row] = kind == kWorkspace ? workspace + value : starts[value] + bytes;
    }
    if (uid != kNoUid && kind != kMemset) pointers[count++] = starts[row];
  }
  pointers[count] = workspace + plan_offset_;
  int lane = 0;
  const auto held = here->device.Acquire(lane);
  const Handle handle = here->device.lanes[lane].handle;
  const Descriptor pack = here->PackOf(lane, pointers, uids_);
  Check(api.cudnnSetStream(handle, stream), "set the stream");
  for (const auto& [word, kind, target, bytes] : rows_) {
    if (kind != kMemset || bytes == 0) continue;
    Expect(graph == nullptr, "this plan sets memory first, and cuDNN's CUDA graph would not");
    const auto address = reinterpret_cast<uint64_t>(starts[target]);
    CheckDriver(word == 0 ? api.cuMemsetD8Async(address, 0, bytes, stream)
                          : api.cuMemsetD32Async(address, word, bytes / 4, stream),
                "set memory before a plan");
  }
  if (graph != nullptr) {
    const auto record =
        update ? api.cudnnBackendUpdateCudaGraph : api.cudnnBackendPopulateCudaGraph;
    Expect(record != nullptr, "cuDNN ", VersionText(api.version), " has no native CUDA graphs");
    ContextScope scope(here->device.context);
    size_t nodes = 0;
    CheckDriver(api.cuGraphGetNodes(graph, nullptr, &nodes), "read a CUDA graph");
    Expect(nodes != 0 || !update, "the CUDA graph to be updated is empty: populate it first");
    Expect(nodes == 0 || update,
           "the CUDA graph to be populated has nodes, cuDNN wants an empty one");
    return Check(record(handle, here->plan->descriptor, pack, graph), "record a CUDA graph");
  }
  const Timer timer{counts[kCudnnNs]};
  Check(api.cudnnBackendExecute(handle, here->plan->descriptor, pack), "execute a plan");
}

Descriptor CallSite::OnDevice::PackOf(int lane, void* const* pointers,
                                      const std::vector<int64_t>& uids) {
  std::vector<Pack>& known = packs[lane];
  for (const auto& [held, descriptor] : known) {
    if (std::equal(held.begin(), held.end(), pointers)) return descriptor;
  }
  known.reserve(kMaxPacks);  // so that nothing is thrown after the descriptor is made
  const auto count = static_cast<int64_t>(uids.size());
  Pack pack{std::vector<void*>(pointers, pointers + count + 1), nullptr};
  pack.second = Finalized(kPack,
                          {{kPackUids, kTypeInt64, count, uids.data()},
                           {kPackPointers, kTypePointer, count, pointers},
                           {kPackWorkspace, kTypePointer, 1, pointers + count}},
                          "finalize a variant pack");
  if (known.size() == kMaxPacks) {  // a finalized one takes no other pointers
    api.cudnnBackendDestroyDescriptor(known.front().second);
    known.erase(known.begin());
    --counts[kPacksAlive];
  }
  known.push_back(std::move(pack));
  ++counts[kPacksMade];
  ++counts[kPacksAlive];
  return known.back().second;
}

CallSite::OnDevice::~OnDevice() {
  const auto lock = device.LockUnlessEnded();
  if (!lock.owns_lock()) return;
  for (const auto& lane : packs) {
    for (const Pack& pack : lane) api.cudnnBackendDestroyDescriptor(pack.second);
    counts[kPacksAlive] -= static_cast<int64_t>(lane.size());
  }
}

}  // namespace jax_cudnn
