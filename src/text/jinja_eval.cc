#include "text/jinja_eval.h"

#include <cmath>
#include <deque>

#include "base/json.h"
#include "text/jinja_arithmetic.h"

namespace nibble::text::jinja {

/// Names of one block. Loops, macros and set blocks have their own; an if has not.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<std::string, Value>> names;

  Value* find(std::string_view name) {
    for (auto& [key, value] : names) {
      if (key == name) return &value;
    }
    return nullptr;
  }
  void set(std::string_view name, const Value& value) {
    if (Value* found = find(name)) {
      *found = value;
    } else {
      names.emplace_back(name, value);
    }
  }
};

namespace {

enum class Flow { kNormal, kBreak, kContinue };

class Evaluator : public Runtime {
 public:
  explicit Evaluator(const Limits& limits) : Runtime(limits), limits_(limits) {}

  Result<std::string> render(const Block& block, const OrderedJson& variables) {
    Scope& context = new_scope(nullptr);
    for (const auto& [name, value] : variables.items()) {
      context.set(name, from_json(value, heap));
    }
    std::string out;
    NIBBLE_TRY(run(block, new_scope(&context), out));
    return out;
  }

  Result<Value> call(const Value& callee, const Arguments& arguments) override {
    if (callee.is_undefined()) return template_error(std::string(callee.undefined_name()));
    if (callee.kind() != Kind::kCallable) {
      return template_error(cat("'", type_name(callee), "' object is not callable"));
    }
    const Callable& callable = callee.as_callable();
    NIBBLE_TRY(spend(1));
    switch (callable.kind) {
      case Callable::Kind::kFunction: return call_function(*this, callable.name, arguments);
      case Callable::Kind::kMethod:
        return call_method(*this, callable.self, callable.name, arguments);
      case Callable::Kind::kMacro: return call_macro(callable, arguments);
    }
    return Value();
  }

 private:
  // Guards the stack: every recursion of the walk passes through one.
  class Depth {
   public:
    explicit Depth(int& count) : count_(++count) {}
    ~Depth() { --count_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;

   private:
    int& count_;
  };
  Result<void> check_depth() {
    if (depth_ > limits_.depth) {
      return Error(Code::kResourceExhausted, "the template nests too deep");
    }
    return spend(1);
  }

  Scope& new_scope(Scope* parent) {
    heap.charge(96);
    scopes_.emplace_back();
    scopes_.back().parent = parent;
    return scopes_.back();
  }

  Result<void> write(std::string_view text, std::string& out) {
    heap.charge(static_cast<int64_t>(text.size()));
    out += text;
    return spend(1 + static_cast<int64_t>(text.size()) / 256);
  }

  Result<Flow> run(const Block& block, Scope& scope, std::string& out) {
    const Depth depth(depth_);
    NIBBLE_TRY(check_depth());
    for (const auto& statement : block) {
      Result<Flow> flow = run_one(*statement, scope, out);
      if (!flow) {
        if (located_) return flow;
        located_ = true;  // the innermost statement names the line
        return flow.error().with_context(cat("line ", statement->line));
      }
      if (*flow != Flow::kNormal) return flow;
    }
    return Flow::kNormal;
  }

  Result<Flow> run_one(const Stmt& statement, Scope& scope, std::string& out) {
    switch (statement.kind) {
      case Stmt::Kind::kText: {
        NIBBLE_TRY(write(statement.text, out));
        return Flow::kNormal;
      }
      case Stmt::Kind::kPrint: {
        NIBBLE_TRY(const Value value, eval(*statement.expr, scope));
        if (value.is_string()) {
          NIBBLE_TRY(write(value.as_string(), out));
        } else {
          NIBBLE_TRY(const std::string printed, text_of(value));
          NIBBLE_TRY(write(printed, out));
        }
        return Flow::kNormal;
      }
      case Stmt::Kind::kIf: return run_if(statement, scope, out);
      case Stmt::Kind::kFor: return run_for(statement, scope, out);
      case Stmt::Kind::kSet: {
        NIBBLE_TRY(const Value value, eval(*statement.expr, scope));
        NIBBLE_TRY(assign(statement.targets, value, scope));
        return Flow::kNormal;
      }
      case Stmt::Kind::kSetBlock: return run_set_block(statement, scope);
      case Stmt::Kind::kMacro: {
        Callable macro;
        macro.kind = Callable::Kind::kMacro;
        macro.name = statement.macro.name;
        macro.macro = &statement.macro;
        macro.scope = &scope;
        scope.set(statement.macro.name, heap.callable(std::move(macro)));
        return Flow::kNormal;
      }
      case Stmt::Kind::kScope: return run(statement.body, new_scope(&scope), out);
      case Stmt::Kind::kBreak: return Flow::kBreak;
      case Stmt::Kind::kContinue: return Flow::kContinue;
    }
    return Flow::kNormal;
  }

