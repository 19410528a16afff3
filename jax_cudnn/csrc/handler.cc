// What XLA and Python see: the stages of the custom call "jax_cudnn", and a few C functions.
//
// XLA instantiates a call site once per executable (attributes only), initializes it before every
// execution (outside of stream capture) and executes it (perhaps under capture).
#include <chrono>
#include <exception>
#include <string_view>
#include <type_traits>

#include "executor.h"

#define JAX_CUDNN_EXPORT extern "C" __attribute__((visibility("default")))

namespace jax_cudnn {

ffi::TypeId CallSite::id = {};  // unknown until JaxCudnnInstantiate registers it
ffi::TypeInfo CallSite::info = ffi::MakeTypeInfo<CallSite>();

namespace {

using std::chrono::steady_clock;

// Nothing may be thrown into XLA or Python: it becomes an error that names the graph.
template <typename Function>
ffi::Error Guarded(const std::string& graph, Function function) {
  const auto message = [&](const std::string& what) {
    return "jax_cudnn: " + what + " (graph '" + graph + "')";
  };
  try {
    function();
    return ffi::Error::Success();
  } catch (const ffi::Error& error) {
    return {*error.errc(), message(error.message())};
  } catch (const std::exception& error) {  // memory may run out
    return ffi::Error::Internal(message(error.what()));
  }
}

template <typename T>
void Read(ffi::Dictionary from, Attributes& to, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto value = from.get<T>(name);
    if (!value.has_value()) {
      Fail(ffi::ErrorCode::kInvalidArgument, "malformed custom call: attribute '", name,
           "': ", value.error().message());
    }
    if constexpr (std::is_arithmetic_v<T>) {
      to[name].assign(reinterpret_cast<const char*>(&*value), sizeof(T));
    } else {
      to[name].assign(reinterpret_cast<const char*>(value->begin()),
                      reinterpret_cast<const char*>(value->end()));
    }
  }
}

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary given) {
  std::unique_ptr<CallSite> site;
  Attributes attributes;
  ffi::Error error = Guarded(attributes["name"], [&] {
    Read<std::string_view>(given, attributes, {"name", "plan", "device_name"});
    Read<int64_t>(given, attributes, {"checksum", "cudnn_version", "workspace_bytes"});
    Read<int64_t>(given, attributes, {"plan_workspace_offset"});
    Read<ffi::Span<const int64_t>>(given, attributes, {"bindings", "memsets"});
    site = std::make_unique<CallSite>(attributes);
  });
  if (error.failure()) return ffi::Unexpected(std::move(error));
  return site;
}

// The attributes stay undecoded below: they are the call site's since it was instantiated.
ffi::Error Initialize(CallSite* site, void* stream, int32_t ordinal, ffi::RemainingArgs,
                      ffi::RemainingRets, ffi::Dictionary) {
  return Guarded(site->name(), [&] { site->Initialize(ordinal, stream); });
}

ffi::Error Execute(CallSite* site, void* stream, int32_t ordinal, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary) {
  return Guarded(site->name(), [&] {
    constexpr size_t kMax = CallSite::kMaxBindings;
    if (args.size() > kMax || rets.size() > kMax + 1) {
      Fail(ffi::ErrorCode::kInvalidArgument, "the call has too many operands or results");
    }
    Buffer operands[kMax], results[kMax + 1];
    for (size_t i = 0; i < args.size(); ++i) {
      const auto buffer = args.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) throw buffer.error();
      operands[i] = {buffer->untyped_data(), static_cast<int64_t>(buffer->size_bytes())};
    }
    for (size_t i = 0; i < rets.size(); ++i) {
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) throw buffer.error();
      results[i] = {(*buffer)->untyped_data(), static_cast<int64_t>((*buffer)->size_bytes())};
    }
    site->Execute(ordinal, stream, {operands, args.size()}, {results, rets.size()});
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

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate,
                       ffi::Ffi::BindInstantiate().Attrs<ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize, BindStage<ffi::ExecutionStage::kInitialize>());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, BindStage<ffi::ExecutionStage::kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});

