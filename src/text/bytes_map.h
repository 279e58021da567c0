// A hash map from byte strings to ids for look-ups on the hot path: open addressing, all keys in
// one buffer. Built once, then read by many threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace nibble::text {

inline uint64_t hash_bytes(std::string_view bytes) {
  // Multiply-fold over 8-byte words; keys are short and come from vocabularies.
  uint64_t h = 0x9E3779B97F4A7C15ULL ^ (bytes.size() * 0xD6E8FEB86659FD93ULL);
  const char* p = bytes.data();
  size_t left = bytes.size();
  while (left >= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    h = (h ^ word) * 0xFF51AFD7ED558CCDULL;
    h ^= h >> 32;
    p += 8;
    left -= 8;
  }
  uint64_t tail = 0;
  if (left > 0) std::memcpy(&tail, p, left);
  h = (h ^ tail) * 0xC4CEB9FE1A85EC53ULL;
  return h ^ (h >> 29);
}

class BytesMap {
 public:
  /// Room for `count` keys; must be called before insert().
  void reserve(size_t count) {
    size_t slots = 16;
    while (slots < count * 2) slots *= 2;
    slots_.assign(slots, Slot{});
  }
  /// A key that is there keeps its place and gets the new value.
  void insert(std::string_view key, int32_t value) {
    Slot& slot = slots_[find_slot(key)];
    if (slot.value < 0) {
      slot.offset = static_cast<uint32_t>(keys_.size());
      slot.bytes = static_cast<uint32_t>(key.size());
      keys_.append(key);
    }
    slot.value = value;
  }
  /// The value, or -1.
  int32_t find(std::string_view key) const {
    if (slots_.empty()) return -1;
    return slots_[find_slot(key)].value;
  }

 private:
  struct Slot {
    uint32_t offset = 0;
    uint32_t bytes = 0;
    int32_t value = -1;
  };
  size_t find_slot(std::string_view key) const {
    const size_t mask = slots_.size() - 1;
    for (size_t i = hash_bytes(key) & mask;; i = (i + 1) & mask) {
      const Slot& slot = slots_[i];
      if (slot.value < 0) return i;
      if (slot.bytes == key.size() &&
          (slot.bytes == 0 || std::memcmp(keys_.data() + slot.offset, key.data(), slot.bytes) == 0))
        return i;
    }
  }
  std::vector<Slot> slots_;
  std::string keys_;
};

}  // namespace nibble::text
