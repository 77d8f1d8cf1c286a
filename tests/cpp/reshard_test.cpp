// Random copy programs through every executor (one thread, several, the emulated CUDA kernels), and
// random rows through every implementation of the rows, against a reference that moves one element
// at a time. Prints the first mismatch.
//
// usage: reshard_test PROGRAMS
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "require.h"
#include "reshard/cuda_program.h"
#include "reshard/program.h"
#include "reshard/rows.h"
#include "reshard/workers.h"
#include "reshard_reference.h"

namespace asyncrl::reshard::testing {
namespace {

enum class Executor { kThread, kThreads, kCuda, kCudaFewBlocks };
constexpr Executor kExecutors[] = {Executor::kThread, Executor::kThreads, Executor::kCuda,
                                   Executor::kCudaFewBlocks};

void run(Scenario& scenario, bool pack, Executor executor, std::vector<uint64_t>& digests) {
  static CopyWorkers workers(3);
  const CopyProgram program(scenario.segments, scenario.sizes(),
                            static_cast<int64_t>(scenario.wire.size()), scenario.num_digests,
                            scenario.scales);
  const std::vector<uint64_t> addresses = scenario.addresses();
  std::byte* wire = scenario.wire.data();
  if (executor == Executor::kThread || executor == Executor::kThreads) {
    CopyWorkers* helpers = executor == Executor::kThreads ? &workers : nullptr;
    pack ? program.pack(addresses, wire, digests.data(), helpers)
         : program.unpack(addresses, wire, digests.data(), helpers);
    return;
  }
  CudaProgram on_device(program, executor == Executor::kCuda ? 0 : 3);
  pack ? on_device.pack(addresses, wire, digests.data(), nullptr)
       : on_device.unpack(addresses, wire, digests.data(), nullptr);
}

void expect_equal(const Bytes& actual, const Bytes& expected, const std::string& what) {
  for (size_t at = 0; at < expected.size(); ++at)
    require(actual[at] == expected[at], "%s: byte %zu is %02x, expected %02x", what.c_str(), at,
            static_cast<unsigned>(actual[at]), static_cast<unsigned>(expected[at]));
}

void compare_executors(int trial) {
  std::mt19937_64 random(static_cast<uint64_t>(trial));
  const Scenario scenario = random_scenario(random);
  for (const bool pack : {true, false}) {
    if (!pack && !scenario.can_unpack) continue;
    Scenario expected = scenario;
    std::vector<uint64_t> expected_digests(3, 17);
    run_reference(expected, pack, expected_digests);
    for (const Executor executor : kExecutors) {
      Scenario actual = scenario;
      std::vector<uint64_t> digests(3, 17);
      run(actual, pack, executor, digests);
      const std::string where = "trial " + std::to_string(trial) + ", executor " +
                                std::to_string(static_cast<int>(executor)) +
                                (pack ? ", pack, " : ", unpack, ");
      expect_equal(actual.wire, expected.wire, where + "wire");
      for (size_t idx = 0; idx < actual.parameters.size(); ++idx)
        expect_equal(actual.parameters[idx], expected.parameters[idx],
                     where + "parameter " + std::to_string(idx));
      for (size_t idx = 0; idx < digests.size(); ++idx)
        require(digests[idx] == expected_digests[idx], "%sdigest %zu differs", where.c_str(), idx);
    }
  }
}

// One implementation of the rows, at any alignment and position, past 2^32 units too.
void compare_rows(int trial, MoveRows move_rows, const char* name) {
  std::mt19937_64 random(static_cast<uint64_t>(trial));
  const Pick pick = {random};
  const RowMove moves[] = {RowMove::kCopy, RowMove::kRoundToWire, RowMove::kWidenOffWire,
                           RowMove::kWidenToWire, RowMove::kRoundOffWire};
  const Op ops[] = {Op::kCopy1, Op::kF32AsBf16, Op::kF32AsBf16, Op::kBf16AsF32, Op::kBf16AsF32};
  const auto kind = static_cast<size_t>(pick(0, 4));
  const bool pack = kind != 2 && kind != 4;
  const int64_t local = parameter_element_bytes(ops[kind]), remote = wire_element_bytes(ops[kind]);
  const int64_t rows = pick(1, 4), cols = pick(1, 300), stride = cols + pick(0, 70);
  const int64_t offset = pick(0, 40);
  const int64_t far = pick(0, 3) ? 0 : (int64_t{1} << 34) / remote - pick(0, cols);
  Scenario expected;
  expected.segments = {{0, offset, stride, rows, cols, remote * pick(0, 40), far + pick(0, 40),
                        cols + pick(0, 9), 0, ops[kind]}};
  const Segment& segment = expected.segments[0];
  expected.parameters = {Bytes(static_cast<size_t>((offset + rows * stride) * local))};
  expected.wire.resize(static_cast<size_t>(segment.wire + rows * cols * remote));
  for (Bytes* bytes : {&expected.parameters[0], &expected.wire}) fill_randomly(random, *bytes);
  Scenario actual = expected;
  std::vector<uint64_t> digests(1);
  run_reference(expected, pack, digests);
  std::byte* local_at = actual.parameters[0].data() + offset * local;
  std::byte* wire_at = actual.wire.data() + segment.wire;
  const int64_t local_stride = stride * local, wire_stride = cols * remote;
  const Rows all = {pack ? local_at : wire_at,
                    pack ? wire_at : local_at,
                    pack ? local_stride : wire_stride,
                    pack ? wire_stride : local_stride,
                    rows,
                    cols,
                    static_cast<uint64_t>(segment.position * remote),
                    static_cast<uint64_t>(segment.position_stride * remote),
                    pick(0, 1) == 1};
  const uint64_t digest = move_rows(moves[kind], all);
  const std::string where = std::string(name) + " rows, trial " + std::to_string(trial) + ", ";
  expect_equal(actual.wire, expected.wire, where + "wire");
  expect_equal(actual.parameters[0], expected.parameters[0], where + "parameter");
  require(digest == digests[0], "%sdigest differs", where.c_str());
}

// Rows whose target is whole lines of the cache, or nearly: moved as the portable rows are, and
// nothing else is written.
void compare_lines(int trial, MoveRows move_rows) {
  struct Kind {
    RowMove move;
    int64_t source, target, wire;  // bytes of an element
  };
  constexpr int64_t kLine = 64;
  constexpr Kind kKinds[] = {{RowMove::kCopy, 1, 1, 1},
                             {RowMove::kRoundToWire, 4, 2, 2},
                             {RowMove::kWidenOffWire, 2, 4, 2},
                             {RowMove::kWidenToWire, 2, 4, 4},
                             {RowMove::kRoundOffWire, 4, 2, 4}};
  std::mt19937_64 random(static_cast<uint64_t>(trial));
  const Pick pick = {random};
  const Kind kind = kKinds[pick(0, 4)];
  const int64_t rows = pick(1, 9), elements = 16 * pick(1, 8 << pick(0, 6));
  const int64_t shift = kind.target * (pick(0, 3) ? 0 : pick(1, 63));
  const int64_t source_stride = elements * kind.source + kind.source * pick(0, 300) * pick(0, 9);
  const int64_t target_gap = pick(0, 1) * pick(0, 90) * (pick(0, 3) ? kLine : kind.target);
  const int64_t target_stride = elements * kind.target + target_gap;
  const uint64_t far = pick(0, 3) ? 0 : (uint64_t{1} << 34) - uint64_t(pick(0, 4000)) * 4;
  Bytes source(static_cast<size_t>(rows * source_stride)), target;
  fill_randomly(random, source);
  target.resize(static_cast<size_t>(rows * target_stride + 6 * kLine));
  fill_randomly(random, target);
  Bytes expected = target;
  const auto begin = [shift](Bytes& bytes) {
    const auto address = reinterpret_cast<uintptr_t>(bytes.data());
    return bytes.data() + (0 - address) % kLine + shift;
  };
  Rows all = {source.data(),
              nullptr,
              source_stride,
              target_stride,
              rows,
              elements,
              far + uint64_t(pick(0, 40)) * 4 + uint64_t(pick(0, 3) ? 0 : kind.wire),
              uint64_t(elements * kind.wire + pick(0, 50) * (pick(0, 3) ? 4 : kind.wire)),
              pick(0, 5) != 0};
  all.target = begin(target);
  const uint64_t digest = move_rows(kind.move, all);
  const int64_t lead = begin(target) - target.data();
  all.target = expected.data() + lead;
  const std::string where = "lines, trial " + std::to_string(trial) + ", ";
  require(digest == move_rows_portable(kind.move, all), "%sdigest differs", where.c_str());
  expect_equal(target, expected, where + "target");
}

bool is_refused(const Segment& segment, const std::vector<BlockScales>& scales = {}) {
  try {
    const std::vector<int64_t> sizes = {128};
    CopyProgram({segment}, sizes, 128, 1, scales);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

template <typename Row>
Row with_field(Row row, int64_t field, int64_t value) {
  std::memcpy(reinterpret_cast<int64_t*>(&row) + field, &value, sizeof(value));
  return row;
}

// Every field that would lead outside must be refused when the program is built.
void refuse_bad_programs() {
  const Segment good = {0, 0, 8, 4, 8, 0, 0, 8, 0, Op::kCopy4};
  const Segment turned = {0, 0, 4, 4, 8, 0, 0, 8, 0, Op::kTranspose4};
  const Segment quantised = {0, 0, 8, 4, 8, 0, 0, 8, 0, Op::kF32AsFp8};
  const BlockScales scales = {0, 32, 0, 1, 0};
  const int64_t huge = int64_t{1} << 62;
  const int64_t bad[][2] = {{0, 1},  {0, -1},   {1, 1},  {1, -1},  {1, huge}, {2, 9},
                            {2, -1}, {2, huge}, {3, 5},  {3, 0},   {3, huge}, {4, 9},
                            {4, 0},  {4, huge}, {5, 4},  {5, 2},   {5, -4},   {5, huge},
                            {6, -1}, {6, huge}, {7, 7},  {8, 1},   {8, -1},   {9, 3},
                            {9, 7},  {9, 16},   {9, 19}, {9, huge}};
  const int64_t bad_scales[][2] = {{0, 1},  {0, -1},   {1, 2}, {1, 128},  {1, -4},
                                   {2, -1}, {2, huge}, {4, 1}, {3, huge}, {3, -1}};
  require(!is_refused(good) && !is_refused(turned) && !is_refused(quantised, {scales}),
          "a program that fits was refused");
  for (const auto& [field, value] : bad)
    require(is_refused(with_field(good, field, value)), "field %lld = %lld was accepted",
            static_cast<long long>(field), static_cast<long long>(value));
  for (const auto& [field, value] : bad_scales)
    require(is_refused(quantised, {with_field(scales, field, value)}),
            "field %lld = %lld of scales was accepted", static_cast<long long>(field),
            static_cast<long long>(value));
  require(is_refused(with_field(turned, 2, 3)), "overlapping transposed rows were accepted");
  require(is_refused(with_field(turned, 1, 1)), "a transposed rectangle left its parameter");
  require(is_refused(quantised), "quantising without scales was accepted");
  require(is_refused(good, {scales}), "scales without quantising were accepted");
}

// The device cannot load elements that are not aligned; a bucket there must be refused instead.
void refuse_misaligned_buckets() {
  Scenario scenario;
  scenario.segments = {{0, 0, 8, 4, 8, 0, 0, 8, 0, Op::kCopy4}};
  scenario.parameters = {Bytes(128)};
  scenario.wire.resize(132);
  CudaProgram program(CopyProgram(scenario.segments, scenario.sizes(), 128, 1));
  std::vector<uint64_t> digests(1);
  for (const int64_t shift : {1, 2, 3}) {
    bool refused = false;
    try {
      program.pack(scenario.addresses(), scenario.wire.data() + shift, digests.data(), nullptr);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    require(refused, "a bucket of floats at address 4 n + %lld was accepted",
            static_cast<long long>(shift));
  }
}

// A program on the device remembers addresses; it must notice that a parameter has moved.
void follow_moved_parameters() {
  const std::vector<Segment> segments = {{0, 0, 32, 1, 32, 0, 0, 32, 0, Op::kCopy1}};
  CudaProgram program(CopyProgram(segments, {32}, 32, 1));
  std::vector<uint64_t> digests(1);
  for (const int value : {1, 2, 3}) {
    const Bytes here(32, static_cast<std::byte>(value)), there(32, static_cast<std::byte>(-value));
    Bytes wire(32);
    for (const Bytes* source : {&here, &there}) {
      program.pack({reinterpret_cast<uint64_t>(source->data())}, wire.data(), digests.data(),
                   nullptr);
      expect_equal(wire, *source, "the bucket of a moved parameter");
    }
  }
}

int main(int argc, char** argv) {
  const int trials = argc > 1 ? std::atoi(argv[1]) : 300;
  refuse_bad_programs();
  refuse_misaligned_buckets();
  follow_moved_parameters();
  const MoveRows best = best_move_rows();
  for (int trial = 0; trial < 20 * trials; ++trial) {
    compare_rows(trial, move_rows_portable, "portable");
    compare_rows(trial, best, "this processor's");
    compare_lines(trial, best);
  }
  for (int trial = 0; trial < trials; ++trial) compare_executors(trial);
  std::printf("%d programs: executors agree with the reference\n", trials);
  return 0;
}

}  // namespace
}  // namespace asyncrl::reshard::testing

int main(int argc, char** argv) { return asyncrl::reshard::testing::main(argc, argv); }
