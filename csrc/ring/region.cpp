#include "ring/region.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "common/crash_point.h"
#include "common/crc32c.h"
#include "ring/errors.h"
#include "ring/table.h"

namespace asyncrl::ring {

namespace {

// A descriptor that closes itself.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

void MakeDirectory(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) ThrowSystem("mkdir " + path);
}

uint32_t ChecksumOf(const Geometry& geometry) {
  return Crc32c(&geometry, offsetof(Geometry, checksum));
}

Geometry MakeGeometry(const Options& options, uint64_t page_bytes, uint64_t lock_inode) {
  Geometry g{};
  std::memcpy(g.magic, kMagic, sizeof(kMagic));
  g.abi_major = kAbiMajor;
  g.abi_minor = kAbiMinor;
  g.compatible = kCompatibleFeatures;
  g.incompatible = kIncompatibleFeatures;
  if (getrandom(g.uuid, sizeof(g.uuid), 0) != sizeof(g.uuid)) ThrowSystem("getrandom");
  g.page_bytes = page_bytes;
  g.arena_bytes = AlignUp(options.arena_bytes, page_bytes);
  g.max_record_bytes = options.max_record_bytes ? options.max_record_bytes : g.arena_bytes / 2;
  g.key_window = options.key_window;
  g.lock_inode = lock_inode;
  g.num_slots = options.num_slots;
  g.num_participants = options.num_participants;
  g.num_groups = options.num_groups;
  g.num_producers = options.num_producers;
  DeriveOffsets(g);
  g.checksum = ChecksumOf(g);
  return g;
}

void CheckOptions(const Options& options) {
  auto require = [](bool ok, const std::string& rule) {
    if (!ok) throw std::invalid_argument("ring: " + rule);
  };
  require(options.arena_bytes > 0, "arena_bytes must be positive");
  require(options.num_slots > 0 && options.num_slots < kNil, "num_slots must be positive");
  require(options.num_participants > 0 && options.num_participants < 32768,
          "1 to 32767 participants");
  require(options.num_groups > 0 && options.num_producers > 0,
          "at least one group and one producer");
  require(options.key_window > 0 && options.key_window % kKeysPerWord == 0,
          "key_window must be a positive multiple of 32");
  require(options.max_record_bytes <= options.arena_bytes,
          "max_record_bytes = " + std::to_string(options.max_record_bytes) +
              " exceeds arena_bytes = " + std::to_string(options.arena_bytes));
}

void Reserve(const File& file, const std::string& directory, uint64_t total) {
  if (ftruncate(file.fd(), static_cast<off_t>(total)) == 0 &&
      fallocate(file.fd(), 0, 0, static_cast<off_t>(total)) == 0) {
    return;
  }
  if (errno != ENOSPC && errno != EFBIG && errno != ENOMEM)
    ThrowSystem("reserving " + directory + "/ring");
  struct statvfs space{};
  statvfs(directory.c_str(), &space);
  throw RingError(ErrorKind::kNoSpace,
                  directory + ": the ring needs " + std::to_string(total) +
                      " bytes, the file system has " +
                      std::to_string(uint64_t{space.f_bavail} * space.f_bsize) +
                      " free; make the arena smaller or the file system larger");
}

std::byte* Map(int fd, uint64_t total) {
  void* base = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (base == MAP_FAILED) ThrowSystem("mmap of the ring");
  return static_cast<std::byte*>(base);
}

Geometry ReadGeometry(const File& file, const std::string& path, uint64_t offset) {
  Geometry g;
  if (pread(file.fd(), &g, sizeof(g), static_cast<off_t>(offset)) !=
          static_cast<ssize_t>(sizeof(g)) ||
      std::memcmp(g.magic, kMagic, sizeof(kMagic)) != 0) {
    throw RingError(ErrorKind::kForeign,
                    path + ": not a ring (no magic number); was it made by Ring.create?");
  }
  return g;
}

void CheckGeometry(const Geometry& g, const std::string& path, uint64_t file_bytes) {
  if (g.abi_major != kAbiMajor || (g.incompatible & ~kIncompatibleFeatures) != 0) {
    throw RingError(ErrorKind::kAbi, path + ": ring ABI " + std::to_string(g.abi_major) + "." +
                                         std::to_string(g.abi_minor) + " with features " +
                                         std::to_string(g.incompatible) + ", this build reads " +
                                         std::to_string(kAbiMajor) +
                                         "; use one version of asyncrl");
  }
  if (g.checksum != ChecksumOf(g)) {
    throw RingError(ErrorKind::kCorrupt, path + ": the header's checksum is " +
                                             std::to_string(g.checksum) + " and should be " +
                                             std::to_string(ChecksumOf(g)) +
                                             "; try `asyncrl ring --repair`");
  }
  Geometry expected = g;
  DeriveOffsets(expected);
  if (std::memcmp(&expected, &g, sizeof(g)) != 0 || g.total_bytes != file_bytes) {
    throw RingError(ErrorKind::kCorrupt,
                    path + ": the header describes " + std::to_string(expected.total_bytes) +
                        " bytes, the file has " + std::to_string(file_bytes) +
                        "; it was truncated or overwritten: create the ring anew");
  }
}

File OpenRing(const std::string& directory) {
  const std::string path = directory + "/ring";
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0 && (errno == ENOENT || errno == ENOTDIR)) {
    throw RingError(ErrorKind::kMissing,
                    path + ": no such ring; create it first, or check the path");
  }
  if (fd < 0) ThrowSystem(path);
  return File(fd);
}

