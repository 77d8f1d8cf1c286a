#ifndef ASYNCRL_TESTS_CPP_REQUIRE_H_
#define ASYNCRL_TESTS_CPP_REQUIRE_H_

#include <cstdio>
#include <cstdlib>

namespace asyncrl::reshard::testing {

// Ends the program with what printf makes of the rest, unless it holds.
template <typename... Values>
void require(bool holds, const char* format, Values... values) {
  if (holds) return;
  std::printf(format, values...);
  std::printf("\n");
  std::exit(1);
}

}  // namespace asyncrl::reshard::testing

#endif  // ASYNCRL_TESTS_CPP_REQUIRE_H_
