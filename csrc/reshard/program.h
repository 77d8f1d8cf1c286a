// A checked table of segments, and its executor on the CPU.
#ifndef ASYNCRL_RESHARD_PROGRAM_H_
#define ASYNCRL_RESHARD_PROGRAM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reshard/index.h"

namespace asyncrl::reshard {

class CopyWorkers;

// The copies of one bucket. Every segment is checked against the sizes of the parameters, of the
// bucket and of the digest table when the program is built, so that running it cannot leave them.
class CopyProgram {
 public:
  // `parameter_bytes[i]` is the size of local parameter i; `scales` has one entry per quantising
  // segment, in their order. Throws std::invalid_argument that names the first segment that does
  // not fit.
  CopyProgram(std::vector<Segment> segments, const std::vector<int64_t>& parameter_bytes,
              int64_t wire_bytes, int64_t num_digests, std::vector<BlockScales> scales = {});

  // Copies parameters into the bucket and adds to the `num_digests` digests. Safe to call from
  // several threads at once on different buckets and digest tables; the parameters must not change
  // meanwhile. `workers`, if any, share the work, and must not be in use by another call.
  void pack(const std::vector<uint64_t>& parameters, std::byte* wire, uint64_t* digests,
            CopyWorkers* workers = nullptr) const;

  // Copies the bucket into the parameters and adds to the digests. One caller at a time per
  // parameter element; segments of one bucket never overlap there. Throws std::invalid_argument
  // where a segment quantises.
  void unpack(const std::vector<uint64_t>& parameters, const std::byte* wire, uint64_t* digests,
              CopyWorkers* workers = nullptr) const;

  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<BlockScales>& scales() const { return scales_; }
  int64_t num_parameters() const { return num_parameters_; }
  int64_t wire_bytes() const { return wire_bytes_; }
  int64_t num_digests() const { return num_digests_; }

  // Throw std::invalid_argument: another number of parameters; a program that can only pack.
  void check_parameters(size_t num_parameters) const;
  void check_unpacks() const;

 private:
  void check_scales(int64_t wire_bytes, int64_t num_digests) const;

  std::vector<Segment> segments_;
  std::vector<BlockScales> scales_;
  int64_t num_parameters_;
  int64_t wire_bytes_;
  int64_t num_digests_;
};

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_PROGRAM_H_
