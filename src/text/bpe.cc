#include "text/bpe.h"

#include <algorithm>
#include <array>

#include "base/json.h"
#include "text/unicode.h"

namespace nibble::text {
namespace {

constexpr uint32_t kNoMerge = ~0U;
// Ids index vectors, so a hostile file must not be able to ask for 2^31 of them.
constexpr int64_t kMaxId = 16 * 1024 * 1024;
// Above this many symbols the heap is used; the scan for the lowest rank is quadratic.
constexpr size_t kShortWord = 40;
constexpr size_t kCacheSlots = 1 << 15;
constexpr size_t kCacheWordBytes = 48;

struct ByteAlphabet {
  std::array<char32_t, 256> code_point{};
  std::array<int16_t, 512> byte{};
  ByteAlphabet() {
    byte.fill(-1);
    char32_t next = 256;  // bytes without a printable Latin-1 character are numbered from U+0100
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      const char32_t c = printable ? static_cast<char32_t>(b) : next++;
      code_point[static_cast<size_t>(b)] = c;
      byte[c] = static_cast<int16_t>(b);
    }
  }
};

const ByteAlphabet& alphabet() {
  static const ByteAlphabet kAlphabet;
  return kAlphabet;
}

Error corrupt(std::string message) { return Error(Code::kCorruptInput, std::move(message)); }

}  // namespace

char32_t byte_level_code_point(uint8_t byte) { return alphabet().code_point[byte]; }

int byte_level_byte(char32_t code_point) {
  return code_point < 512 ? alphabet().byte[code_point] : -1;
}

bool undo_byte_level(std::string_view token, std::string& bytes) {
  bytes.clear();
  for (size_t pos = 0; pos < token.size();) {
    const int byte = byte_level_byte(next_code_point(token, pos));
    if (byte < 0) return false;
    bytes.push_back(static_cast<char>(byte));
  }
  return true;
}

BpeScratch::BpeScratch() : cache_(kCacheSlots) {}

Result<Bpe> Bpe::parse(const Json& model, bool byte_level) {
  Bpe bpe;
  bpe.byte_level_ = byte_level;
  NIBBLE_TRY(const std::string type, json_string(model, "type", "BPE"));
  if (type != "BPE") return Error(Code::kUnsupported, cat("model type '", type, "'"));
  NIBBLE_TRY(const double dropout, json_number(model, "dropout", 0.0));
  if (dropout != 0.0) return Error(Code::kUnsupported, "BPE dropout");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    NIBBLE_TRY(const std::string affix, json_string(model, key, ""));
    if (!affix.empty()) return Error(Code::kUnsupported, cat("BPE ", key, " '", affix, "'"));
  }
  NIBBLE_TRY(bpe.ignore_merges_, json_bool(model, "ignore_merges", false));
  NIBBLE_TRY(bpe.byte_fallback_, json_bool(model, "byte_fallback", false));
  NIBBLE_TRY(bpe.fuse_unk_, json_bool(model, "fuse_unk", false));
  const Json* vocab = json_find(model, "vocab");
  if (vocab == nullptr || !vocab->is_object()) return corrupt("model has no 'vocab' object");
  NIBBLE_TRY(bpe.parse_vocab(*vocab));
  const Json* merges = json_find(model, "merges");
  if (merges == nullptr || !merges->is_array()) return corrupt("model has no 'merges' array");
  NIBBLE_TRY(bpe.parse_merges(*merges));
  NIBBLE_TRY(bpe.parse_unknown(model));
  bpe.prepare_bytes();
  return bpe;
}

