// Tokenizer: the parts of tokenizer.json put together, in the order of the reference: added tokens
// of the raw text, normalizer, added tokens of the normalized text, pre-tokenizer, model,
// post-processor. "truncation" and "padding" of the file are not applied: as in transformers, they
// belong to the call. Each part is described in its own header.
#include "text/tokenizer.h"

#include <algorithm>
#include <mutex>

#include "base/file.h"
#include "base/json.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/decoder.h"
#include "text/normalizer.h"
#include "text/post_processor.h"
#include "text/pre_tokenizer.h"
#include "text/unicode.h"

namespace nibble::text {
namespace {

// What one running encode or decode needs; kept between calls with its warm caches.
struct Context {
  RegexScratch regex;
  BpeScratch bpe;
  Words words;
  std::vector<Section> sections, inner;
};

class ContextPool {
 public:
  std::unique_ptr<Context> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        auto context = std::move(idle_.back());
        idle_.pop_back();
        return context;
      }
    }
    return std::make_unique<Context>();
  }
  void put(std::unique_ptr<Context> context) {
    const std::lock_guard lock(mutex_);
    if (idle_.size() < kMaxIdle) idle_.push_back(std::move(context));
  }

 private:
  static constexpr size_t kMaxIdle = 64;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Context>> idle_;
};

class Lease {
 public:
  explicit Lease(ContextPool& pool) : pool_(pool), context_(pool.take()) {}
  ~Lease() { pool_.put(std::move(context_)); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Context& operator*() { return *context_; }

 private:
  ContextPool& pool_;
  std::unique_ptr<Context> context_;
};

}  // namespace

struct Tokenizer::Impl {
  Impl(Bpe bpe_in, Normalizer normalizer_in, PreTokenizer pre_in, PostProcessor post_in,
       TokenDecoder decoder_in)
      : bpe(std::move(bpe_in)),
        normalizer(std::move(normalizer_in)),
        pre_tokenizer(std::move(pre_in)),
        post_processor(std::move(post_in)),
        decoder(std::move(decoder_in)) {}

  void add_tokens(std::vector<AddedToken> added);
  void fill_bytes();
  void encode_words(std::string_view text, bool first, Context& context,
                    std::vector<int32_t>& ids) const;
  void encode_section(std::string_view text, bool first, Context& context,
                      std::vector<int32_t>& ids) const;

  Bpe bpe;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  PostProcessor post_processor;
  TokenDecoder decoder;
  AddedTokenFinder raw_finder, normalized_finder;
  std::vector<std::string> tokens;  // by id, as spelled; with the added ones
  std::vector<bool> used, special;
  BytesMap added_ids;
  // token_bytes() of all ids, one after the other.
  std::string bytes;
  std::vector<size_t> bytes_offset;  // tokens + 1 entries
  mutable ContextPool contexts;
};

void Tokenizer::Impl::add_tokens(std::vector<AddedToken> added) {
  tokens = bpe.tokens();
  used.resize(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) used[i] = bpe.has_token(static_cast<int32_t>(i));
  added_ids.reserve(added.size());
  // Special tokens are sought first; that decides between equal spellings only.
  std::stable_partition(added.begin(), added.end(), [](const AddedToken& t) { return t.special; });
  RegexScratch regex;
  for (AddedToken& token : added) {
    const int32_t known = bpe.token_id(token.content);
    if (known >= 0) token.id = known;
    const auto index = static_cast<size_t>(token.id);
    if (index >= tokens.size()) {
      tokens.resize(index + 1);
      used.resize(index + 1);
    }
    special.resize(tokens.size());
    tokens[index] = token.content;
    used[index] = true;
    special[index] = token.special;
    added_ids.insert(token.content, token.id);
    if (token.normalized) {
      normalized_finder.add(normalizer.apply(token.content, regex), token);
    } else {
      raw_finder.add(token.content, token);
    }
  }
  special.resize(tokens.size());
}

void Tokenizer::Impl::fill_bytes() {
  RegexScratch regex;
  bytes_offset.reserve(tokens.size() + 1);
  for (size_t i = 0; i < tokens.size(); ++i) {
    bytes_offset.push_back(bytes.size());
    if (used[i]) bytes += decoder.bytes_of(tokens[i], false, regex);
  }
  bytes_offset.push_back(bytes.size());
}

void Tokenizer::Impl::encode_words(std::string_view text, bool first, Context& context,
                                   std::vector<int32_t>& ids) const {
  if (text.empty()) return;
  Words& words = context.words;
  pre_tokenizer.split(text, first, context.regex, words);
  for (const Span word : words.spans) {
    bpe.encode(words.text.substr(word.begin, word.end - word.begin), context.bpe, ids);
  }
}

