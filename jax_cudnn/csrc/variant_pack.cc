#include "variant_pack.h"

#include <algorithm>

namespace jax_cudnn {

VariantPackCache::VariantPackCache(Device& device, const std::vector<int64_t>& uids)
    : device_(device), uids_(uids) {
  for (int i = 0; i < kSlots; ++i) {
    packs_[i].pointers.resize(uids.size() + 1);
    slots_[i].free.store(&packs_[i], std::memory_order_release);
  }
}

VariantPackCache::~VariantPackCache() {
  const auto lock = device_.LockToDestroy();
  if (!lock.owns_lock()) return;
  for (Pack& pack : packs_) Destroy(pack);
}

uint64_t VariantPackCache::Hash(void* const* pointers) const {
  uint64_t hash = 0;
  for (size_t i = 0; i <= uids_.size(); ++i) {
    hash = (hash ^ reinterpret_cast<uintptr_t>(pointers[i])) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return hash;
}

bool VariantPackCache::Equal(const Pack& pack, void* const* pointers) const {
  return pack.descriptor != nullptr &&
         std::equal(pack.pointers.begin(), pack.pointers.end(), pointers);
}

void VariantPackCache::Destroy(Pack& pack) {
  if (pack.descriptor == nullptr) return;
  device_.cudnn().destroy_descriptor(pack.descriptor);
  pack.descriptor = nullptr;
  --counters().packs_alive;
}

// cuDNN refuses attributes for a finalised descriptor; so a new one takes the old one's place.
ffi::Error VariantPackCache::Rebuild(Pack& pack, void* const* pointers, std::string_view name) {
  const Cudnn& cudnn = device_.cudnn();
  const auto count = static_cast<int64_t>(uids_.size());
  Descriptor fresh = nullptr;
  const char* step = "create a variant pack descriptor";
  Status status = cudnn.create_descriptor(kVariantPackDescriptor, &fresh);
  if (status == 0) {
    step = "set a variant pack's ids";
    status = cudnn.set_attribute(fresh, kVariantPackUniqueIds, kTypeInt64, count, uids_.data());
  }
  if (status == 0) {
    step = "set a variant pack's pointers";
    status = cudnn.set_attribute(fresh, kVariantPackDataPointers, kTypeVoidPtr, count, pointers);
  }
  if (status == 0) {
    step = "set a variant pack's workspace";
    status = cudnn.set_attribute(fresh, kVariantPackWorkspace, kTypeVoidPtr, 1, &pointers[count]);
  }
  if (status == 0) {
    step = "finalize a variant pack";
    status = cudnn.finalize(fresh);
  }
  if (status != 0) {
    ffi::Error error = CudnnFailure(cudnn, step, status, name);
    if (fresh != nullptr) cudnn.destroy_descriptor(fresh);
    return error;
  }
  Destroy(pack);
  pack.descriptor = fresh;
  pack.pointers.assign(pointers, pointers + count + 1);
  ++counters().packs_built;
  ++counters().packs_alive;
  return ffi::Error::Success();
}

VariantPackCache::Lease::~Lease() {
  if (slot_ != nullptr) slot_->free.store(pack_, std::memory_order_release);
  cache_.Destroy(spare_);
}

bool VariantPackCache::Lease::TakeEqual(void* const* pointers, uint64_t hash) {
  for (Slot& slot : cache_.slots_) {
    if (slot.hash.load(std::memory_order_relaxed) != hash) continue;
    Pack* pack = slot.free.exchange(nullptr, std::memory_order_acquire);
    if (pack == nullptr) continue;
    if (cache_.Equal(*pack, pointers)) {
      slot_ = &slot;
      pack_ = pack;
      return true;
    }
    slot.free.store(pack, std::memory_order_release);
  }
  return false;
}

void VariantPackCache::Lease::TakeAny() {
  const unsigned start = cache_.next_.fetch_add(1, std::memory_order_relaxed);
  for (unsigned i = 0; i < kSlots; ++i) {
    Slot& slot = cache_.slots_[(start + i) % kSlots];
    pack_ = slot.free.exchange(nullptr, std::memory_order_acquire);
    if (pack_ != nullptr) {
      slot_ = &slot;
      return;
    }
  }
  pack_ = &spare_;
}

ffi::Error VariantPackCache::Lease::Acquire(void* const* pointers, std::string_view name) {
  const uint64_t hash = cache_.Hash(pointers);
  if (TakeEqual(pointers, hash)) return ffi::Error::Success();
  TakeAny();
  ffi::Error error = cache_.Rebuild(*pack_, pointers, name);
  if (error.success() && slot_ != nullptr) slot_->hash.store(hash, std::memory_order_relaxed);
  return error;
}

}  // namespace jax_cudnn
