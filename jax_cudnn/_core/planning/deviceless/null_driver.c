/* The null driver: a libcuda.so.1 for machines that have none.
 *
 * cuDNN's runtime-compiled engines link libcuda.so.1 (CUDA 12 builds) or look its functions up by
 * name (CUDA 13 builds), and some of them refuse to plan while a name is missing. Planning itself
 * needs no driver: it runs on a description of the GPU (see profiles.py). So this library has the
 * names, and it tells the truth: there is no device. Every call that would touch one answers
 * CUDA_ERROR_NO_DEVICE; nothing is ever loaded, linked or launched.
 *
 * cuDeviceGetCount must answer 0. With 1, cuDNN tries out each compiled kernel on that "device":
 * the CUDA runtime inside cuDNN then rightly refuses to start, and the norm engines are lost.
 *
 * This library must never enter a process that may use a GPU: once anything with the SONAME
 * libcuda.so.1 is loaded, it is what every later dlopen of that name gets. worker.py loads it,
 * in a process of its own.
 *
 * The names: `nm -D --undefined-only` and LD_DEBUG=symbols on cuDNN 9.19 (CUDA 13) and 9.28
 * (CUDA 12), frontends 1.28 and 1.32. The CUDA runtime inside cuDNN also looks up every driver
 * function there is, and takes their absence and cuInit's answer as "no GPU".
 */
#include <stddef.h>
#include <stdint.h>

/* Arguments are named to document the prototypes; hardly one is used. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

#define DRIVER __attribute__((visibility("default"))) CUresult
#define NO_DEVICE(name, parameters) \
  DRIVER name parameters { return CUDA_ERROR_NO_DEVICE; }

typedef enum { CUDA_SUCCESS = 0, CUDA_ERROR_NO_DEVICE = 100 } CUresult;
typedef int CUdevice;
typedef struct context* CUcontext;
typedef struct green_context* CUgreenCtx;
typedef struct stream* CUstream;
typedef struct module* CUmodule;
typedef struct function* CUfunction;
typedef struct library* CUlibrary;
typedef struct kernel* CUkernel;
typedef struct link_state* CUlinkState;
typedef struct tensor_map CUtensorMap;
typedef struct launch_config CUlaunchConfig;
typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef int enumeration; /* one of CUDA's enums: an int in its ABI */

/* Start-up, and errors in words. JAX's CUDA plugin asks cuInit, too, and so finds no GPU. */
NO_DEVICE(cuInit, (unsigned flags))

DRIVER cuDriverGetVersion(int* version) {
  *version = 13000; /* the version in the profiles; the plans do not depend on it */
  return CUDA_SUCCESS;
}

DRIVER cuGetErrorName(CUresult error, const char** text) {
  *text = error == CUDA_SUCCESS ? "CUDA_SUCCESS" : "CUDA_ERROR_NO_DEVICE";
  return CUDA_SUCCESS;
}

DRIVER cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_SUCCESS ? "no error" : "no GPU: this is jax_cudnn's null driver";
  return CUDA_SUCCESS;
}

/* Devices, contexts and streams: asked for before a compiled kernel is tried out. */
DRIVER cuDeviceGetCount(int* count) {
  *count = 0;
  return CUDA_SUCCESS;
}

NO_DEVICE(cuDeviceGet, (CUdevice * device, int ordinal))
NO_DEVICE(cuCtxGetCurrent, (CUcontext * context))
NO_DEVICE(cuCtxPushCurrent, (CUcontext context))
NO_DEVICE(cuCtxPopCurrent, (CUcontext * context))
NO_DEVICE(cuCtxGetLimit, (size_t* value, enumeration limit))
NO_DEVICE(cuStreamGetCtx, (CUstream stream, CUcontext* context))
NO_DEVICE(cuStreamGetGreenCtx, (CUstream stream, CUgreenCtx* context)) /* cuDNN 9.28 */

/* Linking of compiled code: looked up with the rest of the table. */
NO_DEVICE(cuLinkCreate, (unsigned count, enumeration* options, void** values, CUlinkState* state))
NO_DEVICE(cuLinkAddData, (CUlinkState state, enumeration type, void* data, size_t size,
                          const char* name, unsigned count, enumeration* options, void** values))
NO_DEVICE(cuLinkComplete, (CUlinkState state, void** cubin, size_t* size))
NO_DEVICE(cuLinkDestroy, (CUlinkState state))

/* Compiled kernels, as modules (hard link dependencies of cuDNN for CUDA 12) and as libraries. */
NO_DEVICE(cuModuleLoadData, (CUmodule * module, const void* image))
NO_DEVICE(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name))
NO_DEVICE(cuModuleUnload, (CUmodule module))
NO_DEVICE(cuLibraryLoadData,
          (CUlibrary * library, const void* code, enumeration* jit_options, void** jit_values,
           unsigned jit_count, enumeration* options, void** values, unsigned count))
NO_DEVICE(cuLibraryLoadFromFile,
          (CUlibrary * library, const char* file, enumeration* jit_options, void** jit_values,
           unsigned jit_count, enumeration* options, void** values, unsigned count))
NO_DEVICE(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char* name))
NO_DEVICE(cuLibraryUnload, (CUlibrary library))

/* Properties of a loaded kernel, and how many clusters of it the device holds. */
NO_DEVICE(cuKernelGetFunction, (CUfunction * function, CUkernel kernel))
NO_DEVICE(cuKernelGetAttribute,
          (int* value, enumeration attribute, CUkernel kernel, CUdevice device))
NO_DEVICE(cuKernelSetAttribute,
          (enumeration attribute, int value, CUkernel kernel, CUdevice device))
NO_DEVICE(cuFuncGetAttribute, (int* value, enumeration attribute, CUfunction function))
NO_DEVICE(cuOccupancyMaxPotentialClusterSize,
          (int* size, CUfunction function, const CUlaunchConfig* config))
NO_DEVICE(cuOccupancyMaxActiveClusters,
          (int* count, CUfunction function, const CUlaunchConfig* config))

/* Launches, and the tensor maps that kernels take as parameters: used at execution only. */
NO_DEVICE(cuLaunchKernel, (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                           unsigned block_x, unsigned block_y, unsigned block_z,
                           unsigned shared_bytes, CUstream stream, void** parameters, void** extra))
NO_DEVICE(cuLaunchKernelEx,
          (const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra))
NO_DEVICE(cuLaunchCooperativeKernel,
          (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
           unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,
           void** parameters))
NO_DEVICE(cuTensorMapEncodeTiled,
          (CUtensorMap * map, enumeration type, cuuint32_t rank, void* address,
           const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
           const cuuint32_t* element_strides, enumeration interleave, enumeration swizzle,
           enumeration promotion, enumeration fill))
NO_DEVICE(cuTensorMapEncodeIm2col,
          (CUtensorMap * map, enumeration type, cuuint32_t rank, void* address,
           const cuuint64_t* dims, const cuuint64_t* strides, const int* lower, const int* upper,
           cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* element_strides,
           enumeration interleave, enumeration swizzle, enumeration promotion, enumeration fill))