// Whole calls, XLA's decoding of the call frame included.
XLA_FFI_Error* Timed(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame,
                     std::atomic<int64_t>& total) {
  if (!timed.load(std::memory_order_relaxed)) return handler(frame);
  const auto start = steady_clock::now();
  XLA_FFI_Error* error = handler(frame);
  total += (steady_clock::now() - start).count();
  return error;
}

// An error's message for Python, until this thread's next; null without an error.
const char* Message(const ffi::Error& error) {
  thread_local std::string message;
  message = error.message();
  return error.failure() ? message.c_str() : nullptr;
}

}  // namespace
}  // namespace jax_cudnn

JAX_CUDNN_EXPORT XLA_FFI_Error* JaxCudnnInstantiate(XLA_FFI_CallFrame* frame) {
  using namespace jax_cudnn;
  // Whoever asks for the handler's metadata first registers the state's type: XLA asks when the
  // target is registered, whichever order Python imports things in.
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (CallSite::id == XLA_FFI_UNKNOWN_TYPE_ID) {
      XLA_FFI_Error* error = ffi::Ffi::RegisterTypeId(frame->api, "jax_cudnn_call_site",
                                                      &CallSite::id, &CallSite::info);
      if (error != nullptr) return error;
    }
  }
  return kInstantiate(frame);
}

JAX_CUDNN_EXPORT XLA_FFI_Error* JaxCudnnInitialize(XLA_FFI_CallFrame* frame) {
  return jax_cudnn::Timed(jax_cudnn::kInitialize, frame, jax_cudnn::counts.initialize_ns);
}

JAX_CUDNN_EXPORT XLA_FFI_Error* JaxCudnnExecute(XLA_FFI_CallFrame* frame) {
  return jax_cudnn::Timed(jax_cudnn::kExecute, frame, jax_cudnn::counts.execute_ns);
}

// Where to load cuDNN from if the process has not loaded one when it is first needed.
JAX_CUDNN_EXPORT void JaxCudnnSetFallbackPath(const char* path) {
  jax_cudnn::SetFallbackPath(path);
}

// The file of the cuDNN that plans will run with; "" if there is none.
JAX_CUDNN_EXPORT const char* JaxCudnnLoadedPath() {
  return jax_cudnn::Guarded("", [] { jax_cudnn::Load(false); }).success() ? jax_cudnn::api.path
                                                                          : "";
}

// What is counted, in the order of Counts, and whether times are from now on.
JAX_CUDNN_EXPORT void JaxCudnnCounts(int64_t out[10], int timed) {
  auto& c = jax_cudnn::counts;
  for (const auto* count :
       {&c.handles_created, &c.plans_finalized, &c.plans_alive, &c.packs_built, &c.packs_alive,
        &c.call_sites_alive, &c.initialize_ns, &c.execute_ns, &c.cudnn_ns, &c.executions}) {
    *out++ = *count;
  }
  jax_cudnn::timed = timed != 0;
}

// For CUDA graphs without XLA: a call site, which is never destroyed, because graphs go on using
// its kernels. The attributes are given as names, bytes, and their numbers. Both functions return a
// message, or null.
JAX_CUDNN_EXPORT const char* JaxCudnnNewCallSite(int64_t count, const char* const* names,
                                                 const char* const* data, const int64_t* sizes,
                                                 jax_cudnn::CallSite** site) {
  jax_cudnn::Attributes attributes;
  return jax_cudnn::Message(jax_cudnn::Guarded(attributes["name"], [&] {
    for (int64_t i = 0; i < count; ++i) attributes[names[i]].assign(data[i], data[i] + sizes[i]);
    *site = new jax_cudnn::CallSite(attributes);
  }));
}

// Populates or updates a CUDA graph with a call's kernels; the buffers are operands, then results.
JAX_CUDNN_EXPORT const char* JaxCudnnRecord(jax_cudnn::CallSite* site, int32_t ordinal,
                                            void* stream, const jax_cudnn::Buffer* buffers,
                                            size_t operands, size_t results, void* graph,
                                            int update) {
  return jax_cudnn::Message(jax_cudnn::Guarded(site->name(), [&] {
    const jax_cudnn::Recording into{graph, update != 0};
    site->Initialize(ordinal, stream);
    site->Execute(ordinal, stream, {buffers, operands}, {buffers + operands, results}, &into);
  }));
}
