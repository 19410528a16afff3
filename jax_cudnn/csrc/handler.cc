// What XLA and Python see: the stages of the custom call "jax_cudnn", and a few C functions.
// XLA instantiates a call site once per executable, initializes it before every execution (not
// under stream capture) and executes it (perhaps under capture).
#include "executor.h"

namespace jax_cudnn {
ffi::TypeId CallSite::id = {};  // unknown until JaxCudnnInstantiate registers it
ffi::TypeInfo CallSite::info = ffi::MakeTypeInfo<CallSite>();

namespace {

// Nothing may be thrown into XLA or Python: it becomes an error that names the graph.
template <typename Function>
ffi::Error Guarded(std::string_view graph, Function function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (const std::exception& e) {
    return {ffi::ErrorCode::kFailedPrecondition,
            std::string("jax_cudnn: ") + e.what() + " (graph '" + std::string(graph) + "')"};
  }
}

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(std::string_view device_name,
                                                    std::string_view name, std::string_view plan,
                                                    ffi::Span<const int64_t> rows,
                                                    int64_t checksum) {
  std::unique_ptr<CallSite> site;
  ffi::Error error = Guarded(
      name, [&] { site = std::make_unique<CallSite>(device_name, name, plan, rows, checksum); });
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
    constexpr size_t kMax = CallSite::kMaxRows;
    Expect(args.size() <= kMax && rets.size() <= kMax, "it has too many operands or results");
    Buffer operands[kMax], results[kMax];
    for (size_t i = 0; i < args.size(); ++i) {
      const auto buffer = args.get<ffi::AnyBuffer>(i);
      Expect(buffer.has_value(), "operand ", i, " is not a buffer");
      operands[i] = {buffer->untyped_data(), static_cast<int64_t>(buffer->size_bytes())};
    }
    for (size_t i = 0; i < rets.size(); ++i) {
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      Expect(buffer.has_value(), "result ", i, " is not a buffer");
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
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::string_view>("device_name")
                           .Attr<std::string_view>("name")
                           .Attr<std::string_view>("plan")
                           .Attr<ffi::Span<const int64_t>>("rows")
                           .Attr<int64_t>("checksum"));
XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize, BindStage<ffi::ExecutionStage::kInitialize>());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, BindStage<ffi::ExecutionStage::kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});

// An error's message for Python, until this thread's next; null without an error.
const char* Message(const ffi::Error& error) {
  thread_local std::string message;
  message = error.message();
  return error.failure() ? message.c_str() : nullptr;
}

}  // namespace

JAX_CUDNN_EXPORT XLA_FFI_Error* JaxCudnnInstantiate(XLA_FFI_CallFrame* frame) {
  // Whoever asks for the handler's metadata first registers the state's type: XLA asks when the
  // target is registered, whichever order Python imports things in.
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (CallSite::id == XLA_FFI_UNKNOWN_TYPE_ID) {
      constexpr char kName[] = "jax_cudnn_call_site";
      auto* error = ffi::Ffi::RegisterTypeId(frame->api, kName, &CallSite::id, &CallSite::info);
      if (error != nullptr) return error;
    }
  }
  return kInstantiate(frame);
}

JAX_CUDNN_EXPORT XLA_FFI_Error* JaxCudnnInitialize(XLA_FFI_CallFrame* frame) {
  const Timer timer{counts[kInitializeNs]};  // with XLA's decoding of the call frame
  return kInitialize(frame);
}

JAX_CUDNN_EXPORT XLA_FFI_Error* JaxCudnnExecute(XLA_FFI_CallFrame* frame) {
  const Timer timer{counts[kExecuteNs]};
  return kExecute(frame);
}

// The file of the cuDNN that plans will run with; "" if there is none.
JAX_CUDNN_EXPORT const char* JaxCudnnLoadedPath() {
  return Guarded("", [] { Load(false); }).success() ? api.path : "";
}

// What executor.h counts, and whether it counts times from now on.
JAX_CUDNN_EXPORT void JaxCudnnCounts(int64_t out[kCounts], int time) {
  for (const auto& count : counts) *out++ = count;
  timed = time != 0;
}

// For CUDA graphs without XLA: a call site, which is never destroyed, because graphs go on using
// its kernels. Both functions return a message, or null.
JAX_CUDNN_EXPORT const char* JaxCudnnNewCallSite(const char* device_name, const char* name,
                                                 const char* plan, const int64_t* rows,
                                                 size_t count, int64_t checksum, CallSite** site) {
  return Message(Guarded(
      name, [&] { *site = new CallSite(device_name, name, plan, {rows, count}, checksum); }));
}

// Populates or updates a CUDA graph with a call's kernels; the buffers are operands, then results.
JAX_CUDNN_EXPORT const char* JaxCudnnRecord(CallSite* site, int32_t ordinal, void* stream,
                                            const Buffer* buffers, size_t operands, size_t results,
                                            void* graph, int update) {
  return Message(Guarded(site->name(), [&] {
    Expect(graph != nullptr, "the CUDA graph is null");
    site->Initialize(ordinal, stream);
    site->Execute(ordinal, stream, {buffers, operands}, {buffers + operands, results}, graph,
                  update != 0);
  }));
}

}  // namespace jax_cudnn
