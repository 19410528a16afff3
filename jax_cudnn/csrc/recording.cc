#include "recording.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"

namespace jax_cudnn {
namespace {

// The caller's memory for a message.
struct Message {
  char* text;
  int64_t size;

  void Set(const std::string& what) const {
    const size_t length = std::min<size_t>(what.size(), size - 1);
    std::memcpy(text, what.data(), length);
    text[length] = 0;
  }
};

}  // namespace
}  // namespace jax_cudnn

void* JaxCudnnNewCallSite(const JaxCudnnPlan* p, char* message, int64_t size) {
  using namespace jax_cudnn;
  const Message failure{message, size};
  try {
    Attributes a;
    a.plan = p->plan;
    a.checksum = p->checksum;
    a.name = p->name;
    a.device_name = p->device_name;
    a.cudnn_version = p->cudnn_version;
    a.bindings.assign(p->bindings, p->bindings + p->binding_numbers);
    a.scalars.assign(p->scalars, p->scalars + p->scalar_bytes);
    a.fills.assign(p->fills, p->fills + p->fill_numbers);
    a.workspace_bytes = p->workspace_bytes;
    a.plan_workspace_offset = p->plan_workspace_offset;
    auto site = CallSite::Create(std::move(a));
    if (site.has_value()) return site->release();
    failure.Set(site.error().message());
  } catch (const std::exception& e) {
    failure.Set(e.what());
  }
  return nullptr;
}

int JaxCudnnRecord(void* call_site, int32_t ordinal, void* stream, const JaxCudnnBuffers* operands,
                   const JaxCudnnBuffers* results, void* graph, int update, char* message,
                   int64_t size) {
  using namespace jax_cudnn;
  const Message failure{message, size};
  try {
    auto* site = static_cast<CallSite*>(call_site);
    const auto listed = [](const JaxCudnnBuffers& given) {
      std::vector<Buffer> buffers;
      for (int64_t i = 0; i < given.count; ++i) buffers.push_back({given.data[i], given.bytes[i]});
      return buffers;
    };
    const std::vector<Buffer> in = listed(*operands), out = listed(*results);
    ffi::Error error = site->Initialize(ordinal, stream);
    if (error.success()) {
      error = site->Record(ordinal, stream, in.data(), in.size(), out.data(), out.size(), graph,
                           update != 0);
    }
    if (error.success()) return 0;
    failure.Set(error.message());
  } catch (const std::exception& e) {
    failure.Set(e.what());
  }
  return 1;
}
