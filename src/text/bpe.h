// The BPE model of tokenizer.json: one word (a piece of text after normalizing and splitting) to
// ids. Words of byte-level vocabularies are raw bytes; the printable alphabet that such files spell
// bytes with is undone once, at load.
// Source: the semantics of huggingface/tokenizers models/bpe (merge order: lowest rank, then
// leftmost; unknown characters; byte fallback; ignore_merges).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_fwd.h"
#include "base/result.h"
#include "text/bytes_map.h"

namespace nibble::text {

/// The alphabet of byte-level vocabularies: byte to code point and back (-1 for none).
char32_t byte_level_code_point(uint8_t byte);
int byte_level_byte(char32_t code_point);
/// `token` with every character replaced by its byte; false if one has none.
bool undo_byte_level(std::string_view token, std::string& bytes);

/// Work memory of one thread: merge lists and a cache of recent words.
class BpeScratch {
 public:
  BpeScratch();

 private:
  friend class Bpe;
  struct Symbol {
    int32_t id;
    int32_t prev, next;  // -1 at the ends
    uint32_t rank;       // of the pair with next; kNoMerge if none
    int32_t merged;      // id that the pair becomes
  };
  struct Candidate {
    uint32_t rank;
    int32_t position;
    int32_t merged;
  };
  struct CacheSlot {
    uint64_t hash = 0;
    uint32_t offset = 0;  // into text
    uint32_t ids_offset = 0;
    uint16_t bytes = 0;
    uint16_t count = 0;
    uint32_t generation = 0;  // valid if equal to the cache's
  };
  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
  std::vector<CacheSlot> cache_;
  std::string cache_text_;
  std::vector<int32_t> cache_ids_;
  size_t cache_used_ = 0;
  uint32_t generation_ = 1;
};

class Bpe {
 public:
  /// `model` is the "model" object. `byte_level`: words are raw bytes of a byte-level vocabulary.
  /// Errors: kCorruptInput (merges that name unknown tokens, ids out of range), kUnsupported
  /// (other model types, dropout, subword affixes).
  static Result<Bpe> parse(const Json& model, bool byte_level);

  /// Appends the ids of one word; `word` must be valid UTF-8 unless byte-level.
  void encode(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const;

  /// As the file spells it; -1 if unknown.
  int32_t token_id(std::string_view content) const { return vocab_.find(content); }
  /// Tokens by id as the file spells them; empty for ids that are not used.
  const std::vector<std::string>& tokens() const { return tokens_; }
  bool has_token(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < tokens_.size() && used_[static_cast<size_t>(id)];
  }

 private:
  struct Merge {
    uint64_t pair = kEmpty;
    uint32_t rank = 0;
    int32_t merged = 0;
  };
  static constexpr uint64_t kEmpty = ~0ULL;
  static uint64_t pair_key(int32_t left, int32_t right) {
    return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) |
           static_cast<uint32_t>(right);
  }
  Result<void> parse_vocab(const Json& vocab);
  Result<void> parse_merges(const Json& merges);
  Result<void> parse_unknown(const Json& model);
  void prepare_bytes();
  void insert_merge(uint64_t pair, uint32_t rank, int32_t merged);
  const Merge* find_merge(int32_t left, int32_t right) const;
  void split(std::string_view word, std::vector<BpeScratch::Symbol>& symbols) const;
  void rate(std::vector<BpeScratch::Symbol>& symbols, size_t at) const;
  void merge_short(std::vector<BpeScratch::Symbol>& symbols) const;
  void merge_long(BpeScratch& scratch) const;
  bool cached(std::string_view word, uint64_t hash, BpeScratch& scratch,
              std::vector<int32_t>& ids) const;
  void remember(std::string_view word, uint64_t hash, BpeScratch& scratch, const int32_t* ids,
                size_t count) const;

  bool byte_level_ = false;
  bool ignore_merges_ = false;
  bool byte_fallback_ = false;
  bool fuse_unk_ = false;
  int32_t unk_id_ = -1;
  std::vector<std::string> tokens_;
  std::vector<bool> used_;
  BytesMap vocab_;         // content as spelled
  BytesMap words_;         // content as bytes, byte-level only
  int32_t byte_ids_[256];  // byte-level: id of each byte; byte fallback: id of <0xNN>
  std::vector<Merge> merges_;
};

}  // namespace nibble::text
