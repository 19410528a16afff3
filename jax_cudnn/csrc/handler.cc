// What XLA and Python see: the stages of the custom call "jax_cudnn", and a few C functions.
//
// XLA instantiates a call site once per executable (attributes only), initializes it before every
// execution (outside of stream capture) and executes it (perhaps under capture).

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plan.h"
#include "xla/ffi/api/ffi.h"

#define JAX_CUDNN_EXPORT extern "C" __attribute__((visibility("default")))

namespace jax_cudnn {
namespace {

using std::chrono::steady_clock;

// Nothing here throws on purpose, but memory may run out, and XLA is built without exceptions.
template <typename Function>
auto NoThrow(Function function) -> decltype(function()) {
  const auto error = [](const char* what) {
    return ffi::Error::Internal(std::string("jax_cudnn: ") + what);
  };
  if constexpr (std::is_same_v<decltype(function()), ffi::Error>) {
    try {
      return function();
    } catch (const std::exception& e) {
      return error(e.what());
    }
  } else {
    try {
      return function();
    } catch (const std::exception& e) {
      return ffi::Unexpected(error(e.what()));
    }
  }
}

// Reads attributes one after another and remembers the first that is missing or mistyped.
class AttributeReader {
 public:
  explicit AttributeReader(ffi::Dictionary attributes) : attributes_(attributes) {}

  std::string Text(std::string_view name) { return std::string(Get<std::string_view>(name)); }
  int64_t Number(std::string_view name) { return Get<int64_t>(name); }
  template <typename T>
  std::vector<T> Array(std::string_view name) {
    const auto span = Get<ffi::Span<const T>>(name);
    return std::vector<T>(span.begin(), span.end());
  }
  const ffi::Error& error() const { return error_; }

 private:
  template <typename T>
  T Get(std::string_view name) {
    auto value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    if (error_.success()) {
      error_ = ffi::Error::InvalidArgument("jax_cudnn: malformed custom call: attribute '" +
                                           std::string(name) + "': " + value.error().message());
    }
    return T{};
  }

  ffi::Dictionary attributes_;
  ffi::Error error_;
};

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary attributes) {
  return NoThrow([&]() -> ffi::ErrorOr<std::unique_ptr<CallSite>> {
    AttributeReader read(attributes);
    Attributes a;
    a.plan = read.Text("plan");
    a.checksum = read.Number("checksum");
    a.name = read.Text("name");
    a.device_name = read.Text("device_name");
    a.cudnn_version = read.Number("cudnn_version");
    a.bindings = read.Array<int64_t>("bindings");
    a.scalars = read.Array<uint8_t>("scalars");
    a.fills = read.Array<int64_t>("fills");
    a.initial = read.Array<int64_t>("initial");
    a.workspace_bytes = read.Number("workspace_bytes");
    a.plan_workspace_offset = read.Number("plan_workspace_offset");
    if (read.error().failure()) return ffi::Unexpected(read.error());
    return CallSite::Create(std::move(a));
  });
}

// The attributes stay undecoded below: they are the call site's since it was instantiated.
ffi::Error Initialize(CallSite* site, void* stream, int32_t ordinal, ffi::RemainingArgs,
                      ffi::RemainingRets, ffi::Dictionary) {
  return NoThrow([&] { return site->Initialize(ordinal, stream); });
}

ffi::Error TooManyBuffers(const CallSite& site) {
  return Failure(ffi::ErrorCode::kInvalidArgument, "the call has too many operands or results",
                 site.name());
}

template <bool kTimed>
ffi::Error Execute(CallSite* site, void* stream, int32_t ordinal, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary) {
  return NoThrow([&]() -> ffi::Error {
    constexpr size_t kMax = CallSite::kMaxBindings;
    if (args.size() > kMax || rets.size() > kMax + 1) return TooManyBuffers(*site);
    Buffer operands[kMax];
    Buffer results[kMax + 1];
    for (size_t i = 0; i < args.size(); ++i) {
      const auto buffer = args.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) return buffer.error();
      operands[i] = {buffer->untyped_data(), static_cast<int64_t>(buffer->size_bytes())};
    }
    for (size_t i = 0; i < rets.size(); ++i) {
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) return buffer.error();
      results[i] = {(*buffer)->untyped_data(), static_cast<int64_t>((*buffer)->size_bytes())};
    }
    return site->Execute<kTimed>(ordinal, stream, operands, args.size(), results, rets.size());
  });
}

template <ffi::ExecutionStage kStage>
auto BindStage() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<ffi::State<CallSite>>()
      .template Ctx<ffi::PlatformStream<void*>>()
      .template Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .template Attrs<ffi::Dictionary>();
}

