// The part of cuDNN's backend C API and of the CUDA driver that runs a finished plan.
//
// Both are found at run time, and declared here by hand, so that one binary serves CUDA 12 and 13
// and compiles with no CUDA toolkit. The numbers below are ABI: cuDNN 9 never changes them.
#ifndef JAX_CUDNN_CSRC_CUDNN_API_H_
#define JAX_CUDNN_CSRC_CUDNN_API_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace jax_cudnn {

namespace ffi = xla::ffi;

using Status = int;        // cudnnStatus_t and CUresult; 0 is success in both
using Stream = void*;      // CUstream
using Context = void*;     // CUcontext
using Handle = void*;      // cudnnHandle_t
using Descriptor = void*;  // cudnnBackendDescriptor_t
using CudaGraph = void*;   // CUgraph

// cudnnBackendDescriptorType_t
inline constexpr int kExecutionPlanDescriptor = 5;
inline constexpr int kVariantPackDescriptor = 16;
// cudnnBackendAttributeName_t
inline constexpr int kExecutionPlanHandle = 400;
inline constexpr int kExecutionPlanWorkspaceSize = 402;
inline constexpr int kExecutionPlanJson = 405;
inline constexpr int kVariantPackUniqueIds = 1000;
inline constexpr int kVariantPackDataPointers = 1001;
inline constexpr int kVariantPackWorkspace = 1003;
// cudnnBackendAttributeType_t
inline constexpr int kTypeHandle = 0;
inline constexpr int kTypeInt64 = 3;
inline constexpr int kTypeVoidPtr = 6;
inline constexpr int kTypeChar = 24;

struct Cudnn {
  size_t (*get_version)();
  const char* (*get_error_string)(Status);
  void (*get_last_error_string)(char* message, size_t max_size);
  Status (*create)(Handle*);
  Status (*set_stream)(Handle, Stream);
  Status (*create_descriptor)(int type, Descriptor*);
  Status (*destroy_descriptor)(Descriptor);
  Status (*set_attribute)(Descriptor, int name, int type, int64_t count, const void* elements);
  Status (*get_attribute)(Descriptor, int name, int type, int64_t capacity, int64_t* count,
                          void* elements);
  Status (*finalize)(Descriptor);
  Status (*execute)(Handle, Descriptor plan, Descriptor variant_pack);
  // Null where this cuDNN 9 has none.
  Status (*populate_cuda_graph)(Handle, Descriptor plan, Descriptor variant_pack, CudaGraph);
  Status (*update_cuda_graph)(Handle, Descriptor plan, Descriptor variant_pack, CudaGraph);

  int64_t version;   // cudnnGetVersion(): 91900 is 9.19.0
  std::string path;  // the file this copy was loaded from
};

struct Driver {
  Status (*get_error_string)(Status, const char**);
  Status (*stream_get_context)(Stream, Context*);
  Status (*context_push)(Context);
  Status (*context_pop)(Context*);
  Status (*context_get_device)(int* device);
  Status (*device_get_name)(char* name, int length, int device);
  Status (*memset_d8_async)(uint64_t address, unsigned char value, size_t count, Stream);
  Status (*memset_d32_async)(uint64_t address, unsigned int value, size_t count, Stream);
  Status (*graph_get_nodes)(CudaGraph, void** nodes, size_t* count);
};

// Where to load cuDNN from when the process has not loaded one yet. A loaded copy always wins:
// two copies in one process do not know of each other's plans.
void SetCudnnFallbackPath(const char* path);

// The process's cuDNN and driver, loaded at the first successful call and kept for ever. Failures
// are not remembered, since the fallback path may be set later.
ffi::ErrorOr<const Cudnn*> FindCudnn();
ffi::ErrorOr<const Driver*> FindDriver();

// "9.19.0" for 91900.
std::string VersionText(int64_t version);

// "jax_cudnn: <what> (graph 'name')", and the same with the library's own words for a status.
// These format strings: only for paths that fail.
ffi::Error Failure(ffi::ErrorCode code, const std::string& what, std::string_view name);
ffi::Error CudnnFailure(const Cudnn& cudnn, const char* step, Status status, std::string_view name,
                        const char* advice = "");
ffi::Error DriverFailure(const Driver& driver, const char* step, Status status,
                         std::string_view name);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CSRC_CUDNN_API_H_
