#include "device/cpu.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace nibble::device {
namespace {

class ForcedIsa {
 public:
  explicit ForcedIsa(const char* name) { setenv("NIBBLE_ISA", name, 1); }
  ~ForcedIsa() { unsetenv("NIBBLE_ISA"); }
};

TEST(Cpu, ScalarIsFirstAndTheBestIsChosen) {
  unsetenv("NIBBLE_ISA");
  const std::vector<Isa> isas = available_isas();
  ASSERT_FALSE(isas.empty());
  EXPECT_EQ(isas.front(), Isa::kScalar);
  for (size_t i = 1; i < isas.size(); ++i) EXPECT_LT(isas[i - 1], isas[i]);
  EXPECT_EQ(choose_isa().value(), isas.back());
}

TEST(Cpu, EveryAvailableIsaCanBeForced) {
  for (Isa isa : available_isas()) {
    SCOPED_TRACE(isa_name(isa));
    const ForcedIsa forced(std::string(isa_name(isa)).c_str());
    EXPECT_EQ(choose_isa().value(), isa);
  }
}

TEST(Cpu, RefusesUnknownAndMissing) {
  {
    const ForcedIsa forced("avx9000");
    const Result<Isa> r = choose_isa();
    ASSERT_FALSE(r.has_value());
    EXPECT_EQ(r.error().code(), Code::kInvalidArgument);
    EXPECT_NE(r.error().message().find("avx9000"), std::string::npos);
  }
#if defined(__x86_64__)
  const ForcedIsa forced("neon");
#else
  const ForcedIsa forced("avx2");
#endif
  const Result<Isa> r = choose_isa();
  ASSERT_FALSE(r.has_value());
  EXPECT_EQ(r.error().code(), Code::kUnsupported);
}

}  // namespace
}  // namespace nibble::device