uint64_t SizeOf(const File& file) {
  struct stat status;
  if (fstat(file.fd(), &status) != 0) ThrowSystem("fstat of the ring");
  return static_cast<uint64_t>(status.st_size);
}

}  // namespace

void Region::Create(const std::string& directory, const Options& options) {
  CheckOptions(options);
  const std::string path = directory + "/ring";
  MakeDirectory(directory);
  MakeDirectory(directory + "/wake");
  if (access(path.c_str(), F_OK) == 0) {
    throw RingError(ErrorKind::kExists,
                    path + ": a ring is there; open it, or remove it with Ring.unlink");
  }
  const File lock(open((directory + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (lock.fd() < 0) ThrowSystem(directory + "/lock");
  struct stat lock_status;
  if (fstat(lock.fd(), &lock_status) != 0) ThrowSystem("fstat " + directory + "/lock");
  CRASH_POINT("create.directory");
  // A nameless file: nothing of it stays when this process dies before the link.
  const File file(open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file.fd() < 0) ThrowSystem("a temporary file in " + directory);
  struct stat status;
  if (fstat(file.fd(), &status) != 0) ThrowSystem("fstat of the ring");
  const uint64_t page = std::max<uint64_t>(4096, static_cast<uint64_t>(status.st_blksize));
  const Geometry geometry = MakeGeometry(options, page, lock_status.st_ino);
  Reserve(file, directory, geometry.total_bytes);
  CRASH_POINT("create.reserved");
  {
    Region region(directory, Map(file.fd(), geometry.total_bytes), geometry);
    Header& header = *new (region.base_) Header{};
    header.geometry = geometry;
    std::memcpy(region.base_ + geometry.copy_at, &geometry, sizeof(geometry));
    header.control.next_seq.store(1, std::memory_order_relaxed);
    header.control.min_version.store(INT64_MIN, std::memory_order_relaxed);
    Table(region).Rebuild();
    header.control.num_recoveries = 0;
    CRASH_POINT("create.filled");
  }
  const std::string self = "/proc/self/fd/" + std::to_string(file.fd());
  if (linkat(AT_FDCWD, self.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    if (errno == EEXIST)
      throw RingError(ErrorKind::kExists, path + ": another process made the ring first");
    ThrowSystem("link " + path);
  }
  CRASH_POINT("create.linked");
}

std::shared_ptr<Region> Region::Open(const std::string& directory, bool read_only_arena) {
  const std::string path = directory + "/ring";
  const File file = OpenRing(directory);
  const Geometry geometry = ReadGeometry(file, path, 0);
  CheckGeometry(geometry, path, SizeOf(file));
  struct stat lock_status;
  if (stat((directory + "/lock").c_str(), &lock_status) != 0 ||
      lock_status.st_ino != geometry.lock_inode) {
    throw RingError(ErrorKind::kCorrupt,
                    directory +
                        "/lock: missing or replaced since the ring was made, so"
                        " participants cannot see each other: create the ring anew");
  }
  std::byte* base = Map(file.fd(), geometry.total_bytes);
  std::shared_ptr<Region> region(new Region(directory, base, geometry));
  if (read_only_arena && mprotect(base + geometry.arena_at, geometry.arena_bytes, PROT_READ) != 0) {
    ThrowSystem("mprotect of the arena");
  }
  return region;
}

void Region::Unlink(const std::string& directory) {
  const std::string ring = directory + "/ring";
  if (unlink(ring.c_str()) != 0 && errno != ENOENT) ThrowSystem("unlink " + ring);
  CRASH_POINT("unlink.ring");
  const std::string wake = directory + "/wake";
  if (DIR* entries = opendir(wake.c_str())) {
    while (const dirent* entry = readdir(entries)) {
      if (entry->d_name[0] != '.') unlink((wake + "/" + entry->d_name).c_str());
    }
    closedir(entries);
    rmdir(wake.c_str());
  }
  unlink((directory + "/lock").c_str());
  if (rmdir(directory.c_str()) != 0 && errno != ENOENT) ThrowSystem("rmdir " + directory);
}

bool Region::RepairHeader(const std::string& directory) {
  const std::string path = directory + "/ring";
  const File file = OpenRing(directory);
  const uint64_t size = SizeOf(file);
  Geometry good;
  try {
    CheckGeometry(ReadGeometry(file, path, 0), path, size);
    return false;
  } catch (const RingError& error) {
    if (error.kind() != ErrorKind::kCorrupt && error.kind() != ErrorKind::kForeign) throw;
  }
  // The copy is the last 128-aligned Geometry of the last page.
  for (uint64_t at = size - size % 128; at >= 128 && size - at <= (uint64_t{2} << 20); at -= 128) {
    if (pread(file.fd(), &good, sizeof(good), static_cast<off_t>(at)) !=
            static_cast<ssize_t>(sizeof(good)) ||
        std::memcmp(good.magic, kMagic, sizeof(kMagic)) != 0 || good.copy_at != at) {
      continue;
    }
    CheckGeometry(good, path, size);
    if (pwrite(file.fd(), &good, sizeof(good), 0) != static_cast<ssize_t>(sizeof(good))) {
      ThrowSystem("writing the header of " + path);
    }
    return true;
  }
  throw RingError(ErrorKind::kCorrupt,
                  path + ": neither the header nor its copy can be read; create it anew");
}

Region::~Region() { munmap(base_, geometry_.total_bytes); }

std::string Region::wake_path(uint32_t participant) const {
  return directory_ + "/wake/" + std::to_string(participant);
}

}  // namespace asyncrl::ring