// A stretch between added tokens of the raw text.
void Tokenizer::Impl::encode_section(std::string_view text, bool first, Context& context,
                                     std::vector<int32_t>& ids) const {
  std::string changed;
  if (!normalizer.identity()) {
    changed = normalizer.apply(text, context.regex);
    text = changed;
  }
  if (normalized_finder.empty()) {
    encode_words(text, first, context, ids);
    return;
  }
  context.inner.clear();
  normalized_finder.split(text, context.inner);
  for (const Section section : context.inner) {
    if (section.id >= 0) {
      ids.push_back(section.id);
    } else {
      encode_words(text.substr(section.begin, section.end - section.begin),
                   first && section.begin == 0, context, ids);
    }
  }
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::open(const std::string& path) {
  const std::string file = directory_exists(path) ? path + "/tokenizer.json" : path;
  NIBBLE_TRY(const std::string json, read_text_file(file));
  return parse(json, file);
}

Result<Tokenizer> Tokenizer::parse(std::string_view json, std::string_view name) {
  NIBBLE_TRY(const Json root, parse_json(json, name));
  const auto build = [&root]() -> Result<std::unique_ptr<Impl>> {
    if (!root.is_object()) return Error(Code::kCorruptInput, "not a JSON object");
    const Json* model = json_find(root, "model");
    if (model == nullptr) return Error(Code::kCorruptInput, "no 'model'");
    NIBBLE_TRY(Normalizer normalizer, Normalizer::parse(json_find(root, "normalizer")));
    NIBBLE_TRY(PreTokenizer pre, PreTokenizer::parse(json_find(root, "pre_tokenizer")));
    NIBBLE_TRY(PostProcessor post, PostProcessor::parse(json_find(root, "post_processor")));
    NIBBLE_TRY(TokenDecoder decoder, TokenDecoder::parse(json_find(root, "decoder")));
    NIBBLE_TRY(std::vector<AddedToken> added, parse_added_tokens(json_find(root, "added_tokens")));
    NIBBLE_TRY(Bpe bpe, Bpe::parse(*model, pre.byte_level()));
    auto impl = std::make_unique<Impl>(std::move(bpe), std::move(normalizer), std::move(pre),
                                       std::move(post), std::move(decoder));
    impl->add_tokens(std::move(added));
    impl->fill_bytes();
    return impl;
  };
  NIBBLE_TRY(std::unique_ptr<Impl> impl, build(), name);
  return Tokenizer(std::move(impl));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_special) const {
  std::string repaired;
  if (!is_valid_utf8(text)) {
    repaired = to_valid_utf8(text);
    text = repaired;
  }
  Lease lease(impl_->contexts);
  Context& context = *lease;
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 8);
  if (add_special) ids = impl_->post_processor.before;
  context.sections.clear();
  impl_->raw_finder.split(text, context.sections);
  for (const Section section : context.sections) {
    if (section.id >= 0) {
      ids.push_back(section.id);
    } else {
      impl_->encode_section(text.substr(section.begin, section.end - section.begin),
                            section.begin == 0, context, ids);
    }
  }
  if (add_special) {
    const auto& after = impl_->post_processor.after;
    ids.insert(ids.end(), after.begin(), after.end());
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  const Impl& impl = *impl_;
  const auto shown = [&](int32_t id) {
    const auto index = static_cast<size_t>(id);
    return id >= 0 && index < impl.tokens.size() && impl.used[index] &&
           !(skip_special && impl.special[index]);
  };
  if (impl.decoder.bytewise()) {
    std::string all;
    for (const int32_t id : ids) {
      if (shown(id)) all += token_bytes(id);
    }
    return is_valid_utf8(all) ? all : to_valid_utf8(all);
  }
  std::vector<std::string> tokens;
  for (const int32_t id : ids) {
    if (shown(id)) tokens.push_back(impl.tokens[static_cast<size_t>(id)]);
  }
  Lease lease(impl.contexts);
  return impl.decoder.decode(std::move(tokens), (*lease).regex);
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  const auto index = static_cast<size_t>(id);
  if (id < 0 || index >= impl_->tokens.size()) return {};
  const size_t begin = impl_->bytes_offset[index];
  return std::string_view(impl_->bytes).substr(begin, impl_->bytes_offset[index + 1] - begin);
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && static_cast<size_t>(id) < impl_->special.size() &&
         impl_->special[static_cast<size_t>(id)];
}

std::optional<int32_t> Tokenizer::token_id(std::string_view content) const {
  int32_t id = impl_->added_ids.find(content);
  if (id < 0) id = impl_->bpe.token_id(content);
  if (id < 0) return std::nullopt;
  return id;
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(impl_->tokens.size()); }

std::string Tokenizer::first_token_bytes(int32_t id) const {
  const auto index = static_cast<size_t>(id);
  if (id < 0 || index >= impl_->tokens.size() || !impl_->used[index]) return {};
  if (impl_->decoder.bytewise()) return std::string(token_bytes(id));
  Lease lease(impl_->contexts);
  return impl_->decoder.bytes_of(impl_->tokens[index], true, (*lease).regex);
}

size_t Tokenizer::strip_budget() const { return impl_->decoder.stripped_start_count(); }

void Tokenizer::strip_start(std::string& text, size_t& budget) const {
  const std::string_view what = impl_->decoder.stripped_start();
  size_t cut = 0;
  while (budget > 0 && cut < text.size()) {
    if (!std::string_view(text).substr(cut).starts_with(what)) {
      budget = 0;
      break;
    }
    cut += what.size();
    --budget;
  }
  text.erase(0, cut);
}

}  // namespace nibble::text
