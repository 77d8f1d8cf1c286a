// Who is alive: one byte of the `lock` file per participant, held by an open-file-description lock.
//
// The kernel drops the lock when the last descriptor of the description is closed, so also at
// SIGKILL, and it works across PID namespaces. Descriptors are O_CLOEXEC, and a forked child closes
// its copies at once (pthread_atfork): otherwise it would keep a dead parent's byte.
#pragma once

#include <cstdint>
#include <string>

namespace asyncrl::ring {

class Presence {
 public:
  // Opens the lock file. Throws kMissing / kSystem.
  explicit Presence(const std::string& path);
  ~Presence();
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

  // Takes the first byte that nobody holds and returns its index, or kNil when all `limit` are
  // held.
  uint32_t Claim(uint32_t limit);

  // Whether some process holds byte `index`. True for this object's own byte. Any thread.
  bool IsAlive(uint32_t index) const;

  // Takes a dead participant's byte so that nobody can become that participant meanwhile. Returns
  // false when it is held: its owner lives, or another process is looking. Undo with Drop.
  bool Seize(uint32_t index);
  void Drop(uint32_t index);

  // Closes the descriptor, and so gives the byte back.
  void Leave();

  // Inode of the lock file: a replaced file would hide participants from each other.
  uint64_t inode() const;

  // True in a child of the process that opened it, and after Leave: there is no descriptor any
  // more.
  bool forked() const { return fd_ < 0; }

 private:
  friend struct PresenceRegistry;
  int fd_;
  uint32_t self_;
};

// Whether anybody at all holds a byte of the lock file at `path`.
bool AnyoneAlive(const std::string& path, uint32_t num_participants);

}  // namespace asyncrl::ring
