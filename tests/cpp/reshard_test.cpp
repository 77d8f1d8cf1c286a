// Random copy programs through the CPU executor and the emulated CUDA kernels, against a reference
// that moves one element at a time and shares no arithmetic with them. Prints the first mismatch.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "reshard/cuda_program.h"
#include "reshard/program.h"

using asyncrl::reshard::CopyProgram;
using asyncrl::reshard::CudaProgram;
using asyncrl::reshard::Op;
using asyncrl::reshard::Segment;

namespace {

using Bytes = std::vector<std::byte>;

struct Scenario {
  std::vector<Segment> segments;
  std::vector<Bytes> parameters;
  Bytes wire;
  int64_t num_digests = 3;

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

Bytes random_bytes(std::mt19937_64& random, int64_t count) {
  Bytes bytes(static_cast<size_t>(count));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// One segment per parameter, of any operation and shape, at aligned and unaligned places.
Scenario random_scenario(std::mt19937_64& random) {
  const auto pick = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const Op ops[] = {Op::kF32AsBf16, Op::kCopy4, Op::kCopy2, Op::kCopy1};
  Scenario scenario;
  int64_t wire_bytes = 0;
  for (const Op op : ops) {
    for (int64_t copy = pick(0, 2); copy > 0; --copy) {
      const int64_t width = asyncrl::reshard::wire_element_bytes(op);
      const int64_t cols = pick(0, 3) ? pick(1, 9) * pick(1, 40) : pick(1, 3);
      const int64_t rows = pick(1, 8) == 1 ? pick(200, 400) : pick(1, 12);
      const int64_t stride = pick(0, 1) ? cols : cols + pick(0, 16);
      const int64_t offset = pick(0, 20);
      wire_bytes = (wire_bytes + width - 1) / width * width;
      scenario.segments.push_back({static_cast<int64_t>(scenario.parameters.size()), offset, stride,
                                   rows, cols, wire_bytes, pick(0, 1000), cols + pick(0, 5),
                                   pick(0, 2), op});
      wire_bytes += rows * cols * width;
      const int64_t elements = offset + (rows - 1) * stride + cols;
      scenario.parameters.push_back(
          random_bytes(random, elements * asyncrl::reshard::parameter_element_bytes(op)));
    }
  }
  scenario.wire = random_bytes(random, wire_bytes + pick(0, 3));
  return scenario;
}

// The digest as its documentation states it, with 128-bit arithmetic reduced at the end.
uint64_t reference_term(uint64_t bits, uint64_t position) {
  const uint64_t key = (position + 1) * 11400714819323198485ull;
  const unsigned __int128 low = bits ^ (key % 4294967296ull);
  const unsigned __int128 high = (key / 4294967296ull) | 1u;
  return static_cast<uint64_t>(low * high);
}

uint16_t reference_round(uint32_t bits) {
  if ((bits & 0x7F800000u) == 0x7F800000u && (bits & 0x007FFFFFu)) return 0x7FC0;
  const uint32_t below = bits & 0xFFFFu, kept = bits >> 16;
  const bool up = below > 0x8000u || (below == 0x8000u && (kept & 1u));
  return static_cast<uint16_t>(kept + up);
}

void reference(Scenario& scenario, bool pack, std::vector<uint64_t>& digests) {
  for (const Segment& segment : scenario.segments) {
    Bytes& parameter = scenario.parameters[static_cast<size_t>(segment.parameter)];
    const bool cast = segment.op == Op::kF32AsBf16;
    const size_t local_width = cast ? 4 : static_cast<size_t>(segment.op);
    const size_t wire_width = cast ? 2 : static_cast<size_t>(segment.op);
    auto wire_at = static_cast<size_t>(segment.wire);
    for (int64_t row = 0; row < segment.rows; ++row) {
      for (int64_t col = 0; col < segment.cols; ++col, wire_at += wire_width) {
        const auto local_at =
            static_cast<size_t>(segment.offset + row * segment.stride + col) * local_width;
        uint64_t value = 0;
        if (pack) {
          std::memcpy(&value, &parameter[local_at], local_width);
          if (cast) value = reference_round(static_cast<uint32_t>(value));
          std::memcpy(&scenario.wire[wire_at], &value, wire_width);
        } else {
          std::memcpy(&value, &scenario.wire[wire_at], wire_width);
          const uint64_t widened = cast ? value * 65536u : value;
          std::memcpy(&parameter[local_at], &widened, local_width);
        }
        const int64_t position = segment.position + row * segment.position_stride + col;
        digests[static_cast<size_t>(segment.digest)] +=
            reference_term(value, static_cast<uint64_t>(position));
      }
    }
  }
}

void run(Scenario& scenario, bool pack, bool cuda, std::vector<uint64_t>& digests) {
  const CopyProgram program(scenario.segments, scenario.sizes(),
                            static_cast<int64_t>(scenario.wire.size()), scenario.num_digests);
  const std::vector<uint64_t> addresses = scenario.addresses();
  if (cuda) {
    CudaProgram on_device(program);
    if (pack) {
      on_device.pack(addresses, scenario.wire.data(), digests.data(), nullptr);
    } else {
      on_device.unpack(addresses, scenario.wire.data(), digests.data(), nullptr);
    }
  } else if (pack) {
    program.pack(addresses, scenario.wire.data(), digests.data());
  } else {
    program.unpack(addresses, scenario.wire.data(), digests.data());
  }
}

void expect_equal(const Bytes& actual, const Bytes& expected, const char* what, int trial) {
  for (size_t at = 0; at < expected.size(); ++at) {
    if (actual[at] != expected[at]) {
      std::printf("trial %d: byte %zu of %s differs\n", trial, at, what);
      std::exit(1);
    }
  }
}

void compare_executors(int trial) {
  std::mt19937_64 random(static_cast<uint64_t>(trial));
  const Scenario scenario = random_scenario(random);
  for (const bool pack : {true, false}) {
    Scenario expected = scenario;
    std::vector<uint64_t> expected_digests(3, 17);
    reference(expected, pack, expected_digests);
    for (const bool cuda : {false, true}) {
      Scenario actual = scenario;
      std::vector<uint64_t> digests(3, 17);
      run(actual, pack, cuda, digests);
      expect_equal(actual.wire, expected.wire, cuda ? "the emulated wire" : "the wire", trial);
      for (size_t idx = 0; idx < actual.parameters.size(); ++idx)
        expect_equal(actual.parameters[idx], expected.parameters[idx], "a parameter", trial);
      if (digests != expected_digests) {
        std::printf("trial %d: digests differ (pack %d, cuda %d)\n", trial, pack, cuda);
        std::exit(1);
      }
    }
  }
}

// Every field that would lead outside must be refused when the program is built.
void refuse_bad_programs() {
  const Segment good = {0, 0, 8, 4, 8, 0, 0, 8, 0, Op::kCopy4};
  const auto is_refused = [](const Segment& segment) {
    try {
      const std::vector<int64_t> sizes = {128};
      CopyProgram({segment}, sizes, 128, 1);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  const int64_t huge = int64_t{1} << 62;
  const int64_t bad[][2] = {{0, 1},    {0, -1}, {1, 1},  {1, -1},   {1, huge}, {2, 9},    {2, -1},
                            {2, huge}, {3, 5},  {3, 0},  {3, huge}, {4, 9},    {4, 0},    {4, huge},
                            {5, 4},    {5, 2},  {5, -4}, {5, huge}, {6, -1},   {6, huge}, {7, 7},
                            {8, 1},    {8, -1}, {9, 3},  {9, 6},    {9, huge}};
  if (is_refused(good)) {
    std::printf("a program that fits was refused\n");
    std::exit(1);
  }
  for (const auto& [field, value] : bad) {
    Segment segment = good;
    std::memcpy(reinterpret_cast<int64_t*>(&segment) + field, &value, sizeof(value));
    if (!is_refused(segment)) {
      std::printf("field %lld = %lld was accepted\n", static_cast<long long>(field),
                  static_cast<long long>(value));
      std::exit(1);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int trials = argc > 1 ? std::atoi(argv[1]) : 300;
  refuse_bad_programs();
  for (int trial = 0; trial < trials; ++trial) compare_executors(trial);
  std::printf("%d programs: executors agree with the reference\n", trials);
  return 0;
}