  Result<Flow> run_if(const Stmt& statement, Scope& scope, std::string& out) {
    for (const auto& [condition, body] : statement.branches) {
      if (condition) {
        NIBBLE_TRY(const Value value, eval(*condition, scope));
        if (!truthy(value)) continue;
      }
      return run(body, scope, out);
    }
    return Flow::kNormal;
  }

  Result<Flow> run_for(const Stmt& statement, Scope& scope, std::string& out) {
    NIBBLE_TRY(const Value iterated, eval(*statement.expr, scope));
    NIBBLE_TRY(std::vector<Value> items, items_of(iterated));
    if (statement.filter) {
      std::vector<Value> kept;
      for (const Value& item : items) {
        Scope& inner = new_scope(&scope);
        NIBBLE_TRY(assign(statement.targets, item, inner));
        NIBBLE_TRY(const Value keep, eval(*statement.filter, inner));
        if (truthy(keep)) kept.push_back(item);
      }
      items = std::move(kept);
    }
    if (items.empty()) return run(statement.otherwise, new_scope(&scope), out);
    LoopState& loop = heap.loop();
    loop.items = std::move(items);
    Scope& inner = new_scope(&scope);  // emptied for each round, unless a macro keeps it
    for (loop.index = 0; loop.index < loop.items.size(); ++loop.index) {
      NIBBLE_TRY(spend(1));
      inner.names.clear();
      inner.set("loop", Value::loop(&loop));
      NIBBLE_TRY(assign(statement.targets, loop.items[loop.index], inner));
      NIBBLE_TRY(const Flow flow, run(statement.body, inner, out));
      if (flow == Flow::kBreak) break;
    }
    return Flow::kNormal;
  }

  Result<Flow> run_set_block(const Stmt& statement, Scope& scope) {
    std::string captured;
    NIBBLE_TRY(run(statement.body, new_scope(&scope), captured));
    Value value;
    NIBBLE_TRY(value, text(std::move(captured)));
    if (statement.expr) {
      NIBBLE_TRY(value, eval_filter(*statement.expr, scope, &value));
    }
    NIBBLE_TRY(assign(statement.targets, value, scope));
    return Flow::kNormal;
  }

  Result<void> assign(const std::vector<ExprPtr>& targets, const Value& value, Scope& scope) {
    if (targets.size() == 1) return assign_one(*targets[0], value, scope);
    NIBBLE_TRY(const std::vector<Value> items, items_of(value));
    if (items.size() != targets.size()) {
      return template_error(cat("cannot unpack ", items.size(), " values into ", targets.size()));
    }
    for (size_t i = 0; i < items.size(); ++i) {
      NIBBLE_TRY(assign_one(*targets[i], items[i], scope));
    }
    return {};
  }

  Result<void> assign_one(const Expr& target, const Value& value, Scope& scope) {
    heap.charge(64);
    if (target.kind == Expr::Kind::kName) {
      scope.set(target.text, value);
      return {};
    }
    const Value owner = look_up(target.args[0]->text, scope);
    if (owner.kind() != Kind::kNamespace) {
      return template_error(
          cat("cannot set attribute '", target.text, "' of a value that is no namespace"));
    }
    NIBBLE_TRY(const Value key, text(target.text));
    owner.as_dict().set(key, value);
    return {};
  }

  Value look_up(std::string_view name, Scope& scope) {
    for (Scope* at = &scope; at != nullptr; at = at->parent) {
      if (const Value* found = at->find(name)) return *found;
    }
    if (is_function(name)) {
      Callable function;
      function.name = name;
      return heap.callable(std::move(function));
    }
    return heap.undefined(cat("'", name.substr(0, 100), "' is undefined"));
  }

