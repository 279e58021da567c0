#include "text/jinja_parser.h"

#include <array>

#include "text/jinja_expression.h"

namespace nibble::text::jinja {
namespace {

constexpr int kMaxBlocks = 100;  // nested in one another

class Parser : public ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  Result<Block> run() {
    NIBBLE_TRY(Block block, statements({}));
    if (now().kind != Token::Kind::kEnd) return unexpected("the end of the template");
    return block;
  }

 private:
  using Kind = Stmt::Kind;

  std::unique_ptr<Stmt> statement(Kind kind) const {
    auto made = std::make_unique<Stmt>();
    made->kind = kind;
    made->line = now().line;
    return made;
  }

  // Statements up to a block whose name is one of `ends`; then the name is the current token.
  Result<Block> statements(std::initializer_list<std::string_view> ends) {
    if (++blocks_ > kMaxBlocks) {
      return Error(Code::kUnsupported, cat("line ", now().line, ": blocks nested too deep"));
    }
    Block out;
    while (now().kind != Token::Kind::kEnd) {
      if (now().kind == Token::Kind::kText) {
        auto text = statement(Kind::kText);
        text->text = now().text;
        next();
        out.push_back(std::move(text));
      } else if (now().kind == Token::Kind::kPrintBegin) {
        next();
        auto print = statement(Kind::kPrint);
        NIBBLE_TRY(print->expr, expression_or_tuple());
        if (now().kind != Token::Kind::kPrintEnd) return unexpected("'}}'");
        next();
        out.push_back(std::move(print));
      } else {
        next();  // {%
        for (const std::string_view end : ends) {
          if (at_name(end)) {
            --blocks_;
            return out;
          }
        }
        NIBBLE_TRY(block(out));
      }
    }
    if (ends.size() > 0) return unexpected(cat("{% ", *(ends.end() - 1), " %}"));
    --blocks_;
    return out;
  }

  Result<void> block_end() {
    if (now().kind != Token::Kind::kBlockEnd) return unexpected("'%}'");
    next();
    return {};
  }
  Result<void> closing(std::string_view name) {
    if (!skip_name(name)) return unexpected(cat("'", name, "'"));
    return block_end();
  }

  Result<void> block(Block& out) {
    if (now().kind != Token::Kind::kName) return unexpected("a statement");
    const std::string name = now().text;
    if (name == "if") return if_block(out);
    if (name == "for") return for_block(out);
    if (name == "set") return set_block(out);
    if (name == "macro") return macro_block(out);
    if (name == "generation") return generation_block(out);
    if (name == "break" || name == "continue") {
      if (loops_ == 0) return syntax_error(now().line, cat("'", name, "' outside of a loop"));
      out.push_back(statement(name == "break" ? Kind::kBreak : Kind::kContinue));
      next();
      return block_end();
    }
    static constexpr std::array<std::string_view, 14> kOther = {
        "include", "import", "from",  "extends",    "block", "call",      "filter",
        "with",    "do",     "trans", "autoescape", "debug", "pluralize", "blocktrans"};
    for (const std::string_view other : kOther) {
      if (name == other) {
        return Error(Code::kUnsupported, cat("line ", now().line, ": statement '", name, "'"));
      }
    }
    return syntax_error(now().line, cat("unexpected statement '", name.substr(0, 60), "'"));
  }

  Result<void> if_block(Block& out) {
    auto made = statement(Kind::kIf);
    next();
    while (true) {
      NIBBLE_TRY(ExprPtr condition, expression_or_tuple());
      NIBBLE_TRY(block_end());
      NIBBLE_TRY(Block body, statements({"elif", "else", "endif"}));
      made->branches.emplace_back(std::move(condition), std::move(body));
      if (skip_name("elif")) continue;
      if (skip_name("else")) {
        NIBBLE_TRY(block_end());
        NIBBLE_TRY(Block otherwise, statements({"endif"}));
        made->branches.emplace_back(nullptr, std::move(otherwise));
      }
      break;
    }
    out.push_back(std::move(made));
    return closing("endif");
  }

