// The expression half of the parser; jinja_parser.cc does the statements.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "text/jinja_ast.h"
#include "text/jinja_lexer.h"

namespace nibble::text::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

 protected:
  const Token& now() const { return tokens_[pos_]; }
  const Token& ahead() const { return tokens_[pos_ + 1 < tokens_.size() ? pos_ + 1 : pos_]; }
  void next() {
    if (pos_ + 1 < tokens_.size()) ++pos_;
  }
  bool at_op(std::string_view op) const {
    return now().kind == Token::Kind::kOperator && now().text == op;
  }
  bool at_name(std::string_view name) const {
    return now().kind == Token::Kind::kName && now().text == name;
  }
  bool skip_op(std::string_view op) {
    if (!at_op(op)) return false;
    next();
    return true;
  }
  bool skip_name(std::string_view name) {
    if (!at_name(name)) return false;
    next();
    return true;
  }
  Result<void> expect_op(std::string_view op);
  Result<std::string> expect_name();
  Error unexpected(std::string_view wanted) const;

  /// A whole expression, with the inline if.
  Result<ExprPtr> expression();
  /// expression, or several with commas: a tuple.
  Result<ExprPtr> expression_or_tuple();
  /// or-expression: what may follow "in" of a for loop, whose "if" is a filter.
  Result<ExprPtr> or_expression();
  /// | filter(...) chains on `input`, which may be null.
  Result<ExprPtr> filters(ExprPtr input);
  /// Sets depth; an error if the tree is too deep.
  Result<ExprPtr> finish(ExprPtr node) const;
  ExprPtr node(Expr::Kind kind) const;

 private:
  Result<ExprPtr> and_expression();
  Result<ExprPtr> not_expression();
  Result<ExprPtr> comparison();
  Result<ExprPtr> sum();
  Result<ExprPtr> concatenation();
  Result<ExprPtr> product();
  Result<ExprPtr> power();
  Result<ExprPtr> unary(bool with_filters);
  Result<ExprPtr> primary();
  Result<ExprPtr> parenthesized();
  Result<ExprPtr> list();
  Result<ExprPtr> dict();
  Result<ExprPtr> postfix(ExprPtr value);
  Result<ExprPtr> subscript(ExprPtr value);
  Result<void> arguments(Expr& call);
  Result<ExprPtr> filters_and_tests(ExprPtr value);
  Result<ExprPtr> test(ExprPtr value);

  std::vector<Token> tokens_;
  size_t pos_ = 0;
  int nesting_ = 0;
};

}  // namespace nibble::text::jinja
