// Threads that share the copies of one bucket. They are made once and sleep between buckets.
#ifndef ASYNCRL_RESHARD_WORKERS_H_
#define ASYNCRL_RESHARD_WORKERS_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace asyncrl::reshard {

class CopyWorkers {
 public:
  // `num_threads` counts the calling thread. Throws std::invalid_argument unless it is 1 to 256.
  explicit CopyWorkers(int num_threads);
  ~CopyWorkers();
  CopyWorkers(const CopyWorkers&) = delete;
  CopyWorkers& operator=(const CopyWorkers&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls work(0) .. work(num_threads - 1), each on its own thread, 0 on this one, and returns when
  // all have returned. `work` must not throw. Concurrent callers take turns.
  void run(const std::function<void(int)>& work);

 private:
  void serve(std::stop_token stop, int share);

  const int num_threads_;
  std::mutex callers_;  // held during a whole `run`
  std::mutex mutex_;    // guards what follows
  std::condition_variable_any started_;
  std::condition_variable finished_;
  const std::function<void(int)>* work_ = nullptr;
  uint64_t round_ = 0;
  int num_busy_ = 0;
  std::vector<std::jthread> threads_;  // last: they stop before the rest goes
};

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_WORKERS_H_
