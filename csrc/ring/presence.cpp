#include "ring/presence.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <mutex>
#include <set>

#include "ring/errors.h"
#include "ring/layout.h"

namespace asyncrl::ring {

// All Presence objects of this process, so that a forked child can close their descriptors.
struct PresenceRegistry {
  std::mutex mutex;
  std::set<Presence*> all;

  static PresenceRegistry& Get() {
    static PresenceRegistry* registry = [] {
      pthread_atfork([] { Get().mutex.lock(); }, [] { Get().mutex.unlock(); }, CloseInChild);
      return new PresenceRegistry;
    }();
    return *registry;
  }

  static void CloseInChild() {
    for (Presence* presence : Get().all) {
      if (presence->fd_ >= 0) close(presence->fd_);
      presence->fd_ = -1;
    }
    Get().all.clear();
    Get().mutex.unlock();
  }
};

namespace {

struct flock ByteOf(uint32_t index, short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = index;
  lock.l_len = 1;
  return lock;
}

bool TryLock(int fd, uint32_t index) {
  struct flock lock = ByteOf(index, F_WRLCK);
  if (fcntl(fd, F_OFD_SETLK, &lock) == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  ThrowSystem("lock file: F_OFD_SETLK");
}

bool IsHeld(int fd, uint32_t index) {
  struct flock lock = ByteOf(index, F_WRLCK);
  if (fcntl(fd, F_OFD_GETLK, &lock) != 0) ThrowSystem("lock file: F_OFD_GETLK");
  return lock.l_type != F_UNLCK;
}

int OpenLockFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) {
    throw RingError(ErrorKind::kMissing, path + ": no such lock file; the ring was unlinked");
  }
  if (fd < 0) ThrowSystem(path);
  return fd;
}

}  // namespace

Presence::Presence(const std::string& path) : fd_(OpenLockFile(path)), self_(kNil) {
  PresenceRegistry& registry = PresenceRegistry::Get();
  std::lock_guard guard(registry.mutex);
  registry.all.insert(this);
}

Presence::~Presence() { Leave(); }

void Presence::Leave() {
  PresenceRegistry& registry = PresenceRegistry::Get();
  std::lock_guard guard(registry.mutex);
  registry.all.erase(this);
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

uint32_t Presence::Claim(uint32_t limit) {
  for (uint32_t index = 0; index < limit; ++index) {
    if (TryLock(fd_, index)) return self_ = index;
  }
  return kNil;
}

bool Presence::IsAlive(uint32_t index) const { return index == self_ || IsHeld(fd_, index); }

bool Presence::Seize(uint32_t index) { return index != self_ && TryLock(fd_, index); }

void Presence::Drop(uint32_t index) {
  struct flock lock = ByteOf(index, F_UNLCK);
  if (fcntl(fd_, F_OFD_SETLK, &lock) != 0) ThrowSystem("lock file: F_OFD_SETLK unlock");
}

uint64_t Presence::inode() const {
  struct stat status;
  if (fstat(fd_, &status) != 0) ThrowSystem("lock file: fstat");
  return status.st_ino;
}

bool AnyoneAlive(const std::string& path, uint32_t num_participants) {
  const int fd = OpenLockFile(path);
  bool found = false;
  for (uint32_t index = 0; index < num_participants && !found; ++index) found = IsHeld(fd, index);
  close(fd);
  return found;
}

}  // namespace asyncrl::ring
