#include "reshard_reference.h"

namespace asyncrl::reshard::testing {
namespace {

struct Kind {
  Op op;
  size_t local_bytes, wire_bytes;
  bool turned;
};
constexpr Kind kKinds[] = {
    {Op::kCopy8, 8, 8, false},     {Op::kF32AsBf16, 4, 2, false}, {Op::kCopy4, 4, 4, false},
    {Op::kTranspose4, 4, 4, true}, {Op::kBf16AsF32, 2, 4, false}, {Op::kTranspose2, 2, 2, true},
    {Op::kCopy2, 2, 2, false},     {Op::kF32AsFp8, 4, 1, false},  {Op::kBf16AsFp8, 2, 1, false},
    {Op::kTranspose1, 1, 1, true}, {Op::kCopy1, 1, 1, false}};

const Kind& kind_of(Op op) {
  for (const Kind& kind : kKinds)
    if (kind.op == op) return kind;
  std::abort();
}

bool quantises(Op op) { return op == Op::kF32AsFp8 || op == Op::kBf16AsFp8; }

enum class Numbers { kMany, kManyAndRare, kZero, kTies, kTiny };

// kMany: of many magnitudes, zeros; kManyAndRare: seldom an infinity or a NaN too; kTies: halfway
// between float8 numbers, where the scale of their block is 1; kTiny: denormals, whose scale is
// one.
uint32_t random_f32(std::mt19937_64& random, Numbers numbers) {
  const uint32_t sign = static_cast<uint32_t>(random() & 1u) << 31;
  const auto mantissa = static_cast<uint32_t>(random() % 0x800000u);
  const uint64_t choice = random() % 1024;
  if (numbers == Numbers::kZero) return 0;
  if (numbers == Numbers::kTiny) return sign | mantissa % 640;
  if (numbers == Numbers::kTies) {
    if (choice < 64) return sign | 0x43E00000u;  // 448
    return sign | static_cast<uint32_t>(115 + choice % 20) << 23 | (mantissa & 0x780000u);
  }
  if (choice < 8) return sign;
  if (choice < 16) return sign | mantissa;  // denormal
  if (numbers == Numbers::kManyAndRare && choice == 16) return sign | 0x7F800000u;
  if (numbers == Numbers::kManyAndRare && choice == 17) return sign | 0x7F800000u | mantissa | 1u;
  return sign | static_cast<uint32_t>(110 + random() % 30) << 23 | mantissa;
}

void fill(std::mt19937_64& random, Bytes& bytes, const Kind& kind) {
  fill_randomly(random, bytes);
  if (!quantises(kind.op)) return;
  const auto numbers = static_cast<Numbers>(random() % 5);
  for (size_t at = 0; at + kind.local_bytes <= bytes.size(); at += kind.local_bytes) {
    const uint32_t bits = random_f32(random, numbers);
    const uint32_t kept = kind.local_bytes == 4 ? bits : bits >> 16;
    std::memcpy(&bytes[at], &kept, kind.local_bytes);
  }
}

class Generator {
 public:
  explicit Generator(std::mt19937_64& random) : pick{random}, random_(random) {}

  void add(const Kind& kind) {
    const auto width = static_cast<int64_t>(kind.wire_bytes);
    const bool large = quantises(kind.op) || kind.turned;
    const int64_t cols = pick(0, 3) ? pick(1, 9) * pick(1, large ? 33 : 40) : pick(1, 3);
    const int64_t rows =
        pick(1, quantises(kind.op) ? 3 : 8) == 1 ? pick(200, 400) : pick(1, large ? 140 : 12);
    const int64_t stored_rows = kind.turned ? cols : rows, stored_cols = kind.turned ? rows : cols;
    const int64_t stride = pick(0, 1) ? stored_cols : stored_cols + pick(0, 16);
    const int64_t offset = pick(0, 20);
    wire_bytes_ = align(wire_bytes_, width) + (pick(0, 2) ? 0 : width * pick(0, 9));
    const auto segment_idx = static_cast<int64_t>(scenario.segments.size());
    scenario.segments.push_back({segment_idx, offset, stride, rows, cols, wire_bytes_,
                                 pick(0, 1000), cols + pick(0, 5), pick(0, 2), kind.op});
    wire_bytes_ += rows * cols * width;
    if (quantises(kind.op)) {
      const int64_t block_rows = (rows + 127) / 128, block_cols = (cols + 127) / 128;
      wire_bytes_ = align(wire_bytes_, 4);
      scenario.scales.push_back(
          {segment_idx, wire_bytes_, pick(0, 50), block_cols + pick(0, 3), pick(0, 2)});
      scenario.can_unpack = false;
      wire_bytes_ += 4 * block_rows * block_cols;
    }
    const int64_t elements = offset + (stored_rows - 1) * stride + stored_cols;
    Bytes bytes(static_cast<size_t>(elements) * kind.local_bytes);
    fill(random_, bytes, kind);
    scenario.parameters.push_back(std::move(bytes));
  }

