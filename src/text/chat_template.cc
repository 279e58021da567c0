#include "text/chat_template.h"

#include "base/file.h"
#include "base/json.h"
#include "text/jinja_eval.h"
#include "text/jinja_parser.h"

namespace nibble::text {

struct ChatTemplate::Impl {
  jinja::Block block;
};

ChatTemplate::ChatTemplate(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

Result<ChatTemplate> ChatTemplate::parse(std::string_view source) {
  auto impl = std::make_unique<Impl>();
  NIBBLE_TRY(impl->block, jinja::parse_template(source), "chat template");
  return ChatTemplate(std::move(impl));
}

// "chat_template" may also be a list of named templates; "default" is then the one for chat.
Result<ChatTemplate> ChatTemplate::open(const std::string& directory) {
  constexpr int64_t kMaxBytes = 64 * 1024 * 1024;
  const std::string file = directory + "/chat_template.jinja";
  if (file_exists(file)) {
    NIBBLE_TRY(const std::string source, read_text_file(file, kMaxBytes));
    return parse(source);
  }
  const std::string config_path = directory + "/tokenizer_config.json";
  if (!file_exists(config_path)) {
    return Error(Code::kNotFound, cat("no chat template: neither ", file, " nor ", config_path));
  }
  NIBBLE_TRY(const Json config, read_json_file(config_path));
  const Json* found = json_find(config, "chat_template");
  if (found != nullptr && found->is_array()) {
    const Json* named = nullptr;
    for (const Json& entry : *found) {
      NIBBLE_TRY(const std::string name, json_string(entry, "name", ""), config_path);
      if (name == "default") named = json_find(entry, "template");
    }
    found = named;
  }
  if (found == nullptr) return Error(Code::kNotFound, cat(config_path, ": no 'chat_template'"));
  if (!found->is_string()) {
    return Error(Code::kCorruptInput, cat(config_path, ": 'chat_template' is no string"));
  }
  return parse(found->get_ref<const std::string&>());
}

Result<std::string> ChatTemplate::render(const OrderedJson& variables) const {
  return jinja::render_template(impl_->block, variables);
}

}  // namespace nibble::text