Result<void> Bpe::parse_vocab(const Json& vocab) {
  int64_t highest = -1;
  for (const auto& [content, value] : vocab.items()) {
    if (!value.is_number_integer()) return corrupt(cat("vocab '", content, "': not an id"));
    const int64_t id = value.is_number_unsigned() && value.get<uint64_t>() > kMaxId
                           ? kMaxId
                           : value.get<int64_t>();
    if (id < 0 || id >= kMaxId) {
      return corrupt(cat("vocab '", content, "': id outside [0, ", kMaxId, ")"));
    }
    highest = std::max(highest, id);
  }
  tokens_.resize(static_cast<size_t>(highest + 1));
  used_.resize(tokens_.size());
  vocab_.reserve(vocab.size());
  for (const auto& [content, value] : vocab.items()) {
    const auto id = value.get<int32_t>();
    vocab_.insert(content, id);
    tokens_[static_cast<size_t>(id)] = content;
    used_[static_cast<size_t>(id)] = true;
  }
  if (!byte_level_) return {};
  words_.reserve(vocab.size());
  std::string bytes;
  for (const auto& [content, value] : vocab.items()) {
    if (undo_byte_level(content, bytes)) words_.insert(bytes, value.get<int32_t>());
  }
  return {};
}

Result<void> Bpe::parse_merges(const Json& merges) {
  size_t slots = 16;
  while (slots < merges.size() * 2) slots *= 2;
  merges_.assign(slots, Merge{});
  uint32_t rank = 0;
  std::string left, right;
  for (const Json& merge : merges) {
    if (merge.is_string()) {
      const auto& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        return corrupt(cat("merge ", rank, ": '", text, "' is not two tokens"));
      }
      left.assign(text, 0, space);
      right.assign(text, space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      left = merge[0].get_ref<const std::string&>();
      right = merge[1].get_ref<const std::string&>();
    } else {
      return corrupt(cat("merge ", rank, ": neither a string nor two strings"));
    }
    const int32_t left_id = vocab_.find(left);
    const int32_t right_id = vocab_.find(right);
    const int32_t merged = vocab_.find(left + right);
    if (left_id < 0 || right_id < 0 || merged < 0) {
      return corrupt(cat("merge ", rank, ": '", left, "' + '", right,
                         "': a part or the result is not in the vocabulary"));
    }
    insert_merge(pair_key(left_id, right_id), rank++, merged);
  }
  return {};
}

Result<void> Bpe::parse_unknown(const Json& model) {
  NIBBLE_TRY(const std::string unknown, json_string(model, "unk_token", ""));
  if (unknown.empty()) return {};
  unk_id_ = vocab_.find(unknown);
  if (unk_id_ < 0) return corrupt(cat("unk_token '", unknown, "' is not in the vocabulary"));
  return {};
}

void Bpe::prepare_bytes() {
  for (int b = 0; b < 256; ++b) {
    std::string spelled;
    if (byte_level_) {
      append_utf8(byte_level_code_point(static_cast<uint8_t>(b)), spelled);
    } else {
      constexpr char kHex[] = "0123456789ABCDEF";
      spelled = {'<', '0', 'x', kHex[b >> 4], kHex[b & 15], '>'};
    }
    byte_ids_[b] = vocab_.find(spelled);
  }
}

void Bpe::insert_merge(uint64_t pair, uint32_t rank, int32_t merged) {
  const size_t mask = merges_.size() - 1;
  size_t i = (pair * 0x9E3779B97F4A7C15ULL >> 20) & mask;
  while (merges_[i].pair != kEmpty && merges_[i].pair != pair) i = (i + 1) & mask;
  merges_[i] = {pair, rank, merged};  // a repeated merge counts with its last rank
}

const Bpe::Merge* Bpe::find_merge(int32_t left, int32_t right) const {
  const uint64_t pair = pair_key(left, right);
  const size_t mask = merges_.size() - 1;
  for (size_t i = (pair * 0x9E3779B97F4A7C15ULL >> 20) & mask;; i = (i + 1) & mask) {
    if (merges_[i].pair == pair) return &merges_[i];
    if (merges_[i].pair == kEmpty) return nullptr;
  }
}

