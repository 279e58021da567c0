// Hugging Face tokenizer.json: byte-level (and byte-fallback) BPE with its normalizers, split
// regexes, added tokens and decoders. Bit-for-bit the ids that the reference library gives.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace nibble::text {

class Tokenizer {
 public:
  /// Errors: kCorruptInput for malformed files, kUnsupported naming a component (normalizer,
  /// pre-tokenizer, model or decoder type) that is not implemented. Never ignores one silently.
  static Result<Tokenizer> open(const std::string& path);  // tokenizer.json or a folder with one
  static Result<Tokenizer> parse(std::string_view json, std::string_view name);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Text to ids. Special tokens in the text become their ids; with add_special the
  /// post-processor's (BOS and so on) are added. Invalid UTF-8 is replaced by U+FFFD first.
  /// Thread-safe.
  std::vector<int32_t> encode(std::string_view text, bool add_special = false) const;
  /// As the reference decodes; ids out of range give nothing.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;
  /// Bytes one token adds to the stream (before UTF-8 assembly); for streaming.
  std::string_view token_bytes(int32_t id) const;
  bool is_special(int32_t id) const;
  std::optional<int32_t> token_id(std::string_view content) const;
  int32_t vocab_size() const;  // highest id + 1

 private:
  friend class StreamDecoder;
  /// token_bytes() of a token that is the first of its text: some decoders drop a space there.
  std::string first_token_bytes(int32_t id) const;
  /// Removes what the decoder drops from the start of a text; `budget` counts down, and is 0 once
  /// nothing more will be dropped.
  void strip_start(std::string& text, size_t& budget) const;
  size_t strip_budget() const;

  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Token by token to text that is always whole UTF-8: bytes of an unfinished character wait.
/// All pieces together are what decode() gives. One exception, for vocabularies with <0xNN> tokens:
/// the reference turns a whole run of such tokens that is not UTF-8 into one U+FFFD a byte, which
/// cannot be known before the run ends; here each broken part of it becomes one U+FFFD.
class StreamDecoder {
 public:
  StreamDecoder(const Tokenizer& tokenizer, bool skip_special = true)
      : tokenizer_(&tokenizer),
        skip_special_(skip_special),
        strip_budget_(tokenizer.strip_budget()) {}
  /// Text that became certain with this token; may be empty.
  std::string push(int32_t id);
  /// What is left: an unfinished tail becomes one U+FFFD.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  bool first_ = true;
  size_t strip_budget_;
  std::string pending_;
};

/// Finds stop strings in a stream: text that may be the start of one is held back.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  /// Text safe to show. After stopped() is true nothing more comes.
  std::string push(std::string_view text);
  std::string finish();
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace nibble::text