  Result<Value> call_macro(const Callable& callable, const Arguments& arguments) {
    const Macro& macro = *callable.macro;
    Scope& scope = new_scope(callable.scope);
    if (arguments.positional.size() > macro.params.size()) {
      return template_error(
          cat("macro '", macro.name, "' takes not more than ", macro.params.size(), " arguments"));
    }
    for (const auto& [name, value] : arguments.named) {
      bool known = false;
      for (const std::string& param : macro.params) known = known || param == name;
      if (!known) {
        return template_error(cat("macro '", macro.name, "' takes no argument '", name, "'"));
      }
    }
    const size_t required = macro.params.size() - macro.defaults.size();
    for (size_t i = 0; i < macro.params.size(); ++i) {
      const std::string& param = macro.params[i];
      Value value = arguments.get(i, param);
      if (!arguments.has(i, param)) {
        if (i >= required) {
          NIBBLE_TRY(value, eval(*macro.defaults[i - required], scope));
        } else {
          value = heap.undefined(cat("parameter '", param, "' was not provided"));
        }
      }
      scope.set(param, value);
    }
    std::string out;
    NIBBLE_TRY(run(macro.body, scope, out));
    return text(std::move(out));
  }

  Result<Value> eval(const Expr& expr, Scope& scope) {
    const Depth depth(depth_);
    NIBBLE_TRY(check_depth());
    switch (expr.kind) {
      case Expr::Kind::kString: return Value::string(&expr.text);
      case Expr::Kind::kInt: return Value::integer(expr.integer);
      case Expr::Kind::kFloat: return Value::number(expr.number);
      case Expr::Kind::kBool: return Value::boolean(expr.integer != 0);
      case Expr::Kind::kNone: return Value::none();
      case Expr::Kind::kName: return look_up(expr.text, scope);
      case Expr::Kind::kList:
      case Expr::Kind::kTuple: return eval_list(expr, scope);
      case Expr::Kind::kDict: return eval_dict(expr, scope);
      case Expr::Kind::kAttribute: {
        NIBBLE_TRY(const Value owner, eval(*expr.args[0], scope));
        return get_attribute(*this, owner, expr.text);
      }
      case Expr::Kind::kItem: {
        NIBBLE_TRY(const Value owner, eval(*expr.args[0], scope));
        NIBBLE_TRY(const Value key, eval(*expr.args[1], scope));
        return get_item(*this, owner, key);
      }
      case Expr::Kind::kSlice: return eval_slice(expr, scope);
      case Expr::Kind::kCall: {
        NIBBLE_TRY(const Value callee, eval(*expr.args[0], scope));
        NIBBLE_TRY(const Arguments arguments, eval_arguments(expr, scope));
        return call(callee, arguments);
      }
      case Expr::Kind::kFilter: return eval_filter(expr, scope, nullptr);
      case Expr::Kind::kTest: {
        NIBBLE_TRY(const Value input, eval(*expr.args[0], scope));
        NIBBLE_TRY(const Arguments arguments, eval_arguments(expr, scope));
        NIBBLE_TRY(const bool holds, apply_test(*this, expr.text, input, arguments));
        return Value::boolean(holds);
      }
      default: return eval_operator(expr, scope);
    }
  }

  Result<Value> eval_operator(const Expr& expr, Scope& scope) {
    if (expr.kind == Expr::Kind::kConcat) return eval_concat(expr, scope);
    if (expr.kind == Expr::Kind::kCompare) return eval_compare(expr, scope);
    if (expr.kind == Expr::Kind::kCondition) {
      NIBBLE_TRY(const Value condition, eval(*expr.args[1], scope));
      if (truthy(condition)) return eval(*expr.args[0], scope);
      if (expr.args[2]) return eval(*expr.args[2], scope);
      return heap.undefined("the inline if has no else");
    }
    NIBBLE_TRY(const Value left, eval(*expr.args[0], scope));
    switch (expr.kind) {
      case Expr::Kind::kNot: return Value::boolean(!truthy(left));
      case Expr::Kind::kNegate: return negate(left);
      case Expr::Kind::kPlus:
        if (!left.is_number()) return template_error("bad operand for unary +");
        return left.kind() == Kind::kBool ? Value::integer(left.as_int()) : left;
      case Expr::Kind::kAnd:
        if (!truthy(left)) return left;
        return eval(*expr.args[1], scope);
      case Expr::Kind::kOr:
        if (truthy(left)) return left;
        return eval(*expr.args[1], scope);
      default: break;
    }
    NIBBLE_TRY(const Value right, eval(*expr.args[1], scope));
    return arithmetic(*this, expr.text, left, right);
  }

  Result<Value> eval_concat(const Expr& expr, Scope& scope) {
    std::string out;
    for (const ExprPtr& part : expr.args) {
      NIBBLE_TRY(const Value value, eval(*part, scope));
      NIBBLE_TRY(const std::string piece, text_of(value));
      out += piece;
    }
    return text(std::move(out));
  }

