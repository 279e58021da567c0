#include "text/jinja_expression.h"

#include <algorithm>

namespace nibble::text::jinja {
namespace {

// Trees deeper than this would cost the stack of whoever walks them.
constexpr int kMaxDepth = 200;

using Kind = Expr::Kind;

// Counts open recursions of the parser.
class Nesting {
 public:
  explicit Nesting(int& count) : count_(++count) {}
  ~Nesting() { --count_; }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;
  bool too_deep() const { return count_ > kMaxDepth / 2; }

 private:
  int& count_;
};

}  // namespace

Error ExpressionParser::unexpected(std::string_view wanted) const {
  std::string found;
  switch (now().kind) {
    case Token::Kind::kText: found = "text"; break;
    case Token::Kind::kBlockBegin: found = "{%"; break;
    case Token::Kind::kBlockEnd: found = "%}"; break;
    case Token::Kind::kPrintBegin: found = "{{"; break;
    case Token::Kind::kPrintEnd: found = "}}"; break;
    case Token::Kind::kEnd: found = "the end of the template"; break;
    default: found = now().text.substr(0, 60); break;
  }
  return syntax_error(now().line, cat("expected ", wanted, ", found '", found, "'"));
}

Result<void> ExpressionParser::expect_op(std::string_view op) {
  if (!skip_op(op)) return unexpected(cat("'", op, "'"));
  return {};
}

Result<std::string> ExpressionParser::expect_name() {
  if (now().kind != Token::Kind::kName) return unexpected("a name");
  std::string name = now().text;
  next();
  return name;
}

ExprPtr ExpressionParser::node(Kind kind) const {
  auto made = std::make_unique<Expr>();
  made->kind = kind;
  made->line = now().line;
  return made;
}

Result<ExprPtr> ExpressionParser::finish(ExprPtr made) const {
  int deepest = 0;
  for (const ExprPtr& arg : made->args) {
    if (arg) deepest = std::max(deepest, arg->depth);
  }
  for (const auto& [name, arg] : made->kwargs) deepest = std::max(deepest, arg->depth);
  made->depth = deepest + 1;
  if (made->depth > kMaxDepth) {
    return Error(Code::kUnsupported,
                 cat("line ", made->line, ": an expression nested deeper than ", kMaxDepth));
  }
  return made;
}

Result<ExprPtr> ExpressionParser::expression() {
  const Nesting nesting(nesting_);
  if (nesting.too_deep()) {
    return Error(Code::kUnsupported,
                 cat("line ", now().line, ": expressions nested deeper than ", kMaxDepth / 2));
  }
  ExprPtr value;
  NIBBLE_TRY(value, or_expression());
  while (at_name("if")) {
    ExprPtr condition = node(Kind::kCondition);
    next();
    condition->args.resize(3);
    condition->args[0] = std::move(value);
    NIBBLE_TRY(condition->args[1], or_expression());
    if (skip_name("else")) {
      NIBBLE_TRY(condition->args[2], expression());
    }
    NIBBLE_TRY(value, finish(std::move(condition)));
  }
  return value;
}

Result<ExprPtr> ExpressionParser::expression_or_tuple() {
  ExprPtr first;
  NIBBLE_TRY(first, expression());
  if (!at_op(",")) return first;
  ExprPtr tuple = node(Kind::kTuple);
  tuple->args.push_back(std::move(first));
  while (skip_op(",")) {
    const bool ends = now().kind == Token::Kind::kBlockEnd ||
                      now().kind == Token::Kind::kPrintEnd || at_op(")") || at_op("=");
    if (ends) break;
    NIBBLE_TRY(ExprPtr item, expression());
    tuple->args.push_back(std::move(item));
  }
  return finish(std::move(tuple));
}

Result<ExprPtr> ExpressionParser::or_expression() {
  ExprPtr left;
  NIBBLE_TRY(left, and_expression());
  while (at_name("or")) {
    ExprPtr both = node(Kind::kOr);
    next();
    both->args.push_back(std::move(left));
    NIBBLE_TRY(ExprPtr right, and_expression());
    both->args.push_back(std::move(right));
    NIBBLE_TRY(left, finish(std::move(both)));
  }
  return left;
}

Result<ExprPtr> ExpressionParser::and_expression() {
  ExprPtr left;
  NIBBLE_TRY(left, not_expression());
  while (at_name("and")) {
    ExprPtr both = node(Kind::kAnd);
    next();
    both->args.push_back(std::move(left));
    NIBBLE_TRY(ExprPtr right, not_expression());
    both->args.push_back(std::move(right));
    NIBBLE_TRY(left, finish(std::move(both)));
  }
  return left;
}

Result<ExprPtr> ExpressionParser::not_expression() {
  if (!at_name("not")) return comparison();
  const Nesting nesting(nesting_);
  if (nesting.too_deep()) return syntax_error(now().line, "too many 'not'");
  ExprPtr negation = node(Kind::kNot);
  next();
  NIBBLE_TRY(ExprPtr value, not_expression());
  negation->args.push_back(std::move(value));
  return finish(std::move(negation));
}

Result<ExprPtr> ExpressionParser::comparison() {
  ExprPtr first;
  NIBBLE_TRY(first, sum());
  ExprPtr chain = node(Kind::kCompare);
  while (true) {
    std::string op;
    if (now().kind == Token::Kind::kOperator &&
        (at_op("==") || at_op("!=") || at_op("<") || at_op(">") || at_op("<=") || at_op(">="))) {
      op = now().text;
      next();
    } else if (skip_name("in")) {
      op = "in";
    } else if (at_name("not") && ahead().kind == Token::Kind::kName && ahead().text == "in") {
      next();
      next();
      op = "not in";
    } else {
      break;
    }
    if (chain->args.empty()) chain->args.push_back(std::move(first));
    chain->ops.push_back(op);
    NIBBLE_TRY(ExprPtr right, sum());
    chain->args.push_back(std::move(right));
  }
  if (chain->args.empty()) return first;
  return finish(std::move(chain));
}

Result<ExprPtr> ExpressionParser::sum() {
  ExprPtr left;
  NIBBLE_TRY(left, concatenation());
  while (at_op("+") || at_op("-")) {
    ExprPtr both = node(Kind::kArithmetic);
    both->text = now().text;
    next();
    both->args.push_back(std::move(left));
    NIBBLE_TRY(ExprPtr right, concatenation());
    both->args.push_back(std::move(right));
    NIBBLE_TRY(left, finish(std::move(both)));
  }
  return left;
}

Result<ExprPtr> ExpressionParser::concatenation() {
  ExprPtr first;
  NIBBLE_TRY(first, product());
  if (!at_op("~")) return first;
  ExprPtr all = node(Kind::kConcat);
  all->args.push_back(std::move(first));
  while (skip_op("~")) {
    NIBBLE_TRY(ExprPtr part, product());
    all->args.push_back(std::move(part));
  }
  return finish(std::move(all));
}

Result<ExprPtr> ExpressionParser::product() {
  ExprPtr left;
  NIBBLE_TRY(left, power());
  while (at_op("*") || at_op("/") || at_op("//") || at_op("%")) {
    ExprPtr both = node(Kind::kArithmetic);
    both->text = now().text;
    next();
    both->args.push_back(std::move(left));
    NIBBLE_TRY(ExprPtr right, power());
    both->args.push_back(std::move(right));
    NIBBLE_TRY(left, finish(std::move(both)));
  }
  return left;
}

Result<ExprPtr> ExpressionParser::power() {
  ExprPtr left;
  NIBBLE_TRY(left, unary(true));
  while (at_op("**")) {
    ExprPtr both = node(Kind::kArithmetic);
    both->text = now().text;
    next();
    both->args.push_back(std::move(left));
    NIBBLE_TRY(ExprPtr right, unary(true));
    both->args.push_back(std::move(right));
    NIBBLE_TRY(left, finish(std::move(both)));
  }
  return left;
}

Result<ExprPtr> ExpressionParser::unary(bool with_filters) {
  ExprPtr value;
  if (at_op("-") || at_op("+")) {
    const Nesting nesting(nesting_);
    if (nesting.too_deep()) return syntax_error(now().line, "too many signs");
    ExprPtr sign = node(at_op("-") ? Kind::kNegate : Kind::kPlus);
    next();
    NIBBLE_TRY(ExprPtr operand, unary(false));
    sign->args.push_back(std::move(operand));
    NIBBLE_TRY(value, finish(std::move(sign)));
  } else {
    NIBBLE_TRY(value, primary());
  }
  NIBBLE_TRY(value, postfix(std::move(value)));
  if (with_filters) return filters_and_tests(std::move(value));
  return value;
}

Result<ExprPtr> ExpressionParser::primary() {
  ExprPtr made;
  switch (now().kind) {
    case Token::Kind::kName: {
      const std::string& name = now().text;
      if (name == "true" || name == "True" || name == "false" || name == "False") {
        made = node(Kind::kBool);
        made->integer = name == "true" || name == "True" ? 1 : 0;
      } else if (name == "none" || name == "None") {
        made = node(Kind::kNone);
      } else {
        made = node(Kind::kName);
        made->text = name;
      }
      next();
      return made;
    }
    case Token::Kind::kString:
      made = node(Kind::kString);
      while (now().kind == Token::Kind::kString) {  // neighbours are one string
        made->text += now().text;
        next();
      }
      return made;
    case Token::Kind::kInt:
      made = node(Kind::kInt);
      made->integer = now().integer;
      next();
      return made;
    case Token::Kind::kFloat:
      made = node(Kind::kFloat);
      made->number = now().number;
      next();
      return made;
    default: break;
  }
  if (at_op("(")) return parenthesized();
  if (at_op("[")) return list();
  if (at_op("{")) return dict();
  return unexpected("an expression");
}

Result<ExprPtr> ExpressionParser::parenthesized() {
  NIBBLE_TRY(expect_op("("));
  if (at_op(")")) {
    ExprPtr empty = node(Kind::kTuple);
    next();
    return empty;
  }
  NIBBLE_TRY(ExprPtr inside, expression_or_tuple());
  NIBBLE_TRY(expect_op(")"));
  return inside;
}

Result<ExprPtr> ExpressionParser::list() {
  ExprPtr made = node(Kind::kList);
  NIBBLE_TRY(expect_op("["));
  while (!at_op("]")) {
    NIBBLE_TRY(ExprPtr item, expression());
    made->args.push_back(std::move(item));
    if (!at_op("]")) {
      NIBBLE_TRY(expect_op(","));
    }
  }
  next();
  return finish(std::move(made));
}

Result<ExprPtr> ExpressionParser::dict() {
  ExprPtr made = node(Kind::kDict);
  NIBBLE_TRY(expect_op("{"));
  while (!at_op("}")) {
    NIBBLE_TRY(ExprPtr key, expression());
    NIBBLE_TRY(expect_op(":"));
    NIBBLE_TRY(ExprPtr value, expression());
    made->args.push_back(std::move(key));
    made->args.push_back(std::move(value));
    if (!at_op("}")) {
      NIBBLE_TRY(expect_op(","));
    }
  }
  next();
  return finish(std::move(made));
}

Result<ExprPtr> ExpressionParser::postfix(ExprPtr value) {
  while (true) {
    if (at_op(".")) {
      next();
      if (now().kind == Token::Kind::kInt) {  // foo.0 is foo[0]
        ExprPtr item = node(Kind::kItem);
        ExprPtr index = node(Kind::kInt);
        index->integer = now().integer;
        next();
        item->args.push_back(std::move(value));
        item->args.push_back(std::move(index));
        NIBBLE_TRY(value, finish(std::move(item)));
        continue;
      }
      ExprPtr attribute = node(Kind::kAttribute);
      NIBBLE_TRY(attribute->text, expect_name());
      attribute->args.push_back(std::move(value));
      NIBBLE_TRY(value, finish(std::move(attribute)));
    } else if (at_op("[")) {
      NIBBLE_TRY(value, subscript(std::move(value)));
    } else if (at_op("(")) {
      ExprPtr call = node(Kind::kCall);
      call->args.push_back(std::move(value));
      NIBBLE_TRY(arguments(*call));
      NIBBLE_TRY(value, finish(std::move(call)));
    } else {
      return value;
    }
  }
}

Result<ExprPtr> ExpressionParser::subscript(ExprPtr value) {
  ExprPtr made = node(Kind::kSlice);
  NIBBLE_TRY(expect_op("["));
  made->args.resize(4);
  made->args[0] = std::move(value);
  size_t part = 1;
  bool colon = false;
  while (!at_op("]")) {
    if (skip_op(":")) {
      colon = true;
      if (++part > 3) return unexpected("']'");
      continue;
    }
    if (made->args[part]) return unexpected("':' or ']'");
    NIBBLE_TRY(made->args[part], expression());
  }
  next();
  if (!colon) {
    if (!made->args[1]) return syntax_error(made->line, "an empty subscript");
    made->kind = Kind::kItem;
    made->args.resize(2);
  }
  return finish(std::move(made));
}

Result<void> ExpressionParser::arguments(Expr& call) {
  NIBBLE_TRY(expect_op("("));
  while (!at_op(")")) {
    if (at_op("*") || at_op("**")) {
      return Error(Code::kUnsupported, cat("line ", now().line, ": * and ** arguments"));
    }
    if (now().kind == Token::Kind::kName && ahead().kind == Token::Kind::kOperator &&
        ahead().text == "=") {
      const std::string name = now().text;
      next();
      next();
      NIBBLE_TRY(ExprPtr argument, expression());
      call.kwargs.emplace_back(name, std::move(argument));
    } else {
      if (!call.kwargs.empty()) return unexpected("a named argument");
      NIBBLE_TRY(ExprPtr argument, expression());
      call.args.push_back(std::move(argument));
    }
    if (!at_op(")")) {
      NIBBLE_TRY(expect_op(","));
    }
  }
  next();
  return {};
}

Result<ExprPtr> ExpressionParser::filters(ExprPtr input) {
  while (at_op("|")) {
    next();
    ExprPtr filter = node(Kind::kFilter);
    NIBBLE_TRY(filter->text, expect_name());
    filter->args.push_back(std::move(input));
    if (at_op("(")) {
      NIBBLE_TRY(arguments(*filter));
    }
    NIBBLE_TRY(input, finish(std::move(filter)));
  }
  return input;
}

Result<ExprPtr> ExpressionParser::filters_and_tests(ExprPtr value) {
  while (true) {
    if (at_op("|")) {
      NIBBLE_TRY(value, filters(std::move(value)));
    } else if (at_name("is")) {
      NIBBLE_TRY(value, test(std::move(value)));
    } else if (at_op("(")) {  // the result of a filter or test, called
      ExprPtr call = node(Kind::kCall);
      call->args.push_back(std::move(value));
      NIBBLE_TRY(arguments(*call));
      NIBBLE_TRY(value, finish(std::move(call)));
    } else {
      return value;
    }
  }
}

Result<ExprPtr> ExpressionParser::test(ExprPtr value) {
  ExprPtr made = node(Kind::kTest);
  next();
  const bool negated = skip_name("not");
  NIBBLE_TRY(made->text, expect_name());
  made->args.push_back(std::move(value));
  if (at_op("(")) {
    NIBBLE_TRY(arguments(*made));
  } else {
    const bool name_argument = now().kind == Token::Kind::kName && !at_name("else") &&
                               !at_name("or") && !at_name("and") && !at_name("if") &&
                               !at_name("is") && !at_name("not") && !at_name("in");
    if (name_argument || now().kind == Token::Kind::kString || now().kind == Token::Kind::kInt ||
        now().kind == Token::Kind::kFloat || at_op("[") || at_op("{")) {
      ExprPtr argument;
      NIBBLE_TRY(argument, primary());
      NIBBLE_TRY(argument, postfix(std::move(argument)));
      made->args.push_back(std::move(argument));
    }
  }
  NIBBLE_TRY(made, finish(std::move(made)));
  if (!negated) return made;
  ExprPtr negation = node(Kind::kNot);
  negation->args.push_back(std::move(made));
  return finish(std::move(negation));
}

}  // namespace nibble::text::jinja