  Result<void> for_block(Block& out) {
    auto made = statement(Kind::kFor);
    next();
    NIBBLE_TRY(targets(*made, false));
    if (!skip_name("in")) return unexpected("'in'");
    NIBBLE_TRY(made->expr, or_expression());
    if (at_op(","))
      return Error(Code::kUnsupported,
                   cat("line ", made->line, ": for over a tuple without parentheses"));
    if (skip_name("if")) {
      NIBBLE_TRY(made->filter, expression());
    }
    if (at_name("recursive")) {
      return Error(Code::kUnsupported, cat("line ", now().line, ": recursive loops"));
    }
    NIBBLE_TRY(block_end());
    ++loops_;
    NIBBLE_TRY(made->body, statements({"else", "endfor"}));
    --loops_;
    if (skip_name("else")) {
      NIBBLE_TRY(block_end());
      NIBBLE_TRY(made->otherwise, statements({"endfor"}));
    }
    out.push_back(std::move(made));
    return closing("endfor");
  }

  // a, b or, where `attributes` are allowed, namespace.a
  Result<void> targets(Stmt& made, bool attributes) {
    const bool parenthesized = skip_op("(");
    while (true) {
      ExprPtr target = node(Expr::Kind::kName);
      NIBBLE_TRY(target->text, expect_name());
      if (attributes && at_op(".")) {
        next();
        ExprPtr attribute = node(Expr::Kind::kAttribute);
        NIBBLE_TRY(attribute->text, expect_name());
        attribute->args.push_back(std::move(target));
        NIBBLE_TRY(target, finish(std::move(attribute)));
      }
      made.targets.push_back(std::move(target));
      if (!skip_op(",")) break;
    }
    if (parenthesized) return expect_op(")");
    return {};
  }

  Result<void> set_block(Block& out) {
    auto made = statement(Kind::kSet);
    next();
    NIBBLE_TRY(targets(*made, true));
    if (skip_op("=")) {
      NIBBLE_TRY(made->expr, expression_or_tuple());
      out.push_back(std::move(made));
      return block_end();
    }
    made->kind = Kind::kSetBlock;
    if (made->targets.size() != 1) return unexpected("'='");
    NIBBLE_TRY(made->expr, filters(nullptr));
    NIBBLE_TRY(block_end());
    NIBBLE_TRY(made->body, statements({"endset"}));
    out.push_back(std::move(made));
    return closing("endset");
  }

  Result<void> macro_block(Block& out) {
    auto made = statement(Kind::kMacro);
    next();
    Macro& macro = made->macro;
    NIBBLE_TRY(macro.name, expect_name());
    NIBBLE_TRY(expect_op("("));
    while (!at_op(")")) {
      NIBBLE_TRY(std::string param, expect_name());
      macro.params.push_back(std::move(param));
      if (skip_op("=")) {
        NIBBLE_TRY(ExprPtr value, expression());
        macro.defaults.push_back(std::move(value));
      } else if (!macro.defaults.empty()) {
        return unexpected("'='");
      }
      if (!at_op(")")) {
        NIBBLE_TRY(expect_op(","));
      }
    }
    next();
    NIBBLE_TRY(block_end());
    const int loops = std::exchange(loops_, 0);
    NIBBLE_TRY(macro.body, statements({"endmacro"}));
    loops_ = loops;
    out.push_back(std::move(made));
    if (!skip_name("endmacro")) return unexpected("'endmacro'");
    if (at_name(out.back()->macro.name)) next();  // {% endmacro name %}
    return block_end();
  }

  // {% generation %} marks what the assistant wrote; it changes no text.
  Result<void> generation_block(Block& out) {
    auto made = statement(Kind::kScope);
    next();
    NIBBLE_TRY(block_end());
    NIBBLE_TRY(made->body, statements({"endgeneration"}));
    out.push_back(std::move(made));
    return closing("endgeneration");
  }

  int blocks_ = 0;
  int loops_ = 0;
};

}  // namespace

Result<Block> parse_template(std::string_view source) {
  NIBBLE_TRY(std::vector<Token> tokens, lex(source));
  return Parser(std::move(tokens)).run();
}

}  // namespace nibble::text::jinja
