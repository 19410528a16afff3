#include <dlfcn.h>
#include <stdlib.h>

#include "executor.h"

namespace jax_cudnn {

Api api{};

namespace {

constexpr char kCudnn[] = "libcudnn.so.9";
std::mutex g_mutex;  // of what follows, and of loading
std::string& g_fallback_path = *new std::string;
bool g_has_driver = false;

// One attempt to open a library; a failed one adds its reason to `tried`.
void* Open(const char* path, int flags, std::string& tried) {
  void* library = dlopen(path, flags | RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  const char* reason = dlerror();
  if (flags == RTLD_NOLOAD) reason = "not loaded in this process yet";
  tried += std::string("\n  ") + path + ": " + (reason ? reason : "dlopen gave no reason");
  return nullptr;
}

// Looks a function up; adds its name to `missing` when the library lacks it.
template <typename Function>
void Find(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) missing += std::string(missing.empty() ? "" : ", ") + name;
}
#define JAX_CUDNN_FIND(result, name, parameters) Find(library, #name, api.name, missing);

void LoadCudnn() {
  std::string tried, missing;
  void* library = Open(kCudnn, RTLD_NOLOAD, tried);
  if (!library && !g_fallback_path.empty()) library = Open(g_fallback_path.c_str(), 0, tried);
  if (!library) library = Open(kCudnn, 0, tried);
  if (!library) {
    Fail(ffi::ErrorCode::kNotFound,
         "cuDNN 9 was not found. Install it with JAX: pip install 'jax-cudnn[cuda12]' or "
         "'jax-cudnn[cuda13]'. Tried, in this order:",
         tried);
  }
  JAX_CUDNN_OF_CUDNN(JAX_CUDNN_FIND)
  if (!missing.empty()) {
    Fail(ffi::ErrorCode::kNotFound, "the loaded cuDNN lacks ", missing, "; it is not cuDNN 9.");
  }
  JAX_CUDNN_OF_LATER_CUDNN(JAX_CUDNN_FIND)
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(api.cudnnGetVersion), &info);
  const char* name = info.dli_fname ? info.dli_fname : "an unknown path";
  const char* real = realpath(name, nullptr);  // dlopen may have followed a soname
  api.path = real ? real : name;
  api.version = static_cast<int64_t>(api.cudnnGetVersion());
}

void LoadDriver() {
  std::string tried, missing;
  void* library = Open("libcuda.so.1", 0, tried);
  if (!library) Fail(ffi::ErrorCode::kNotFound, "the CUDA driver was not found:", tried);
  JAX_CUDNN_OF_DRIVER(JAX_CUDNN_FIND)
  if (!missing.empty()) {
    Fail(ffi::ErrorCode::kNotFound, "the loaded CUDA driver lacks ", missing, ".");
  }
  g_has_driver = true;
}

}  // namespace

void SetFallbackPath(const char* path) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_fallback_path = path;
}

void Load(bool driver) {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (api.version == 0) LoadCudnn();
  if (driver && !g_has_driver) LoadDriver();
}

std::string VersionText(int64_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void Check(Status status, const char* step, const char* advice) {
  if (status == 0) return;
  char why[2048] = "";
  api.cudnnGetLastErrorString(why, sizeof(why) - 1);
  Fail(ffi::ErrorCode::kInternal, "cuDNN ", VersionText(api.version), " failed to ", step, ": ",
       api.cudnnGetErrorString(status), " (", status, ")", *why ? ": " : "", why, advice);
}

void CheckDriver(Status status, const char* step) {
  if (status == 0) return;
  const char* text = nullptr;
  api.cuGetErrorString(status, &text);
  Fail(ffi::ErrorCode::kInternal, "the CUDA driver failed to ", step, ": ",
       text ? text : "unknown error", " (", status, ")");
}

Descriptor Finalized(int type, std::initializer_list<BackendAttribute> attributes, const char* step,
                     const char* advice) {
  Descriptor made = nullptr;
  try {
    Check(api.cudnnBackendCreateDescriptor(type, &made), step, advice);
    for (const auto& a : attributes) {
      Check(api.cudnnBackendSetAttribute(made, a.name, a.type, a.count, a.elements), step, advice);
    }
    Check(api.cudnnBackendFinalize(made), step, advice);
  } catch (...) {
    if (made != nullptr) api.cudnnBackendDestroyDescriptor(made);
    throw;
  }
  return made;
}

}  // namespace jax_cudnn
