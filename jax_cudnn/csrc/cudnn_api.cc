#include "cudnn_api.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace jax_cudnn {
namespace {

constexpr char kCudnnSoname[] = "libcudnn.so.9";
constexpr char kDriverSoname[] = "libcuda.so.1";

// Never destroyed: executables are released late, at interpreter exit too.
struct Libraries {
  std::mutex mutex;
  std::string fallback_path;
  std::atomic<const Cudnn*> cudnn{nullptr};
  std::atomic<const Driver*> driver{nullptr};
};

Libraries& libraries() {
  static auto* libraries = new Libraries;
  return *libraries;
}

// Looks a function up; appends its name to `missing` when the library lacks it.
template <typename Function>
void Resolve(void* library, const char* symbol, Function& function, std::string& missing) {
  void* address = dlsym(library, symbol);
  if (address == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(symbol);
  function = reinterpret_cast<Function>(address);
}

// The real path of the library that holds `address`; dlopen may have followed a soname.
std::string PathOfAddress(const void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "an unknown path";
  char resolved[PATH_MAX];
  return realpath(info.dli_fname, resolved) != nullptr ? resolved : info.dli_fname;
}

// One attempt to open a library; a failed one adds its reason to `tried`.
void* Open(const char* path, int flags, std::string& tried) {
  void* library = dlopen(path, flags | RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  const char* reason = dlerror();
  tried += std::string("\n  ") + path + ": ";
  tried += (flags & RTLD_NOLOAD) != 0 ? "not loaded in this process yet"
           : reason != nullptr        ? reason
                                      : "dlopen gave no reason";
  return nullptr;
}

ffi::Unexpected<ffi::Error> NotFound(const std::string& message) {
  return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kNotFound, "jax_cudnn: " + message));
}

}  // namespace

void SetCudnnFallbackPath(const char* path) {
  std::lock_guard<std::mutex> lock(libraries().mutex);
  libraries().fallback_path = path != nullptr ? path : "";
}

ffi::ErrorOr<const Cudnn*> FindCudnn() {
  Libraries& libs = libraries();
  if (const Cudnn* cudnn = libs.cudnn.load(std::memory_order_acquire)) return cudnn;
  std::lock_guard<std::mutex> lock(libs.mutex);
  if (const Cudnn* cudnn = libs.cudnn.load(std::memory_order_relaxed)) return cudnn;

  std::string tried;
  void* library = Open(kCudnnSoname, RTLD_NOLOAD, tried);
  if (library == nullptr && !libs.fallback_path.empty()) {
    library = Open(libs.fallback_path.c_str(), 0, tried);
  }
  if (library == nullptr) library = Open(kCudnnSoname, 0, tried);
  if (library == nullptr) {
    return NotFound(
        "cuDNN 9 was not found. Install it with JAX: pip install 'jax-cudnn[cuda12]' or "
        "'jax-cudnn[cuda13]'. Tried, in this order:" +
        tried);
  }

  Cudnn api{};
  std::string missing;
  Resolve(library, "cudnnGetVersion", api.get_version, missing);
  Resolve(library, "cudnnGetErrorString", api.get_error_string, missing);
  Resolve(library, "cudnnGetLastErrorString", api.get_last_error_string, missing);
  Resolve(library, "cudnnCreate", api.create, missing);
  Resolve(library, "cudnnSetStream", api.set_stream, missing);
  Resolve(library, "cudnnBackendCreateDescriptor", api.create_descriptor, missing);
  Resolve(library, "cudnnBackendDestroyDescriptor", api.destroy_descriptor, missing);
  Resolve(library, "cudnnBackendSetAttribute", api.set_attribute, missing);
  Resolve(library, "cudnnBackendGetAttribute", api.get_attribute, missing);
  Resolve(library, "cudnnBackendFinalize", api.finalize, missing);
  Resolve(library, "cudnnBackendExecute", api.execute, missing);
  if (!missing.empty())
    return NotFound("the loaded cuDNN lacks " + missing + "; it is not cuDNN 9.");
  std::string later;  // what not every cuDNN 9 has, and only CUDA graphs need
  Resolve(library, "cudnnBackendPopulateCudaGraph", api.populate_cuda_graph, later);
  Resolve(library, "cudnnBackendUpdateCudaGraph", api.update_cuda_graph, later);
  api.version = static_cast<int64_t>(api.get_version());
  api.path = PathOfAddress(reinterpret_cast<const void*>(api.get_version));

  auto* cudnn = new Cudnn(std::move(api));
  libs.cudnn.store(cudnn, std::memory_order_release);
  return cudnn;
}

ffi::ErrorOr<const Driver*> FindDriver() {
  Libraries& libs = libraries();
  if (const Driver* driver = libs.driver.load(std::memory_order_acquire)) return driver;
  std::lock_guard<std::mutex> lock(libs.mutex);
  if (const Driver* driver = libs.driver.load(std::memory_order_relaxed)) return driver;

  std::string tried;
  void* library = Open(kDriverSoname, 0, tried);
  if (library == nullptr) return NotFound("the CUDA driver was not found:" + tried);

  Driver api{};
  std::string missing;
  Resolve(library, "cuGetErrorString", api.get_error_string, missing);
  Resolve(library, "cuStreamGetCtx", api.stream_get_context, missing);
  // cuda.h maps the unversioned names to these; the unversioned symbols are an older ABI.
  Resolve(library, "cuCtxPushCurrent_v2", api.context_push, missing);
  Resolve(library, "cuCtxPopCurrent_v2", api.context_pop, missing);
  Resolve(library, "cuCtxGetDevice", api.context_get_device, missing);
  Resolve(library, "cuDeviceGetName", api.device_get_name, missing);
  Resolve(library, "cuMemsetD8Async", api.memset_d8_async, missing);
  Resolve(library, "cuMemsetD32Async", api.memset_d32_async, missing);
  Resolve(library, "cuGraphGetNodes", api.graph_get_nodes, missing);
  if (!missing.empty()) return NotFound("the loaded CUDA driver lacks " + missing + ".");

  auto* driver = new Driver(api);
  libs.driver.store(driver, std::memory_order_release);
  return driver;
}

std::string VersionText(int64_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

ffi::Error Failure(ffi::ErrorCode code, const std::string& what, std::string_view name) {
  return ffi::Error(code, "jax_cudnn: " + what + " (graph '" + std::string(name) + "')");
}

ffi::Error CudnnFailure(const Cudnn& cudnn, const char* step, Status status, std::string_view name,
                        const char* advice) {
  char last_error[2048] = "";
  cudnn.get_last_error_string(last_error, sizeof(last_error) - 1);
  std::string what = std::string("cuDNN ") + VersionText(cudnn.version) + " failed to " + step +
                     ": " + cudnn.get_error_string(status) + " (" + std::to_string(status) + ")";
  if (last_error[0] != '\0') what += std::string(": ") + last_error;
  what += advice;
  return Failure(ffi::ErrorCode::kInternal, what, name);
}

ffi::Error DriverFailure(const Driver& driver, const char* step, Status status,
                         std::string_view name) {
  const char* text = nullptr;
  driver.get_error_string(status, &text);
  std::string what = std::string("the CUDA driver failed to ") + step + ": " +
                     (text != nullptr ? text : "unknown error") + " (" + std::to_string(status) +
                     ")";
  return Failure(ffi::ErrorCode::kInternal, what, name);
}

}  // namespace jax_cudnn
