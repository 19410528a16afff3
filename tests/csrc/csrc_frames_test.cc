// The shared library as XLA calls it: its exported handlers, given call frames by a stand-in for
// XLA's runtime, over the fake cuDNN. Prints what a call costs the host.
//
//   csrc_frames_test path/to/libjax_cudnn.so
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

// What XLA's runtime holds behind its opaque types.
struct XLA_FFI_Error {
  std::string message;
};
struct XLA_FFI_ExecutionContext {
  void* state = nullptr;
  void* stream = reinterpret_cast<void*>(101);
  int32_t ordinal = 1;
};

namespace {

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                     \
    }                                                                                    \
  } while (false)

XLA_FFI_TypeInfo registered_type;

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* a) {
    return new XLA_FFI_Error{a->message};
  };
  api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* a) {
    a->message = a->error->message.c_str();
  };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* a) { delete a->error; };
  api.XLA_FFI_Type_Register = [](XLA_FFI_Type_Register_Args* a) -> XLA_FFI_Error* {
    CHECK(a->type_id->type_id == 0);
    a->type_id->type_id = 42;
    registered_type = *a->type_info;
    return nullptr;
  };
  api.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* a) -> XLA_FFI_Error* {
    CHECK(a->type_id->type_id == 42 && a->stage == XLA_FFI_ExecutionStage_INSTANTIATE);
    a->ctx->state = a->state;
    return nullptr;
  };
  api.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* a) -> XLA_FFI_Error* {
    CHECK(a->type_id->type_id == 42);
    a->state = a->ctx->state;
    return nullptr;
  };
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* a) -> XLA_FFI_Error* {
    a->stream = a->ctx->stream;
    return nullptr;
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* a) -> XLA_FFI_Error* {
    a->device_ordinal = a->ctx->ordinal;
    return nullptr;
  };
  return api;
}

template <typename Function>
Function* Symbol(void* library, const std::string& name) {
  auto* function = reinterpret_cast<Function*>(dlsym(library, name.c_str()));
  if (function == nullptr) std::fprintf(stderr, "no %s\n", name.c_str());
  CHECK(function != nullptr);
  return function;
}

struct Frame {
  Frame(const XLA_FFI_Api& api, XLA_FFI_ExecutionContext& context, XLA_FFI_ExecutionStage stage) {
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.ctx = &context;
    frame.stage = stage;
  }
  void Run(XLA_FFI_Handler* handler) {
    XLA_FFI_Error* error = handler(&frame);
    if (error != nullptr) std::fprintf(stderr, "%s\n", error->message.c_str());
    CHECK(error == nullptr);
  }
  XLA_FFI_CallFrame frame{};
};