// First symbols of a word: bytes, or characters with byte fallback and the unknown token.
void Bpe::split(std::string_view word, std::vector<BpeScratch::Symbol>& symbols) const {
  symbols.clear();
  const auto add = [&symbols](int32_t id) { symbols.push_back({id, 0, 0, kNoMerge, 0}); };
  int pending_unknown = 0;
  const auto flush_unknown = [&] {
    if (pending_unknown > 0) add(unk_id_);
    pending_unknown = 0;
  };
  const auto unknown = [&] {
    if (unk_id_ < 0) return;  // without an unknown token the character is dropped
    if (!fuse_unk_) flush_unknown();
    pending_unknown = 1;
  };
  if (byte_level_) {
    for (const char c : word) {
      const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
      if (id >= 0) {
        flush_unknown();
        add(id);
      } else {
        unknown();
      }
    }
  } else {
    for (size_t pos = 0; pos < word.size();) {
      const size_t begin = pos;
      next_code_point(word, pos);
      const std::string_view character = word.substr(begin, pos - begin);
      const int32_t id = vocab_.find(character);
      if (id >= 0) {
        flush_unknown();
        add(id);
        continue;
      }
      const bool bytes =
          byte_fallback_ && std::all_of(character.begin(), character.end(), [this](char c) {
            return byte_ids_[static_cast<uint8_t>(c)] >= 0;
          });
      if (bytes) {  // as the reference: a pending unknown stays pending
        for (const char c : character) add(byte_ids_[static_cast<uint8_t>(c)]);
      } else {
        unknown();
      }
    }
  }
  flush_unknown();
}

// Sets rank and merged of the pair that starts at `at`.
void Bpe::rate(std::vector<BpeScratch::Symbol>& symbols, size_t at) const {
  BpeScratch::Symbol& symbol = symbols[at];
  symbol.rank = kNoMerge;
  if (symbol.next < 0) return;
  if (const Merge* merge = find_merge(symbol.id, symbols[static_cast<size_t>(symbol.next)].id)) {
    symbol.rank = merge->rank;
    symbol.merged = merge->merged;
  }
}

// Scans for the lowest rank each time, and closes the gap: no links, best for common words.
void Bpe::merge_short(std::vector<BpeScratch::Symbol>& symbols) const {
  size_t count = symbols.size();
  const auto rate_pair = [&](size_t at) {
    symbols[at].rank = kNoMerge;
    if (at + 1 >= count) return;
    if (const Merge* merge = find_merge(symbols[at].id, symbols[at + 1].id)) {
      symbols[at].rank = merge->rank;
      symbols[at].merged = merge->merged;
    }
  };
  for (size_t i = 0; i < count; ++i) rate_pair(i);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (symbols[i].rank < symbols[best].rank) best = i;
    }
    if (symbols[best].rank == kNoMerge) break;
    symbols[best].id = symbols[best].merged;
    std::copy(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 2,
              symbols.begin() + static_cast<std::ptrdiff_t>(count),
              symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    --count;
    rate_pair(best);
    if (best > 0) rate_pair(best - 1);
  }
  symbols.resize(count);
}

