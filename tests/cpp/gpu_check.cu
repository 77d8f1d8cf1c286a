// Checks every kernel on the GPU of this machine, without Python.
//
//   random programs, and every case small -- device, reference --> first mismatch
//   every case large -- device, device copy in turn --> GB/s, share of the copy, gate
//
// usage: gpu_check TABLE.md TABLE.json [MIB ROUNDS PROGRAMS [--no-gates]]
//
// GB/s counts the mean of the bytes read and written, as for a copy. Exit status: 0 all good, 1 a
// kernel is wrong or too slow, 2 there is no GPU to run on.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include "gpu_device.h"

namespace asyncrl::reshard::testing {
namespace {

struct Case {
  const char* name;
  const char* op_name;
  Op op;
  int64_t row_bytes;  // of the parameter, in the receiver's orientation
  int64_t gap;        // elements between rows of the parameter
  int max_blocks;     // 0: as many as the device has use for
  double gate_share;  // of a device copy; 0: none
  double gate_gbps;   // 0: none
};

constexpr int64_t kLong = 1 << 16;
constexpr Case kCases[] = {
    {"contiguous", "copy8", Op::kCopy8, kLong, 0, 0, 0.85, 0},
    {"contiguous", "copy4", Op::kCopy4, kLong, 0, 0, 0.85, 0},
    {"contiguous", "copy2", Op::kCopy2, kLong, 0, 0, 0.85, 0},
    {"contiguous", "copy1", Op::kCopy1, kLong, 0, 0, 0.85, 0},
    {"contiguous, 8 blocks", "copy4", Op::kCopy4, kLong, 0, 8, 0, 200},
    {"contiguous, 8 blocks", "copy2", Op::kCopy2, kLong, 0, 8, 0, 200},
    {"rows of 4 KiB", "copy2", Op::kCopy2, 4096, 64, 0, 0.6, 0},
    {"rows of 512 B", "copy4", Op::kCopy4, 512, 64, 0, 0.6, 0},
    {"rows of 512 B", "copy2", Op::kCopy2, 512, 64, 0, 0.6, 0},
    {"rows of 512 B, 8 blocks", "copy2", Op::kCopy2, 512, 64, 8, 0, 0},
    {"rows of 128 B", "copy2", Op::kCopy2, 128, 64, 0, 0, 0},
    {"rows of 90 B, unaligned", "copy2", Op::kCopy2, 90, 3, 0, 0, 0},
    {"contiguous", "float32 as bfloat16", Op::kF32AsBf16, kLong, 0, 0, 0, 0},
    {"rows of 512 B", "float32 as bfloat16", Op::kF32AsBf16, 512, 64, 0, 0, 0},
    {"contiguous", "bfloat16 as float32", Op::kBf16AsF32, kLong, 0, 0, 0, 0},
    {"matrix", "transpose1", Op::kTranspose1, 4096, 0, 0, 0, 0},
    {"matrix", "transpose2", Op::kTranspose2, 4096, 0, 0, 0, 0},
    {"matrix", "transpose4", Op::kTranspose4, 4096, 0, 0, 0, 0},
    {"matrix", "float32 as float8", Op::kF32AsFp8, 8192, 0, 0, 0, 0},
    {"matrix", "bfloat16 as float8", Op::kBf16AsFp8, 8192, 0, 0, 0, 0},
};

struct Result {
  std::string problem;
  double pack_gbps = 0, unpack_gbps = 0, copy_gbps = 0, share = 0;
};

// Bits that are ordinary numbers as float32 and as bfloat16.
void fill_with_numbers(Bytes& bytes) {
  uint64_t state = 88172645463325252ull;
  for (size_t at = 0; at + 4 <= bytes.size(); at += 4) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    const auto bits = static_cast<uint32_t>(state) & 0x87FF87FFu;
    const uint32_t number = bits | 0x38003800u;
    std::memcpy(&bytes[at], &number, 4);
  }
}

// A case as a scenario of about this many bytes of the parameter.
Scenario scenario_of(const Case& test, int64_t payload_bytes) {
  const int64_t local = parameter_element_bytes(test.op), remote = wire_element_bytes(test.op);
  const int64_t cols = test.row_bytes / local;
  const int64_t rows = std::max<int64_t>(payload_bytes / test.row_bytes, 1);
  const bool turned = is_transposed(test.op);
  const int64_t stored_rows = turned ? cols : rows;
  const int64_t stride = (turned ? rows : cols) + test.gap;
  Scenario scenario;
  scenario.num_digests = 2;
  scenario.segments = {{0, 0, stride, rows, cols, 0, 0, cols, 0, test.op}};
  int64_t wire_bytes = rows * cols * remote;
  if (is_quantised(test.op)) {
    wire_bytes = (wire_bytes + 3) / 4 * 4;
    scenario.scales = {{0, wire_bytes, 0, num_blocks(cols), 1}};
    wire_bytes += 4 * num_blocks(rows) * num_blocks(cols);
    scenario.can_unpack = false;
  }
  scenario.wire.resize(static_cast<size_t>(wire_bytes));
  scenario.parameters = {Bytes(static_cast<size_t>(stored_rows * stride * local))};
  fill_with_numbers(scenario.parameters[0]);
  return scenario;
}

std::string difference(const Bytes& actual, const Bytes& expected, const std::string& what) {
  if (actual == expected) return "";
  const auto at = std::mismatch(actual.begin(), actual.end(), expected.begin()).first;
  return what + " differs first at byte " + std::to_string(at - actual.begin());
}

// Runs a scenario in both directions; the first mismatch, or an empty string.
std::string verify(const Scenario& scenario, int max_blocks) {
  for (const bool pack : {true, false}) {
    if (!pack && !scenario.can_unpack) continue;
    Scenario expected = scenario;
    std::vector<uint64_t> digests(static_cast<size_t>(scenario.num_digests));
    run_reference(expected, pack, digests);
    OnDevice device(scenario, max_blocks);
    device.run(pack);
    check_cuda(cudaDeviceSynchronize(), "a kernel");
    const std::string side = pack ? "pack: " : "unpack: ";
    std::string problem = difference(device.wire().read(), expected.wire, side + "wire");
    for (size_t idx = 0; problem.empty() && idx < expected.parameters.size(); ++idx)
      problem = difference(device.parameters()[idx].read(), expected.parameters[idx],
                           side + "parameter " + std::to_string(idx));
    if (problem.empty() && device.digests() != digests) problem = side + "digests differ";
    if (!problem.empty()) return problem;
  }
  return "";
}

std::string verify_random(int num_programs) {
  for (int trial = 0; trial < num_programs; ++trial) {
    std::mt19937_64 random(static_cast<uint64_t>(trial));
    const Scenario scenario = random_scenario(random);
    const std::string problem = verify(scenario, trial % 3 ? 0 : 8);
    if (!problem.empty()) return "random program " + std::to_string(trial) + ": " + problem;
  }
  return "";
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Kernels and device copies take turns. Both directions must agree on the digest and the bytes.
void measure(const Case& test, int64_t payload_bytes, int rounds, Result& result) {
  const Scenario scenario = scenario_of(test, payload_bytes);
  OnDevice device(scenario, test.max_blocks);
  const Segment& segment = scenario.segments[0];
  const int64_t elements = segment.rows * segment.cols;
  const auto moved = static_cast<size_t>(
      elements * (parameter_element_bytes(test.op) + wire_element_bytes(test.op)) / 2);
  DeviceBuffer from(moved), to(moved);
  Stopwatch watch;
  std::vector<double> packs, unpacks, copies;
  for (int round = 0; round < rounds + 2; ++round) {
    device.clear_digests();
    const double pack = watch.seconds([&] { device.run(true); });
    const std::vector<uint64_t> sent = device.digests();
    device.clear_digests();
    const double unpack = scenario.can_unpack ? watch.seconds([&] { device.run(false); }) : 0;
    if (scenario.can_unpack && device.digests() != sent) result.problem = "large: digests differ";
    const double copy = watch.seconds([&] {
      check_cuda(cudaMemcpyAsync(to.data(), from.data(), moved, cudaMemcpyDeviceToDevice, nullptr),
                 "a device copy");
    });
    if (round < 2) continue;  // the first launches load code
    packs.push_back(pack);
    unpacks.push_back(unpack);
    copies.push_back(copy);
  }
  const bool casts = parameter_element_bytes(test.op) != wire_element_bytes(test.op);
  if (scenario.can_unpack && !casts && result.problem.empty())
    result.problem = difference(device.parameters()[0].read(), scenario.parameters[0], "large");
  const auto gigabytes = static_cast<double>(moved) / 1e9;
  result.pack_gbps = gigabytes / median(packs);
  if (scenario.can_unpack) result.unpack_gbps = gigabytes / median(unpacks);
  result.copy_gbps = gigabytes / median(copies);
  const double slowest =
      scenario.can_unpack ? std::min(result.pack_gbps, result.unpack_gbps) : result.pack_gbps;
  result.share = slowest / result.copy_gbps;
  const bool slow = result.share < test.gate_share || slowest < test.gate_gbps;
  if (result.problem.empty() && slow) result.problem = "too slow";
}

struct Options {
  int64_t payload_bytes;
  int rounds;
  int programs;
  bool gates;
};

Result run_case(Case test, const Options& options) {
  if (!options.gates) test.gate_share = test.gate_gbps = 0;
  Result result;
  result.problem =
      verify(scenario_of(test, std::min<int64_t>(options.payload_bytes, 1 << 20)), test.max_blocks);
  if (result.problem.empty()) measure(test, options.payload_bytes, options.rounds, result);
  return result;
}

std::string table_row(const Case& test, const Result& result) {
  char gate[32] = "-", line[256];
  if (test.gate_share > 0) std::snprintf(gate, sizeof(gate), "%.2f", test.gate_share);
  if (test.gate_gbps > 0) std::snprintf(gate, sizeof(gate), "%.0f GB/s", test.gate_gbps);
  std::snprintf(line, sizeof(line), "| %s | %s | %.0f | %.0f | %.0f | %.2f | %s | %s |", test.name,
                test.op_name, result.pack_gbps, result.unpack_gbps, result.copy_gbps, result.share,
                gate, result.problem.empty() ? "ok" : result.problem.c_str());
  return line;
}

std::string json_row(const Case& test, const Result& result) {
  std::ostringstream row;
  row << "{\"case\": \"" << test.name << "\", \"op\": \"" << test.op_name
      << "\", \"row_bytes\": " << test.row_bytes << ", \"max_blocks\": " << test.max_blocks
      << ", \"pack_gb_per_s\": " << result.pack_gbps
      << ", \"unpack_gb_per_s\": " << result.unpack_gbps
      << ", \"copy_gb_per_s\": " << result.copy_gbps << ", \"of_copy\": " << result.share
      << ", \"gate_of_copy\": " << test.gate_share << ", \"gate_gb_per_s\": " << test.gate_gbps
      << ", \"problem\": \"" << result.problem << "\"}";
  return row.str();
}

int run_all(const char* table_path, const char* json_path, const Options& options) {
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, 0), "asking the device");
  std::string problem = verify_random(options.programs);
  bool good = problem.empty();
  std::ostringstream table, json;
  table << properties.name << ", sm_" << properties.major << properties.minor << "; "
        << options.programs << " random programs: " << (good ? "ok" : problem) << "\n\n"
        << "| case | operation | pack GB/s | unpack GB/s | device copy GB/s | of a copy | gate | "
           "verdict |\n|---|---|---|---|---|---|---|---|\n";
  json << "{\"device\": \"" << properties.name << "\", \"programs\": " << options.programs
       << ", \"programs_problem\": \"" << problem << "\", \"rows\": [";
  const char* separator = "\n";
  for (const Case& test : kCases) {
    const Result result = run_case(test, options);
    good = good && result.problem.empty();
    table << table_row(test, result) << "\n";
    json << separator << json_row(test, result);
    separator = ",\n";
  }
  json << "\n], \"good\": " << (good ? "true" : "false") << "}\n";
  std::ofstream(table_path) << table.str();
  std::ofstream(json_path) << json.str();
  std::fputs(table.str().c_str(), stdout);
  return good ? 0 : 1;
}

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: gpu_check TABLE.md TABLE.json [MIB ROUNDS PROGRAMS]\n");
    return 2;
  }
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) {
    std::fprintf(stderr, "gpu_check: CUDA sees no GPU here\n");
    return 2;
  }
  const Options options = {int64_t{argc > 3 ? std::atoi(argv[3]) : 256} << 20,
                           argc > 4 ? std::atoi(argv[4]) : 20, argc > 5 ? std::atoi(argv[5]) : 300,
                           argc <= 6};
  return run_all(argv[1], argv[2], options);
}

}  // namespace
}  // namespace asyncrl::reshard::testing

int main(int argc, char** argv) {
  try {
    return asyncrl::reshard::testing::main(argc, argv);
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "gpu_check: %s\n", error.what());
    return 1;
  }
}