  Result<Value> eval_compare(const Expr& expr, Scope& scope) {
    Value left;
    NIBBLE_TRY(left, eval(*expr.args[0], scope));
    for (size_t i = 0; i < expr.ops.size(); ++i) {
      NIBBLE_TRY(const Value right, eval(*expr.args[i + 1], scope));
      const std::string& op = expr.ops[i];
      bool holds = false;
      if (op == "==" || op == "!=") {
        holds = equal(left, right) == (op == "==");
      } else if (op == "in" || op == "not in") {
        NIBBLE_TRY(const bool inside, contains(*this, right, left));
        holds = inside == (op == "in");
      } else {
        if (left.is_undefined()) return template_error(std::string(left.undefined_name()));
        if (right.is_undefined()) return template_error(std::string(right.undefined_name()));
        NIBBLE_TRY(const int order, compare(left, right));
        holds = op == "<"    ? order < 0
                : op == ">"  ? order > 0
                : op == "<=" ? order <= 0
                             : order >= 0;
        const bool nan = std::isnan(left.is_number() ? left.as_double() : 0.0) ||
                         std::isnan(right.is_number() ? right.as_double() : 0.0);
        if (nan) holds = false;
      }
      if (!holds) return Value::boolean(false);
      left = right;
    }
    return Value::boolean(true);
  }

  Result<Value> eval_list(const Expr& expr, Scope& scope) {
    std::vector<Value> items;
    for (const ExprPtr& arg : expr.args) {
      NIBBLE_TRY(const Value item, eval(*arg, scope));
      items.push_back(item);
    }
    return heap.list(std::move(items), expr.kind == Expr::Kind::kList ? Kind::kList : Kind::kTuple);
  }

  Result<Value> eval_dict(const Expr& expr, Scope& scope) {
    DictData& dict = heap.dict();
    for (size_t i = 0; i + 1 < expr.args.size(); i += 2) {
      NIBBLE_TRY(const Value key, eval(*expr.args[i], scope));
      NIBBLE_TRY(const Value value, eval(*expr.args[i + 1], scope));
      const std::string spelled = DictData::key_text(key);
      if (spelled.empty()) {
        return template_error(cat("unhashable type: '", type_name(key), "'"));
      }
      heap.charge(static_cast<int64_t>(spelled.size()) + 96);
      dict.set(key, value);
    }
    return Value::dict(&dict);
  }

  Result<Value> eval_slice(const Expr& expr, Scope& scope) {
    NIBBLE_TRY(const Value owner, eval(*expr.args[0], scope));
    Value bounds[3];
    for (size_t i = 0; i < 3; ++i) {
      if (!expr.args[i + 1]) {
        bounds[i] = Value::none();
        continue;
      }
      NIBBLE_TRY(bounds[i], eval(*expr.args[i + 1], scope));
    }
    return slice(*this, owner, bounds[0], bounds[1], bounds[2]);
  }

  // Arguments of a call, filter or test; args[0] is what it is applied to.
  Result<Arguments> eval_arguments(const Expr& expr, Scope& scope) {
    Arguments arguments;
    for (size_t i = 1; i < expr.args.size(); ++i) {
      NIBBLE_TRY(const Value value, eval(*expr.args[i], scope));
      arguments.positional.push_back(value);
    }
    for (const auto& [name, argument] : expr.kwargs) {
      NIBBLE_TRY(const Value value, eval(*argument, scope));
      arguments.named.emplace_back(name, value);
    }
    return arguments;
  }

  // `captured` stands for the missing input at the start of the chain of a set block.
  Result<Value> eval_filter(const Expr& expr, Scope& scope, const Value* captured) {
    const Depth depth(depth_);
    NIBBLE_TRY(check_depth());
    Value input;
    if (!expr.args[0]) {
      input = *captured;
    } else if (captured != nullptr) {
      NIBBLE_TRY(input, eval_filter(*expr.args[0], scope, captured));
    } else {
      NIBBLE_TRY(input, eval(*expr.args[0], scope));
    }
    NIBBLE_TRY(const Arguments arguments, eval_arguments(expr, scope));
    return apply_filter(*this, expr.text, input, arguments);
  }

  Limits limits_;
  int depth_ = 0;
  bool located_ = false;
  std::deque<Scope> scopes_;
};

}  // namespace

Result<std::string> render_template(const Block& block, const OrderedJson& variables,
                                    const Limits& limits) {
  if (!variables.is_object()) {
    return Error(Code::kInvalidArgument, "template variables are no JSON object");
  }
  Evaluator evaluator(limits);
  return evaluator.render(block, variables);
}

}  // namespace nibble::text::jinja
