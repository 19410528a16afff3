#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "plan.h"

namespace jax_cudnn {
namespace {

// What follows `field` within an object, up to the end of the text; "" where it has none.
const char* After(std::string_view object, std::string_view field) {
  const size_t at = object.find(field);
  return at == object.npos ? "" : object.data() + at + field.size();
}

bool StartsWith(const char* text, const char* what) {
  return std::strncmp(text, what, std::strlen(what)) == 0;
}

constexpr double kFar = 1e15;  // bytes that no memory has

// The least that a tensor takes: booleans may be bits. Neither the parts of a packed tensor nor
// reordered elements lie where its dimensions and strides lead.
double Bytes(std::string_view object) {
  static constexpr struct {
    const char* name;
    int bits;
  } kTypes[] = {{"FLOAT\"", 32},  {"HALF\"", 16}, {"BFLOAT16\"", 16}, {"DOUBLE\"", 64},
                {"INT8\"", 8},    {"UINT8\"", 8}, {"INT32\"", 32},    {"INT64\"", 64},
                {"BOOLEAN\"", 1}, {"FP8_", 8}};
  const bool regular =
      StartsWith(After(object, "\"reordering\":\"CUDNN_TENSOR_REORDERING_"), "NONE");
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
  const char* const name = After(object, "\"dataType\":\"CUDNN_DATA_");
  for (const auto& type : kTypes) {
    if (StartsWith(name, type.name)) return (last + 1) * type.bits / 8;
  }
  return 0;
}

}  // namespace

std::vector<PlanTensor> TensorsOf(const std::string& text) {
  constexpr std::string_view kTensor = "{\"name\":\"";
  std::vector<PlanTensor> tensors;
  for (size_t at = text.find(kTensor); at != text.npos; at = text.find(kTensor, at + 1)) {
    const auto object = std::string_view(text).substr(at, text.find('}', at) - at);
    if (!StartsWith(After(object, "\"isVirtual\":"), "false")) continue;
    tensors.push_back({std::strtoll(object.data() + kTensor.size(), nullptr, 10),
                       StartsWith(After(object, "\"isByValue\":"), "true"), Bytes(object)});
  }
  return tensors;
}

}  // namespace jax_cudnn