  void finish() {
    scenario.wire.resize(static_cast<size_t>(wire_bytes_ + pick(0, 3)));
    fill_randomly(random_, scenario.wire);
  }

  const Pick pick;
  Scenario scenario;

 private:
  static int64_t align(int64_t value, int64_t width) { return (value + width - 1) / width * width; }

  std::mt19937_64& random_;
  int64_t wire_bytes_ = 0;
};

float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint64_t round_to_bf16(uint64_t bits) {
  if ((bits & 0x7F800000u) == 0x7F800000u && (bits & 0x007FFFFFu)) return 0x7FC0;
  const uint64_t below = bits & 0xFFFFu, kept = bits >> 16;
  return kept + ((below > 0x8000u || (below == 0x8000u && (kept & 1u))) ? 1 : 0);
}

// The magnitudes of e4m3fn by their codes.
const double* fp8_numbers() {
  static double numbers[0x7F];
  for (int code = 1; numbers[0x7E] == 0 && code < 0x7F; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    numbers[code] = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  }
  return numbers;
}

// The nearest of all magnitudes, the one with the even code of two.
uint8_t round_to_fp8(float value) {
  if (std::isnan(value)) return 0x7F;
  const double magnitude = std::fmin(std::fabs(static_cast<double>(value)), 448.0);
  const double* numbers = fp8_numbers();
  uint8_t best = 0;
  while (best < 0x7E && numbers[best + 1] <= magnitude) ++best;
  if (best < 0x7E) {
    const double below = magnitude - numbers[best], above = numbers[best + 1] - magnitude;
    if (above < below || (above == below && best % 2 == 1)) ++best;
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

class Reference {
 public:
  Reference(Scenario& scenario, std::vector<uint64_t>& digests)
      : scenario_(scenario), digests_(digests) {}

  void move(const Segment& segment, bool pack) {
    const Kind& kind = kind_of(segment.op);
    for (int64_t row = 0; row < segment.rows; ++row) {
      for (int64_t col = 0; col < segment.cols; ++col) {
        std::byte* local = local_at(segment, kind, row, col);
        std::byte* wire = wire_at(segment, kind, row, col);
        uint64_t value = 0;
        if (pack) {
          std::memcpy(&value, local, kind.local_bytes);
          if (kind.op == Op::kF32AsBf16) value = round_to_bf16(value);
          if (kind.op == Op::kBf16AsF32) value *= 65536;
          std::memcpy(wire, &value, kind.wire_bytes);
        } else {
          std::memcpy(&value, wire, kind.wire_bytes);
          if (kind.op == Op::kF32AsBf16) value *= 65536;
          if (kind.op == Op::kBf16AsF32) value = round_to_bf16(value);
          std::memcpy(local, &value, kind.local_bytes);
        }
        digest(segment, kind, row, col);
      }
    }
  }

  void quantise(const Segment& segment, const BlockScales& scales) {
    const Kind& kind = kind_of(segment.op);
    const int64_t block_cols = (segment.cols + 127) / 128;
    for (int64_t block = 0; block < (segment.rows + 127) / 128 * block_cols; ++block) {
      const int64_t block_row = block / block_cols, block_col = block % block_cols;
      const float scale = scale_of(segment, kind, block_row, block_col);
      for (int64_t row = 128 * block_row; row < segment.rows && row < 128 * (block_row + 1);
           ++row) {
        for (int64_t col = 128 * block_col; col < segment.cols && col < 128 * (block_col + 1);
             ++col) {
          const float value = float_at(segment, kind, row, col);
          *wire_at(segment, kind, row, col) = static_cast<std::byte>(round_to_fp8(value / scale));
          digest(segment, kind, row, col);
        }
      }
      std::byte* wire = &scenario_.wire[static_cast<size_t>(scales.wire + 4 * block)];
      std::memcpy(wire, &scale, 4);
      const auto position = static_cast<uint64_t>(
          4 * (scales.position + block_row * scales.position_stride + block_col));
      digests_[static_cast<size_t>(scales.digest)] += reference_digest(wire, 4, position);
    }
  }

 private:
  std::byte* local_at(const Segment& segment, const Kind& kind, int64_t row, int64_t col) {
    const int64_t major = kind.turned ? col : row, minor = kind.turned ? row : col;
    const auto element = static_cast<size_t>(segment.offset + major * segment.stride + minor);
    return &scenario_
                .parameters[static_cast<size_t>(segment.parameter)][element * kind.local_bytes];
  }
  std::byte* wire_at(const Segment& segment, const Kind& kind, int64_t row, int64_t col) {
    const auto element = static_cast<size_t>(row * segment.cols + col);
    return &scenario_.wire[static_cast<size_t>(segment.wire) + element * kind.wire_bytes];
  }
  void digest(const Segment& segment, const Kind& kind, int64_t row, int64_t col) {
    const auto element =
        static_cast<uint64_t>(segment.position + row * segment.position_stride + col);
    digests_[static_cast<size_t>(segment.digest)] += reference_digest(
        wire_at(segment, kind, row, col), kind.wire_bytes, element * kind.wire_bytes);
  }
  float float_at(const Segment& segment, const Kind& kind, int64_t row, int64_t col) {
    uint32_t bits = 0;
    std::memcpy(&bits, local_at(segment, kind, row, col), kind.local_bytes);
    return as_float(kind.local_bytes == 4 ? bits : bits << 16);
  }
  float scale_of(const Segment& segment, const Kind& kind, int64_t block_row, int64_t block_col) {
    float largest = 0;
    for (int64_t row = 128 * block_row; row < segment.rows && row < 128 * (block_row + 1); ++row) {
      for (int64_t col = 128 * block_col; col < segment.cols && col < 128 * (block_col + 1);
           ++col) {
        const float magnitude = std::fabs(float_at(segment, kind, row, col));
        if (std::isnan(magnitude)) return as_float(0x7FC00000u);
        largest = std::fmax(largest, magnitude);
      }
    }
    const float scale = largest / 448.0f;
    return scale == 0 ? 1.0f : scale;
  }

  Scenario& scenario_;
  std::vector<uint64_t>& digests_;
};

}  // namespace

uint64_t reference_digest(const std::byte* bytes, size_t count, uint64_t position) {
  using Wide = unsigned __int128;
  const Wide two32 = Wide{1} << 32;
  Wide sum = 0;
  for (size_t idx = 0; idx < count; ++idx) {
    const uint64_t at = position + idx, unit = at / 4;
    const auto seed = static_cast<uint64_t>((Wide{unit % (1ull << 32)} * 2654435761ull +
                                             Wide{unit >> 32} * 2246822519ull + 668265263ull) %
                                            two32);
    const uint64_t folded = seed ^ (seed / 65536);
    const auto square = static_cast<uint64_t>(Wide{folded} * (Wide{folded} * 2 + 1) % two32);
    const uint64_t key = square ^ (square / 32768);
    sum += (Wide{static_cast<uint8_t>(bytes[idx])} << (8 * (at % 4))) * (two32 + key);
  }
  return static_cast<uint64_t>(sum);
}

void fill_randomly(std::mt19937_64& random, Bytes& bytes) {
  constexpr uint32_t kHard[] = {0x7F800000u, 0x7F800001u, 0x7FBFFFFFu, 0x7F7FFFFFu, 0x00008000u,
                                0x00018000u, 0x3F808000u, 0x3F818000u, 0x3F808001u, 0x7FFFFFFFu};
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (size_t at = 0; at + 4 <= bytes.size(); at += 4) {
    if (random() % 8) continue;
    const uint32_t bits = kHard[random() % 10] | static_cast<uint32_t>(random() & 1u) << 31;
    std::memcpy(&bytes[at], &bits, 4);
  }
}

Scenario random_scenario(std::mt19937_64& random) {
  Generator generator(random);
  const bool quantises_some = generator.pick(0, 2) == 0;
  for (const Kind& kind : kKinds) {
    if (quantises(kind.op) && !quantises_some) continue;
    for (int64_t copy = generator.pick(0, 2); copy > 0; --copy) generator.add(kind);
  }
  generator.finish();
  return std::move(generator.scenario);
}

void run_reference(Scenario& scenario, bool pack, std::vector<uint64_t>& digests) {
  Reference reference(scenario, digests);
  size_t next_scales = 0;
  for (const Segment& segment : scenario.segments) {
    if (quantises(segment.op)) {
      reference.quantise(segment, scenario.scales[next_scales++]);
    } else {
      reference.move(segment, pack);
    }
  }
}

}  // namespace asyncrl::reshard::testing
