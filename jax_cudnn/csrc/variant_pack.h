// The variant packs (pointers of one execution, as cuDNN wants them) of a call site on a device.
//
// Building one for every execution costs up to 2.3 us, and XLA mostly passes the same pointers
// again; so the last few are kept and found by their pointers.
#ifndef JAX_CUDNN_CSRC_VARIANT_PACK_H_
#define JAX_CUDNN_CSRC_VARIANT_PACK_H_

#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

#include "device.h"

namespace jax_cudnn {

class VariantPackCache {
 public:
  // `uids` must outlive the cache. A pack's pointers are one per uid, then the workspace.
  VariantPackCache(Device& device, const std::vector<int64_t>& uids);
  ~VariantPackCache();
  VariantPackCache(const VariantPackCache&) = delete;
  VariantPackCache& operator=(const VariantPackCache&) = delete;

 private:
  struct Pack {
    Descriptor descriptor = nullptr;
    std::vector<void*> pointers;
  };
  struct alignas(64) Slot {
    std::atomic<Pack*> free{nullptr};  // null while leased
    // Of the pointers in the pack: a hint, read without holding the pack, so checked afterwards.
    std::atomic<uint64_t> hash{0};
  };

 public:
  // A finalised pack held by one thread for a scope. Only while holding a handle, which is what
  // keeps CloseDevices() waiting.
  class Lease {
   public:
    explicit Lease(VariantPackCache& cache) : cache_(cache) {}
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    // Finds a pack with these pointers, else replaces one in turn.
    ffi::Error Acquire(void* const* pointers, std::string_view name);
    Descriptor descriptor() const { return pack_->descriptor; }

   private:
    bool TakeEqual(void* const* pointers, uint64_t hash);
    void TakeAny();

    VariantPackCache& cache_;
    Slot* slot_ = nullptr;  // null: the pack is `spare_`
    Pack* pack_ = nullptr;
    Pack spare_;  // when more threads than there are slots run one call site
  };

 private:
  static constexpr int kSlots = 4;

  uint64_t Hash(void* const* pointers) const;
  bool Equal(const Pack& pack, void* const* pointers) const;
  ffi::Error Rebuild(Pack& pack, void* const* pointers, std::string_view name);
  void Destroy(Pack& pack);

  Device& device_;
  const std::vector<int64_t>& uids_;
  Pack packs_[kSlots];
  Slot slots_[kSlots];
  std::atomic<unsigned> next_{0};
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CSRC_VARIANT_PACK_H_
