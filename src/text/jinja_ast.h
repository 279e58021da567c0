// What a template is after parsing. Immutable, so one parsed template renders in many threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace nibble::text::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

struct Expr {
  enum class Kind {
    kString,
    kInt,
    kFloat,
    kBool,
    kNone,  // literals
    kName,
    kList,
    kTuple,      // args
    kDict,       // args: key, value, key, value...
    kAttribute,  // args[0].text
    kItem,       // args[0][args[1]]
    kSlice,      // args[0][args[1]:args[2]:args[3]]; null where left out
    kCall,       // args[0](args[1]..., kwargs)
    kFilter,     // args[0] | text(args[1]..., kwargs); args[0] is null for the body of a set
    kTest,       // args[0] is text(args[1]...)
    kNot,
    kNegate,
    kPlus,
    kAnd,
    kOr,
    kArithmetic,  // args[0] text args[1]
    kConcat,      // args joined as text
    kCompare,     // args[0] ops[0] args[1] ops[1] args[2]...
    kCondition,   // args[0] if args[1] else args[2], which may be null
  };
  Kind kind = Kind::kNone;
  int line = 0;
  int depth = 1;  // of the tree below, which recursion follows
  std::string text;
  int64_t integer = 0;
  double number = 0;
  std::vector<ExprPtr> args;
  std::vector<std::pair<std::string, ExprPtr>> kwargs;
  std::vector<std::string> ops;
};

struct Stmt;
using Block = std::vector<std::unique_ptr<Stmt>>;

struct Macro {
  std::string name;
  std::vector<std::string> params;
  std::vector<ExprPtr> defaults;  // of the last params
  Block body;
};

struct Stmt {
  enum class Kind {
    kText,      // text
    kPrint,     // expr
    kIf,        // branches: condition (null for else) and block
    kFor,       // for targets in expr [if filter] body else otherwise
    kSet,       // targets = expr
    kSetBlock,  // targets[0] = body | expr (a filter chain, or null)
    kMacro,
    kScope,  // body, with names of its own
    kBreak,
    kContinue,
  };
  Kind kind = Kind::kText;
  int line = 0;
  std::string text;
  ExprPtr expr;
  ExprPtr filter;
  std::vector<ExprPtr> targets;  // kName, or kAttribute of a name (namespace.attribute)
  std::vector<std::pair<ExprPtr, Block>> branches;
  Block body;
  Block otherwise;
  Macro macro;
};

}  // namespace nibble::text::jinja