// The state's type is registered by whoever asks for the handler's metadata first: XLA does so when
// the target is registered, whichever order Python imports things in.
XLA_FFI_Error* RegisterStateType(XLA_FFI_CallFrame* frame) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (!(CallSite::id == XLA_FFI_UNKNOWN_TYPE_ID)) return nullptr;
  return ffi::Ffi::RegisterTypeId(frame->api, "jax_cudnn_call_site", &CallSite::id,
                                  &CallSite::info);
}

bool AsksForMetadata(const XLA_FFI_CallFrame* frame) {
  return frame->extension_start != nullptr &&
         frame->extension_start->type == XLA_FFI_Extension_Metadata;
}

// Whole calls, XLA's decoding of the call frame included.
XLA_FFI_Error* Timed(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame,
                     std::atomic<int64_t>& total) {
  if (AsksForMetadata(frame)) return handler(frame);
  const auto start = steady_clock::now();
  XLA_FFI_Error* error = handler(frame);
  total += (steady_clock::now() - start).count();
  return error;
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate,
                       ffi::Ffi::BindInstantiate().Attrs<ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize, BindStage<ffi::ExecutionStage::kInitialize>());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute<false>, BindStage<ffi::ExecutionStage::kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kTimedExecute, Execute<true>, BindStage<ffi::ExecutionStage::kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jax_cudnn

JAX_CUDNN_EXPORT XLA_FFI_Error* JaxCudnnInstantiate(XLA_FFI_CallFrame* frame) {
  if (jax_cudnn::AsksForMetadata(frame)) {
    if (XLA_FFI_Error* error = jax_cudnn::RegisterStateType(frame)) return error;
  }
  return jax_cudnn::kInstantiate(frame);
}

JAX_CUDNN_EXPORT XLA_FFI_Error* JaxCudnnInitialize(XLA_FFI_CallFrame* frame) {
  return jax_cudnn::kInitialize(frame);
}

JAX_CUDNN_EXPORT XLA_FFI_Error* JaxCudnnExecute(XLA_FFI_CallFrame* frame) {
  return jax_cudnn::kExecute(frame);
}

JAX_CUDNN_EXPORT XLA_FFI_Error* JaxCudnnTimedInitialize(XLA_FFI_CallFrame* frame) {
  return jax_cudnn::Timed(jax_cudnn::kInitialize, frame, jax_cudnn::timings().initialize_ns);
}

JAX_CUDNN_EXPORT XLA_FFI_Error* JaxCudnnTimedExecute(XLA_FFI_CallFrame* frame) {
  return jax_cudnn::Timed(jax_cudnn::kTimedExecute, frame, jax_cudnn::timings().execute_ns);
}

// Where to load cuDNN from if the process has not loaded one when it is first needed.
JAX_CUDNN_EXPORT void JaxCudnnSetFallbackPath(const char* path) {
  jax_cudnn::SetCudnnFallbackPath(path);
}

// cudnnGetVersion() of the cuDNN that plans will run with; 0 if there is none.
JAX_CUDNN_EXPORT int64_t JaxCudnnLoadedVersion() {
  const auto cudnn = jax_cudnn::FindCudnn();
  return cudnn.has_value() ? (*cudnn)->version : 0;
}

// Its file; "" if there is none.
JAX_CUDNN_EXPORT const char* JaxCudnnLoadedPath() {
  const auto cudnn = jax_cudnn::FindCudnn();
  return cudnn.has_value() ? (*cudnn)->path.c_str() : "";
}

// Nanoseconds in initialize, in execute, in cudnnBackendExecute; executions. Of timed handlers.
JAX_CUDNN_EXPORT void JaxCudnnTimings(int64_t out[4], int reset) {
  jax_cudnn::Timings& t = jax_cudnn::timings();
  std::atomic<int64_t>* all[] = {&t.initialize_ns, &t.execute_ns, &t.cudnn_ns, &t.executions};
  for (auto* value : all) *out++ = reset != 0 ? value->exchange(0) : value->load();
}

// Handles created, plans finalised ever and alive, variant packs built ever and alive, call sites.
JAX_CUDNN_EXPORT void JaxCudnnCounters(int64_t out[6]) {
  jax_cudnn::Counters& c = jax_cudnn::counters();
  std::atomic<int64_t>* all[] = {&c.handles_created, &c.plans_finalized, &c.plans_alive,
                                 &c.packs_built,     &c.packs_alive,     &c.call_sites_alive};
  for (auto* value : all) *out++ = value->load();
}
