// The executor against a fake cuDNN and driver: no GPU, no XLA. Each case is a name on the command
// line, run in a process of its own, since closing and forking cannot be undone.
#include <sys/wait.h>
#include <unistd.h>

#include <clocale>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "executor.h"
#include "fake_cudnn/fake_graph.h"

namespace jax_cudnn {
extern "C" {  // of handler.cc
const char* JaxCudnnNewCallSite(const char* device_name, const char* name, const char* plan,
                                const int64_t* rows, size_t count, int64_t checksum,
                                CallSite** site);
const char* JaxCudnnRecord(CallSite* site, int32_t ordinal, void* stream, const Buffer* buffers,
                           size_t operands, size_t results, void* graph, int update);
}

namespace {

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                     \
    }                                                                                    \
  } while (false)

void CheckFails(const ffi::Error& error, const std::vector<std::string>& words) {
  CHECK(error.failure());
  for (const std::string& word : words) {
    if (error.message().find(word) != std::string::npos) continue;
    std::fprintf(stderr, "'%s' is not in: %s\n", word.c_str(), error.message().c_str());
    std::_Exit(1);
  }
}

// What is thrown, as an error.
template <typename Function>
ffi::Error Caught(Function function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

void CheckSucceeds(const ffi::Error& error) {
  if (error.failure()) std::fprintf(stderr, "%s\n", error.message().c_str());
  CHECK(error.success());
}

Stream StreamOf(int device, int number = 1) {
  return reinterpret_cast<Stream>(static_cast<uintptr_t>(device * 100 + number));
}

constexpr int64_t kBytes = 32;

// The attributes of a call.
struct Given {
  std::string plan, name, device_name;
  int64_t cudnn_version, workspace_bytes, plan_workspace_offset;
  std::vector<int64_t> rows;

  std::vector<int64_t> Rows() const {
    std::vector<int64_t> all{cudnn_version, workspace_bytes, plan_workspace_offset, 0};
    all.insert(all.end(), rows.begin(), rows.end());
    return all;
  }
  int64_t Checksum() const {
    const std::vector<int64_t> all = Rows();
    const std::string_view bytes(reinterpret_cast<const char*>(all.data()), all.size() * 8);
    return CallSite::Checksum({device_name, name, plan, bytes});
  }
  std::unique_ptr<CallSite> Make() const {
    return std::make_unique<CallSite>(device_name, name, plan, Rows(), Checksum());
  }
};

// Copies operand 0 to result 0; memsets write the first 8 bytes of the workspace. Plans with
// another `comment` are not the same.
Given Copy(const std::string& comment = "") {
  Given a;
  a.plan = "copy 32, needs 48" + comment;
  a.name = "my_graph";
  a.device_name = "Fake GPU";
  a.cudnn_version = 91900;
  a.rows = {1, 0, 0, kBytes, 2, 1, 0,          kBytes, 3, 3, 0x0707070707070707, -7, -1, 2,
            0, 8, 0, 5,      3, 8, 0x01020304, 5,      3, 8};
  a.workspace_bytes = 64;
  a.plan_workspace_offset = 16;
  return a;
}

// Without its memsets, and without the row of the workspace that they need.
Given Bare(const std::string& comment = "") {
  Given a = Copy(comment);
  a.rows.resize(12);
  return a;
}

ffi::Error Refused(const Given& given) {
  return Caught([&] { given.Make(); });
}

// A call site whose errors are returned.
class Site {
 public:
  explicit Site(const Given& given) {
    CheckSucceeds(Caught([&] { site_ = given.Make(); }));
  }
  ffi::Error Initialize(int32_t ordinal, Stream stream) {
    return Caught([&] { site_->Initialize(ordinal, stream); });
  }
  ffi::Error Execute(int32_t ordinal, Stream stream, Buffers operands, Buffers results,
                     CudaGraph graph = nullptr, bool update = false) {
    return Caught([&] { site_->Execute(ordinal, stream, operands, results, graph, update); });
  }

 private:
  std::unique_ptr<CallSite> site_;
};

std::unique_ptr<Site> Make(const Given& given) { return std::make_unique<Site>(given); }

struct Arrays {
  explicit Arrays(char seed) {
    for (int i = 0; i < kBytes; ++i) in[i] = static_cast<char>(seed + i);
  }
  // The fake cuDNN adds the first byte of the plan's workspace, 5.
  ffi::Error Run(Site& site, int device, Stream stream, CudaGraph graph = nullptr,
                 bool update = false) {
    workspace[16] = 5;
    const Buffer operands[] = {{in, kBytes}};
    const Buffer results[] = {{out, kBytes}, {workspace, 64}};
    return site.Execute(device, stream, {operands, 1}, {results, 2}, graph, update);
  }
  bool Right() const {
    return out[0] == in[0] + 5 && std::memcmp(in + 1, out + 1, kBytes - 1) == 0;
  }
  alignas(16) char in[kBytes], out[kBytes] = {};
  alignas(16) char workspace[64] = {};
};

void TestPacksAreReused() {
  timed = true;
  auto site = Make(Copy());
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  std::vector<Arrays> arrays(4, Arrays(1));
  for (int round = 0; round < 100; ++round) {
    for (Arrays& a : arrays) CheckSucceeds(a.Run(*site, 1, StreamOf(1, 1 + round % 2)));
  }
  for (Arrays& a : arrays) CHECK(a.Right());
  for (const Arrays& a : arrays) CHECK(a.workspace[0] == 4 && a.workspace[7] == 1);
  CHECK(counts[kPacksMade] == 4 && counts[kPacksAlive] == 4);
  Arrays fifth(9);
  CheckSucceeds(fifth.Run(*site, 1, StreamOf(1)));
  CHECK(fifth.Right() && counts[kPacksMade] == 5 && counts[kPacksAlive] == 4);
  CHECK(counts[kCudnnNs] > 0 && counts[kExecuteNs] == 0);
  site.reset();
  CHECK(counts[kPacksAlive] == 0 && counts[kCallSitesAlive] == 0);

  // Pointers that differ in one place alone, the first or the last, are another pack's.
  site = Make(Bare());
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  Arrays to(0), from[] = {Arrays(10), Arrays(50)};
  alignas(16) char other[64] = {};
  for (int round = 0; round < 2; ++round) {
    for (const Arrays& source : from) {
      for (char* workspace : {to.workspace, other}) {
        const Buffer operand{const_cast<char*>(source.in), kBytes};
        const Buffer results[] = {{to.out, kBytes}, {workspace, 64}};
        workspace[16] = 5;
        CheckSucceeds(site->Execute(1, StreamOf(1), {&operand, 1}, {results, 2}));
        CHECK(to.out[1] == source.in[1] && to.out[0] == source.in[0] + 5);
      }
    }
  }
  CHECK(counts[kPacksAlive] == 4);
}

void TestPlansAreSharedAndReleased() {
  for (int round = 0; round < 50; ++round) {
    auto first = Make(Copy()), second = Make(Copy()), other = Make(Copy("other"));
    for (int device : {1, 2}) {
      for (Site* site : {first.get(), second.get(), other.get()}) {
        for (int again = 0; again < 3; ++again)
          CheckSucceeds(site->Initialize(device, StreamOf(device)));
        Arrays a(1);
        CheckSucceeds(a.Run(*site, device, StreamOf(device)));
        CHECK(a.Right());
      }
    }
    CHECK(counts[kPlansAlive] == 4);  // two texts on two devices
    first.reset();
    CHECK(counts[kPlansAlive] == 4);
  }
  CHECK(counts[kPlansMade] == 200 && counts[kPlansAlive] == 0);
  CHECK(counts[kHandlesMade] == 2);
}

void TestThreads() {
  timed = true;
  auto site = Make(Copy()), twin = Make(Copy());
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      Arrays a(static_cast<char>(t)), b(static_cast<char>(t + 1));
      for (int i = 0; i < 1000; ++i) {
        Site& which = i % 3 == 0 ? *twin : *site;
        const int device = 1 + i / 500;
        CheckSucceeds(which.Initialize(device, StreamOf(device, t)));
        Arrays& arrays = i % 7 == 0 ? b : a;
        CheckSucceeds(arrays.Run(which, device, StreamOf(device, t)));
        CHECK(arrays.Right());
        if (i % 100 == 0) {
          auto passing = Make(Copy("passing"));
          CheckSucceeds(passing->Initialize(device, StreamOf(device, t)));
          CheckSucceeds(a.Run(*passing, device, StreamOf(device, t)));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(counts[kPlansAlive] == 2 && counts[kPacksAlive] <= 4 * 4 * Device::kMaxLanes);
  CHECK(counts[kHandlesMade] <= 2 * Device::kMaxLanes);
  std::printf("%lld handles, %lld packs built\n", (long long)counts[kHandlesMade].load(),
              (long long)counts[kPacksMade].load());
}

// More threads than lanes, with pointers of their own, from one call site: each pack is built in
// few lanes, and the lanes grow only where threads meet.
void TestManyThreads() {
  auto site = Make(Copy());
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  std::atomic<int> waiting{0};
  std::vector<std::thread> threads;
  constexpr int kThreads = 3 * Device::kMaxLanes;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Arrays a(static_cast<char>(t));
      ++waiting;
      while (waiting < kThreads) std::this_thread::yield();
      for (int i = 0; i < 200; ++i) {
        CheckSucceeds(site->Initialize(1, StreamOf(1, t)));
        CheckSucceeds(a.Run(*site, 1, StreamOf(1, t)));
        CHECK(a.Right());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(counts[kHandlesMade] <= Device::kMaxLanes);
  CHECK(counts[kPacksAlive] <= 4 * counts[kHandlesMade]);
  std::printf("%lld handles, %lld packs built\n", (long long)counts[kHandlesMade].load(),
              (long long)counts[kPacksMade].load());
  site.reset();
  CHECK(counts[kPacksAlive] == 0 && counts[kPlansAlive] == 0);
}

void TestRefusals() {
  Given a = Copy();
  a.cudnn_version = 92800;
  CheckFails(Make(a)->Initialize(1, StreamOf(1)), {"9.28.0", "9.19.0", "libcudnn.so.9"});
  auto site = Make(Copy());
  CheckFails(site->Initialize(9, StreamOf(9)), {"Fake GPU", "Another GPU", "jax_cudnn.target"});
  CheckFails(site->Initialize(64, StreamOf(1)), {"device 64"});
  CheckFails(site->Initialize(3, StreamOf(0)), {"stream's context", "a fake driver's error"});
  Arrays arrays(1);
  CheckFails(arrays.Run(*site, 1, StreamOf(1)), {"without being initialized", "CUDA"});
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  const Buffer small{arrays.in, 31}, right{arrays.in, 32}, work{arrays.workspace, 64};
  auto run = [&](std::vector<Buffer> in, std::vector<Buffer> out) {
    return site->Execute(1, StreamOf(1), in, out);
  };
  CheckFails(run({small}, {right, work}), {"operand 0 has 31 bytes", "32"});
  CheckFails(run({right}, {small, work}), {"result 0 has 31 bytes"});
  CheckFails(run({right}, {right, small}), {"31 bytes of workspace", "64"});
  CheckFails(run({}, {right, work}), {"0 operands"});
  CheckFails(run({right}, {work}), {"1 operands and 1 results, its plan was built for 1 and 2"});
  a = Copy();
  const auto altered = [&](std::vector<int64_t> rows, int64_t checksum) {
    return Caught([&] { CallSite(a.device_name, a.name, a.plan, rows, checksum); });
  };
  a = Copy();
  std::vector<int64_t> rows = a.Rows();
  const int64_t checksum = a.Checksum();
  CheckFails(altered(rows, checksum ^ 1), {"checksum", "Lower the function again"});
  CheckFails(altered(rows, checksum | int64_t{1} << 32), {"checksum"});
  rows[4] ^= 8;
  CheckFails(altered(rows, checksum), {"checksum"});
  a.rows.push_back(0);
  CheckFails(Refused(a), {"rows of 4 numbers"});
  a.rows.assign(4 * CallSite::kMaxRows, 0);
  CheckFails(Refused(a), {"1 to 512 rows"});
  CheckFails(altered({}, CallSite::Checksum({a.device_name, a.name, a.plan})), {"1 to 512 rows"});
  a = Copy();
  a.plan = "";
  CheckFails(Refused(a), {"it has no plan"});
  a = Copy();
  for (const int64_t offset : {17, -16, 80}) {
    a.plan_workspace_offset = offset;
    CheckFails(Refused(a), {"multiple of 16"});
  }
  a.workspace_bytes = -1;
  CheckFails(Refused(a), {"multiple of 16"});
  a = Copy();
  a.plan_workspace_offset = 32;
  CheckFails(Make(a)->Initialize(1, StreamOf(1)),
             {"32 bytes of workspace", "needs 48", "cache clear"});
  a.plan = "nonsense";
  CheckFails(Make(a)->Initialize(1, StreamOf(1)),
             {"finalize a plan", "CUDNN_STATUS_BAD_PARAM", "2000", "fake: unreadable plan"});
  a = Copy();
  a.rows[0] = -1;
  auto unbound = Make(a);
  CheckSucceeds(unbound->Initialize(1, StreamOf(1)));
  CheckFails(arrays.Run(*unbound, 1, StreamOf(1)), {"execute a plan", "lacks uid 1"});
  CHECK(counts[kPlansAlive] == 1);
}

void TestInitialResults() {
  Given a = Copy();
  a.plan = "copy 16";  // half of result 0
  a.rows = {1, 0, 0, kBytes, 2, 1, 0, kBytes, 0xff800000, 5, 1, kBytes};
  auto site = Make(a);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  alignas(16) char in[kBytes], workspace[64] = {};
  alignas(16) float out[kBytes / 4];
  std::memset(in, 3, kBytes);
  const Buffer operand{in, kBytes}, results[] = {{out, kBytes}, {workspace, 64}};
  CheckSucceeds(site->Execute(1, StreamOf(1), {&operand, 1}, {results, 2}));
  CHECK(std::memcmp(reinterpret_cast<char*>(out) + 1, in + 1, 15) == 0);
  CHECK(out[4] == -INFINITY && out[7] == -INFINITY);
  const std::vector<int64_t> good = {1, 0, 0, kBytes, 2, 1, 0, kBytes, 3, 3, 0, 0, -1, 2, 0, 8};
  a = Copy();
  const std::vector<std::vector<int64_t>> wrong = {
      {0, 5, 0, 4},                 // of an operand
      {0, 5, 2, 4},                 // of a constant
      {0, 5, 4, 4},                 // of itself
      {0, 5, 5, 4},                 // of no row
      {0, 5, -1, 4},                // of no row
      {1, 5, 1, kBytes + 4},        // beyond the result
      {1, 5, 3, 20},                // beyond the workspace before cuDNN's own
      {1, 5, 3, -4},                // negative bytes
      {1, 5, 3, 6},                 // one word and a half
      {-1, 5, 1, 4},                // not of 4 bytes
      {int64_t{1} << 32, 5, 1, 4},  // not of 4 bytes
      {-1, 4, 0, 16, 0, 5, 4, 4},   // of a view, perhaps of an operand
      {0, 5, 1, 4, 0, 5, 4, 0},     // of a memset
      {0, 5, 1, 4, -1, 4, 4, 0},    // a view of a memset
  };
  for (const std::vector<int64_t>& row : wrong) {
    a.rows = good;
    CheckSucceeds(Refused(a));
    a.rows.insert(a.rows.end(), row.begin(), row.end());
    CheckFails(Refused(a), {"malformed", row.size() == 4 ? "row 4:" : "row 5:"});
  }
}

void TestViews() {
  Given a = Copy();
  // uid 5 is 32 bytes at 32 of an operand of 64, itself not the plan's; uid 6 lies in the
  // workspace.
  a.plan += ", from 5";
  a.workspace_bytes = 128;
  a.plan_workspace_offset = 64;
  a.rows = {-1, 0, 0, 64, -1, 4, 0, 16, 5, 4, 1, 16, 6, 2, 32, 32};
  auto site = Make(a);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  alignas(16) char in[64], workspace[128] = {};
  for (int i = 0; i < 64; ++i) in[i] = static_cast<char>(i);
  workspace[64] = 5;
  const Buffer operand{in, 64}, result{workspace, 128};
  CheckSucceeds(site->Execute(1, StreamOf(1), {&operand, 1}, {&result, 1}));
  CHECK(workspace[32] == 32 + 5 && workspace[63] == 63);
  // Rows that lead outside of the memory are refused before anything runs.
  const std::vector<std::pair<std::vector<int64_t>, int>> wrong = {
      {{-1, 0, 0, 48, 5, 4, 0, 48}, 1},                // begins where its source ends
      {{-1, 0, 0, 48, -1, 4, 0, 32, 5, 4, 1, 16}, 2},  // the same of a view
      {{1, 0, 0, 48, 2, 4, 0, 8}, 1},                  // not a multiple of 16
      {{1, 0, 0, 48, 2, 2, 8, 8}, 1},                  // not a multiple of 16
      {{-1, 3, 0, 4, 1, 4, 0, 0}, 1},                  // a view of a constant
      {{1, 4, 0, 0}, 0},                               // a view of itself
      {{1, 0, 0, 48, 2, 4, 2, 0}, 1},                  // a view of a later row
      {{1, 0, 0, 48, 2, 4, -1, 0}, 1},                 // a view of no row
      {{1, 0, 0, -1}, 0},                              // negative bytes
      {{1, 0, 1 << 20, 0}, 0},                         // too many operands
      {{1, 0, 512, 0}, 0},                             // too many operands
      {{2, 2, 48, 32}, 0},                             // ends outside of the workspace
      {{2, 2, 80, 0}, 0},                              // begins outside of it
      {{2, 2, -16, 0}, 0},                             // begins before it
      {{3, 3, 0, 4, 3, 3, 16, 4}, 1},                  // uid 3 again
      {{2, 0, 0, 32, 1, 1, 0, 32}, 0},                 // not in the order
      {{1, 0, 0, 32, 2, 0, 0, 32, 2, 1, 0, 32}, 2},    // not in the order
      {{1, 0, 0, 32, 2, 1, 1, 32}, 1},                 // not in the order
      {{1, 0, 0, 32, -1, 1, 0, 32, 2, 4, 0, 0}, 2},    // not in the order
      {{1, 1, 0, 32, -1, 0, 0, 32, 2, 1, 1, 32}, 2},   // a result after another operand
      {{-2, 0, 0, 32}, 0},                             // no uid
      {{-2, 3, 0, 0}, 0},                              // no uid
      {{1, 9, 0, 0}, 0},                               // an unknown kind
      {{1, -1, 0, 0}, 0},                              // an unknown kind
  };
  for (const auto& [rows, row] : wrong) {
    a.rows = rows;
    CheckFails(Refused(a), {"malformed", "row " + std::to_string(row) + ":"});
  }
  a.rows = {-1, 0, 0, 32};
  CheckFails(Refused(a), {"no row has a uid"});
}

// As cuDNN's text tells a tensor of 4-byte numbers.
std::string TensorText(int uid, const char* dims, const char* strides, bool by_value = false) {
  return "{\"name\":\"" + std::to_string(uid) +
         "\",\"dataType\":\"CUDNN_DATA_FLOAT\",\"dim\":" + dims + ",\"stride\":" + strides +
         ",\"isVirtual\":" + (uid == 9 ? "true" : "false") +
         ",\"isByValue\":" + (by_value ? "true" : "false") +
         ",\"reordering\":\"CUDNN_TENSOR_REORDERING_NONE\"}";
}

void TestTensors() {
  Given a = Bare();
  const auto text = [&](const std::string& first, bool by_value = true) {
    a.plan = "copy 32, needs 48, \"tensors\":[" + first + "," + TensorText(2, "[2,4]", "[4,1]") +
             "," + TensorText(3, "[1]", "[1]", by_value) + "," + TensorText(9, "[99]", "[1]") + "]";
  };
  text(TensorText(1, "[4,2]", "[1,4]"));
  Arrays arrays(1);
  auto site = Make(a);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  CheckSucceeds(arrays.Run(*site, 1, StreamOf(1)));
  CHECK(arrays.Right());
  a.rows[4] = -1;
  CheckFails(Refused(a), {"tensor 2 of the plan is in no row"});
  a.plan_workspace_offset = 64;
  a.rows = {1, 0, 0, kBytes, 2, 2, 48, 0, 3, 3, 16, 4};
  CheckFails(Refused(a), {"tensor 2", "32 bytes", "row 1, of kind 2, leads to 16"});
  const auto parts = [&](int64_t first, int64_t second) {
    a.rows = {1, 2, first, 0, 2, 2, second, 0, 3, 3, 16, 4};
    return Refused(a);
  };
  CHECK(parts(0, 32).success() && parts(32, 0).success());
  for (const int64_t second : {0, 16}) {
    CheckFails(parts(second, 0), {"of the plan overlap in the workspace"});
    CheckFails(parts(0, second), {"tensors 1 and 2 of the plan overlap"});
  }
  a.plan_workspace_offset = 16;
  a.rows = Bare().rows;
  text(TensorText(1, "[4,2]", "[2,2]"));
  setenv("LOCPATH", ".", 1);
  if (std::system("localedef -c -i de_DE -f UTF-8 ./comma") != 0 ||
      std::setlocale(LC_ALL, "comma") == nullptr) {
    std::printf("skipped: no locale with decimal commas, in which 4,2 is one number\n");
  }
  CheckFails(Refused(a), {"tensor 1", "36 bytes", "row 0, of kind 0, leads to 32"});
  std::setlocale(LC_ALL, "C");
  std::string packed = TensorText(1, "[4,2]", "[2,2]");
  packed.insert(packed.size() - 1, ",\"isRagged\":[" + TensorText(3, "[1]", "[1]", true) + "]");
  text(packed);
  CheckSucceeds(Make(a)->Initialize(1, StreamOf(1)));
  text(TensorText(1, "[9223372036854775807,2]", "[9223372036854775807,1]"));
  CheckFails(Refused(a), {"tensor 1", "1000000000000000 bytes"});
  text(TensorText(1, "[8]", "[1]", true));
  CheckFails(Refused(a), {"tensor 1", "by value", "row 0"});
  text(TensorText(1, "[8]", "[1]"), false);
  CheckFails(Refused(a), {"tensor 3 of the plan, has", "row 2, of kind 3"});
}

// As Python calls it.
void TestRecording() {
  const Given a = Bare();
  const std::vector<int64_t> rows = a.Rows();
  std::string message;
  const auto said = [&](const char* words) { return message.find(words) != message.npos; };
  CallSite* site = nullptr;
  const auto fails = [&](int64_t checksum) {
    const char* failure = JaxCudnnNewCallSite(a.device_name.c_str(), a.name.c_str(), a.plan.c_str(),
                                              rows.data(), rows.size(), checksum, &site);
    message = failure != nullptr ? failure : "";
    return failure != nullptr;
  };
  CHECK(fails(0) && said("its checksum") && said("(graph 'my_graph')") && site == nullptr);
  CHECK(!fails(a.Checksum()) && site != nullptr);

  FakeGraph graph;
  Arrays first(1), second(7);
  const auto record = [&](Arrays& arrays, int64_t bytes, int update) {
    const Buffer buffers[] = {{arrays.in, bytes}, {arrays.out, kBytes}, {arrays.workspace, 64}};
    const char* failure = JaxCudnnRecord(site, 1, StreamOf(1), buffers, 1, 2, &graph, update);
    message = failure != nullptr ? failure : "";
    return failure != nullptr;
  };
  const auto launched = [&](const Arrays& arrays) {
    graph.Launch();
    return std::memcmp(arrays.in, arrays.out, kBytes) == 0;
  };
  CHECK(record(first, kBytes, 1) && said("populate it first"));
  CHECK(record(first, 31, 0) && said("operand 0 has 31 bytes"));
  CHECK(!record(first, kBytes, 0) && launched(first));
  CHECK(record(second, kBytes, 0) && said("cuDNN wants an empty one"));
  CHECK(second.out[0] == 0);
  CHECK(!record(second, kBytes, 1) && launched(second));
  const char* failure = JaxCudnnRecord(site, 1, StreamOf(1), nullptr, 0, 0, nullptr, 1);
  CHECK(failure != nullptr && std::strstr(failure, "CUDA graph is null") != nullptr);

  auto filling = Make(Copy());
  CheckSucceeds(filling->Initialize(1, StreamOf(1)));
  FakeGraph other;
  CheckFails(first.Run(*filling, 1, StreamOf(1), &other), {"sets memory"});
}

void TestClosing() {
  auto site = Make(Copy());
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  std::atomic<bool> closed{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      Arrays a(1);
      for (;;) {
        const bool was_closed = closed;
        const ffi::Error error = a.Run(*site, 1, StreamOf(1));
        if (was_closed) CheckFails(error, {"shutting down"});
        if (error.failure()) return;
        CHECK(a.Right());
      }
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CloseDevices();
  closed = true;
  for (std::thread& thread : threads) thread.join();
  CheckFails(site->Initialize(1, StreamOf(1)), {"shutting down"});
  const int64_t packs = counts[kPacksAlive];
  site.reset();  // leaks on purpose
  CHECK(counts[kPlansAlive] == 1 && counts[kPacksAlive] == packs);
  CloseDevices();
}

// Executes until the process is gone, as XLA's threads do: exit() must neither hang nor crash.
void TestExit() {
  auto* site = Make(Copy()).release();
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  std::thread([site] {
    static Arrays a(1);
    while (a.Run(*site, 1, StreamOf(1)).success()) {
    }
  }).detach();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::exit(0);
}

void TestFork() {
  auto site = Make(Copy());
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  const pid_t child = fork();
  if (child == 0) {
    CheckFails(site->Initialize(1, StreamOf(1)), {"forked", "spawn"});
    site.reset();
    CloseDevices();
    std::_Exit(counts[kPlansAlive] == 1 ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
}

// A cuDNN 9 without native CUDA graphs executes plans, and says what it lacks.
void TestOlder() {
  auto site = Make(Bare());
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  Arrays arrays(1);
  CheckSucceeds(arrays.Run(*site, 1, StreamOf(1)));
  CHECK(arrays.Right());
  for (const bool update : {false, true}) {
    FakeGraph graph;
    graph.nodes = update ? 1 : 0;
    CheckFails(arrays.Run(*site, 1, StreamOf(1), &graph, update), {"has no native CUDA graphs"});
  }
}

}  // namespace
}  // namespace jax_cudnn

int main(int argc, char** argv) {
  using namespace jax_cudnn;
  const std::map<std::string, std::function<void()>> cases = {
      {"packs", TestPacksAreReused},
      {"plans", TestPlansAreSharedAndReleased},
      {"threads", TestThreads},
      {"many_threads", TestManyThreads},
      {"refusals", TestRefusals},
      {"initial", TestInitialResults},
      {"views", TestViews},
      {"tensors", TestTensors},
      {"recording", TestRecording},
      {"closing", TestClosing},
      {"exit", TestExit},
      {"fork", TestFork},
      {"older", TestOlder}};
  const auto found = argc == 2 ? cases.find(argv[1]) : cases.end();
  if (found == cases.end()) {
    for (const auto& entry : cases) std::printf("%s\n", entry.first.c_str());
    return 2;
  }
  found->second();
  return 0;
}
