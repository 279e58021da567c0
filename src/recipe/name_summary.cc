#include "recipe/name_summary.h"

#include <set>
#include <string_view>
#include <unordered_map>

#include "base/cat.h"

namespace nibble::recipe {
namespace {

constexpr size_t kMaxRanges = 8;

struct Group {
  std::vector<std::string> literals;  // text between the numbers, one more than slots
  std::vector<std::set<int64_t>> slots;
  int64_t count = 0;
};

/// Splits at dotted components that are numbers of at most 9 digits: literals and numbers.
void split(std::string_view name, std::vector<std::string>& literals,
           std::vector<int64_t>& numbers) {
  literals.assign(1, "");
  numbers.clear();
  size_t at = 0;
  while (true) {
    const size_t dot = name.find('.', at);
    const std::string_view part = name.substr(at, dot == name.npos ? name.npos : dot - at);
    const bool number = !part.empty() && part.size() <= 9 &&
                        part.find_first_not_of("0123456789") == part.npos &&
                        (part.size() == 1 || part[0] != '0');
    if (number) {
      numbers.push_back(std::stoll(std::string(part)));
      literals.emplace_back();
    } else {
      literals.back() += part;
    }
    if (dot == name.npos) return;
    literals.back() += '.';
    at = dot + 1;
  }
}

std::string set_text(const std::set<int64_t>& values) {
  if (values.size() == 1) return cat(*values.begin());
  std::string out = "{";
  size_t ranges = 0;
  for (auto it = values.begin(); it != values.end();) {
    const int64_t first = *it;
    int64_t last = first;
    for (++it; it != values.end() && *it == last + 1; ++it) last = *it;
    if (ranges++ == kMaxRanges) return cat(out, ",..", *values.rbegin(), "}");
    if (ranges > 1) out += ',';
    out += first == last ? cat(first) : cat(first, "..", last);
  }
  return out + "}";
}

}  // namespace

std::vector<NamePattern> summarize_names(const std::vector<std::string>& names) {
  std::vector<Group> groups;
  std::unordered_map<std::string, size_t> by_template;
  std::vector<std::string> literals;
  std::vector<int64_t> numbers;
  for (const std::string& name : names) {
    split(name, literals, numbers);
    std::string key;
    for (const std::string& literal : literals) {
      key += literal;
      key += '\0';
    }
    const auto [it, added] = by_template.emplace(std::move(key), groups.size());
    if (added) {
      groups.push_back(Group{literals, std::vector<std::set<int64_t>>(numbers.size()), 0});
    }
    Group& group = groups[it->second];
    for (size_t i = 0; i < numbers.size(); ++i) group.slots[i].insert(numbers[i]);
    ++group.count;
  }
  std::vector<NamePattern> out;
  out.reserve(groups.size());
  for (const Group& group : groups) {
    NamePattern pattern;
    pattern.text = group.literals[0];
    for (size_t i = 0; i < group.slots.size(); ++i) {
      pattern.text += set_text(group.slots[i]);
      pattern.text += group.literals[i + 1];
    }
    pattern.count = group.count;
    out.push_back(std::move(pattern));
  }
  return out;
}

std::string pattern_lines(const std::vector<std::string>& names, const std::string& word,
                          const std::string& separator, size_t limit) {
  const std::vector<NamePattern> patterns = summarize_names(names);
  std::string out;
  int64_t rest = 0;
  for (size_t i = 0; i < patterns.size(); ++i) {
    if (i >= limit) {
      rest += patterns[i].count;
      continue;
    }
    out += cat(i == 0 ? "" : separator, patterns[i].text, ": ", patterns[i].count, " ", word);
  }
  if (rest > 0) out += cat(separator, "and ", patterns.size() - limit, " more patterns: ", rest);
  return out;
}

}  // namespace nibble::recipe
