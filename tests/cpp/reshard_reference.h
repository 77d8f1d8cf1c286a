// What a copy program must do, one element at a time and sharing no arithmetic with the executors:
// positions are plain sums, numbers are rounded by searching all values of the narrow type, and the
// digest is summed over single bytes.
#ifndef ASYNCRL_TESTS_CPP_RESHARD_REFERENCE_H_
#define ASYNCRL_TESTS_CPP_RESHARD_REFERENCE_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "reshard/index.h"

namespace asyncrl::reshard::testing {

using Bytes = std::vector<std::byte>;

struct Scenario {
  std::vector<Segment> segments;
  std::vector<BlockScales> scales;
  std::vector<Bytes> parameters;
  Bytes wire;
  int64_t num_digests = 3;
  bool can_unpack = true;

  std::vector<int64_t> sizes() const {
    std::vector<int64_t> sizes;
    for (const Bytes& parameter : parameters)
      sizes.push_back(static_cast<int64_t>(parameter.size()));
    return sizes;
  }
  std::vector<uint64_t> addresses() {
    std::vector<uint64_t> addresses;
    for (Bytes& parameter : parameters)
      addresses.push_back(reinterpret_cast<uint64_t>(parameter.data()));
    return addresses;
  }
};

// A number from low to high, both possible.
struct Pick {
  std::mt19937_64& random;

  int64_t operator()(int64_t low, int64_t high) const {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  }
};

// Random bytes, and among them float32 that are hard to round: at infinity, NaN, halfway.
void fill_randomly(std::mt19937_64& random, Bytes& bytes);

Scenario random_scenario(std::mt19937_64& random);

// Runs the scenario's program on its own memory; digests[i] grows by the digest of number i.
void run_reference(Scenario& scenario, bool pack, std::vector<uint64_t>& digests);

// The digest of these bytes at this byte of the receiver's parameter.
uint64_t reference_digest(const std::byte* bytes, size_t count, uint64_t position);

}  // namespace asyncrl::reshard::testing

#endif  // ASYNCRL_TESTS_CPP_RESHARD_REFERENCE_H_