// A linked list and a heap of pairs: n log n for words of any length.
void Bpe::merge_long(BpeScratch& scratch) const {
  auto& symbols = scratch.symbols_;
  auto& heap = scratch.heap_;
  const auto later = [](const BpeScratch::Candidate& a, const BpeScratch::Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  };
  const size_t count = symbols.size();
  heap.clear();
  for (size_t i = 0; i < count; ++i) {
    symbols[i].prev = static_cast<int32_t>(i) - 1;
    symbols[i].next = i + 1 < count ? static_cast<int32_t>(i) + 1 : -1;
  }
  for (size_t i = 0; i < count; ++i) {
    rate(symbols, i);
    if (symbols[i].rank != kNoMerge) {
      heap.push_back({symbols[i].rank, static_cast<int32_t>(i), symbols[i].merged});
    }
  }
  std::make_heap(heap.begin(), heap.end(), later);
  const auto push = [&](int32_t at) {
    BpeScratch::Symbol& symbol = symbols[static_cast<size_t>(at)];
    rate(symbols, static_cast<size_t>(at));
    if (symbol.rank == kNoMerge) return;
    heap.push_back({symbol.rank, at, symbol.merged});
    std::push_heap(heap.begin(), heap.end(), later);
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const BpeScratch::Candidate top = heap.back();
    heap.pop_back();
    BpeScratch::Symbol& left = symbols[static_cast<size_t>(top.position)];
    if (left.id < 0 || left.rank != top.rank || left.merged != top.merged) continue;  // outdated
    BpeScratch::Symbol& right = symbols[static_cast<size_t>(left.next)];
    left.id = top.merged;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].prev = top.position;
    push(top.position);
    if (left.prev >= 0) push(left.prev);
  }
  std::erase_if(symbols, [](const BpeScratch::Symbol& symbol) { return symbol.id < 0; });
}

bool Bpe::cached(std::string_view word, uint64_t hash, BpeScratch& scratch,
                 std::vector<int32_t>& ids) const {
  const size_t mask = kCacheSlots - 1;
  for (size_t i = hash & mask;; i = (i + 1) & mask) {
    const auto& slot = scratch.cache_[i];
    if (slot.generation != scratch.generation_) return false;
    if (slot.hash == hash && slot.bytes == word.size() &&
        word == std::string_view(scratch.cache_text_).substr(slot.offset, slot.bytes)) {
      const auto begin = scratch.cache_ids_.begin() + slot.ids_offset;
      ids.insert(ids.end(), begin, begin + slot.count);
      return true;
    }
  }
}

void Bpe::remember(std::string_view word, uint64_t hash, BpeScratch& scratch, const int32_t* ids,
                   size_t count) const {
  if (scratch.cache_used_ * 2 >= kCacheSlots) {  // full: forget all, in constant time
    scratch.cache_used_ = 0;
    scratch.cache_text_.clear();
    scratch.cache_ids_.clear();
    if (++scratch.generation_ == 0) {
      std::fill(scratch.cache_.begin(), scratch.cache_.end(), BpeScratch::CacheSlot{});
      scratch.generation_ = 1;
    }
  }
  const size_t mask = kCacheSlots - 1;
  size_t i = hash & mask;
  while (scratch.cache_[i].generation == scratch.generation_) i = (i + 1) & mask;
  scratch.cache_[i] = {hash,
                       static_cast<uint32_t>(scratch.cache_text_.size()),
                       static_cast<uint32_t>(scratch.cache_ids_.size()),
                       static_cast<uint16_t>(word.size()),
                       static_cast<uint16_t>(count),
                       scratch.generation_};
  scratch.cache_text_.append(word);
  scratch.cache_ids_.insert(scratch.cache_ids_.end(), ids, ids + count);
  ++scratch.cache_used_;
}

void Bpe::encode(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  if (word.empty()) return;
  const bool cacheable = word.size() <= kCacheWordBytes;
  const uint64_t hash = cacheable ? hash_bytes(word) : 0;
  if (cacheable && cached(word, hash, scratch, ids)) return;
  const size_t begin = ids.size();
  const int32_t whole = !ignore_merges_ ? -1 : (byte_level_ ? words_ : vocab_).find(word);
  if (whole >= 0) {
    ids.push_back(whole);
  } else {
    split(word, scratch.symbols_);
    if (scratch.symbols_.size() <= kShortWord) {
      merge_short(scratch.symbols_);
    } else {
      merge_long(scratch);
    }
    for (const auto& symbol : scratch.symbols_) ids.push_back(symbol.id);
  }
  if (cacheable) remember(word, hash, scratch, ids.data() + begin, ids.size() - begin);
}

}  // namespace nibble::text
