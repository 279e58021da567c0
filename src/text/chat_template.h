// Chat templates: the Jinja subset that Hugging Face chat_template files use, rendered without
// executing anything but the template.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/json_fwd.h"
#include "base/result.h"

namespace nibble::text {

class ChatTemplate {
 public:
  /// Errors: kCorruptInput with line number; kUnsupported naming a construct not implemented.
  static Result<ChatTemplate> parse(std::string_view source);
  /// chat_template.jinja, or "chat_template" of tokenizer_config.json, of a model folder.
  static Result<ChatTemplate> open(const std::string& directory);
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  /// variables: {"messages": [...], "add_generation_prompt": true, "bos_token": ..., "tools": ...}.
  /// raise_exception('...') in the template comes back as kInvalidArgument with its text.
  Result<std::string> render(const OrderedJson& variables) const;

 private:
  struct Impl;
  explicit ChatTemplate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace nibble::text
