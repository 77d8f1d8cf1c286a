#include "reshard/workers.h"

#include <stdexcept>
#include <string>

namespace asyncrl::reshard {

CopyWorkers::CopyWorkers(int num_threads) : num_threads_(num_threads) {
  if (num_threads < 1 || num_threads > 256)
    throw std::invalid_argument("copies are shared by 1 to 256 threads, not " +
                                std::to_string(num_threads));
  for (int share = 1; share < num_threads; ++share)
    threads_.emplace_back([this, share](std::stop_token stop) { serve(stop, share); });
}

CopyWorkers::~CopyWorkers() = default;

void CopyWorkers::run(const std::function<void(int)>& work) {
  const std::scoped_lock turn(callers_);
  {
    const std::scoped_lock lock(mutex_);
    work_ = &work;
    num_busy_ = num_threads_ - 1;
    ++round_;
  }
  started_.notify_all();
  work(0);
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return num_busy_ == 0; });
}

void CopyWorkers::serve(std::stop_token stop, int share) {
  uint64_t served = 0;
  std::unique_lock lock(mutex_);
  while (started_.wait(lock, stop, [&] { return round_ != served; })) {
    served = round_;
    const std::function<void(int)>& work = *work_;
    lock.unlock();
    work(share);
    lock.lock();
    if (--num_busy_ == 0) finished_.notify_one();
  }
}

}  // namespace asyncrl::reshard