XLA_FFI_Metadata MetadataOf(const XLA_FFI_Api& api, XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_ExecutionContext context;
  Frame query(api, context, XLA_FFI_ExecutionStage_EXECUTE);
  query.frame.extension_start = &extension.extension_base;
  query.Run(handler);
  return metadata;
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::fprintf(stderr, "%s\n", dlerror());
  CHECK(library != nullptr);
  auto handler = [&](const char* stage) {
    return Symbol<XLA_FFI_Handler>(library, std::string("JaxCudnn") + stage);
  };

  const XLA_FFI_Api api = MakeApi();
  CHECK(MetadataOf(api, handler("Instantiate")).state_type_id.type_id == 42);
  CHECK(MetadataOf(api, handler("Instantiate")).state_type_id.type_id == 42);
  CHECK(MetadataOf(api, handler("Execute")).traits ==
        XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);

  // Attributes, sorted by name as XLA does.
  int64_t rows[] = {91900, 64, 16, 0,  1, 0, 0, 32, 2,  1, 0, 32, 3, 0, 1, 32,
                    4,     0,  2,  32, 5, 0, 3, 32, -1, 2, 0, 8,  5, 5, 5, 8};
  int64_t checksum = 797276495;  // zlib's crc32 of the others
  XLA_FFI_Array rows_array{XLA_FFI_DataType_S64, 32, rows};
  XLA_FFI_Scalar checksum_scalar{XLA_FFI_DataType_S64, &checksum};
  XLA_FFI_ByteSpan device{"Fake GPU", 8}, name{"graph", 5}, plan{"copy 32", 7};
  std::vector<std::string> keys = {"checksum", "device_name", "name", "plan", "rows"};
  XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_STRING,
                              XLA_FFI_AttrType_STRING, XLA_FFI_AttrType_STRING,
                              XLA_FFI_AttrType_ARRAY};
  void* values[] = {&checksum_scalar, &device, &name, &plan, &rows_array};
  std::vector<XLA_FFI_ByteSpan> spans;
  for (const std::string& key : keys) spans.push_back({key.data(), key.size()});
  std::vector<XLA_FFI_ByteSpan*> names;
  for (XLA_FFI_ByteSpan& span : spans) names.push_back(&span);

  XLA_FFI_ExecutionContext context;
  Frame instantiate(api, context, XLA_FFI_ExecutionStage_INSTANTIATE);
  instantiate.frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 5, types, names.data(), values};
  instantiate.Run(handler("Instantiate"));
  CHECK(context.state != nullptr);

  Frame initialize(api, context, XLA_FFI_ExecutionStage_INITIALIZE);
  initialize.frame.attrs = instantiate.frame.attrs;
  Frame execute(api, context, XLA_FFI_ExecutionStage_EXECUTE);
  execute.frame.attrs = instantiate.frame.attrs;
  alignas(16) char memory[5][32] = {}, workspace[64] = {};
  int64_t shape[] = {2, 4}, workspace_shape[] = {64};
  std::vector<XLA_FFI_Buffer> buffers;
  for (auto& data : memory) {
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, data, 2, shape});
  }
  buffers.push_back(
      {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_U8, workspace, 1, workspace_shape});
  XLA_FFI_ArgType arg_types[4];
  XLA_FFI_RetType ret_types[2];
  for (auto& type : arg_types) type = XLA_FFI_ArgType_BUFFER;
  for (auto& type : ret_types) type = XLA_FFI_RetType_BUFFER;
  void* args[] = {&buffers[0], &buffers[1], &buffers[2], &buffers[3]};
  void* rets[] = {&buffers[4], &buffers[5]};
  execute.frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, 4, arg_types, args};
  execute.frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 2, ret_types, rets};

  constexpr int kRounds = 200000;
  XLA_FFI_Handler* initialize_handler = handler("Initialize");
  XLA_FFI_Handler* execute_handler = handler("Execute");
  int64_t counts[9];
  auto* const count = Symbol<void(int64_t*, int)>(library, "JaxCudnnCounts");
  for (const bool timed : {false, true}) {
    count(counts, timed);
    CHECK(counts[6] == 0 && counts[7] == 0 && counts[8] == 0);
    memory[0][0] = 3;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kRounds; ++i) {
      initialize.Run(initialize_handler);
      execute.Run(execute_handler);
    }
    const std::chrono::nanoseconds elapsed = std::chrono::steady_clock::now() - start;
    CHECK(memory[4][0] == 3 && workspace[0] == 5 && workspace[4] == 5);
    std::printf("%s initialize + execute: %.0f ns\n", timed ? "timed" : "plain",
                static_cast<double>(elapsed.count()) / kRounds);
  }
  count(counts, 0);
  CHECK(counts[6] > 0 && counts[7] > counts[8] && counts[8] > 0);
  registered_type.deleter(context.state);
  count(counts, 0);
  const int64_t expected[] = {1, 1, 0, 1, 0, 0};
  for (int i = 0; i < 6; ++i) CHECK(counts[i] == expected[i]);
  const std::string path = Symbol<const char*()>(library, "JaxCudnnLoadedPath")();
  CHECK(path.find("/libcudnn.so") != path.npos);
  return 0;
}
