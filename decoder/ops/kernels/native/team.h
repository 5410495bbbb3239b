// Work shared between the calling thread and XLA's own pool, so that kernels and XLA never run more threads than cores.
//
// Chunks are handed out by a counter. The caller takes them too and waits only for chunks that someone has begun, so a
// busy pool costs speed, never a deadlock; a helper that comes late finds nothing left and touches nothing.
#ifndef DECODER_TEAM_H_
#define DECODER_TEAM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace decoder {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

struct Region {
  void (*call)(void*, int64_t);
  void* work;
  int64_t chunks;
  std::atomic<int64_t> next{0}, done{0};

  void help() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_acq_rel)) < chunks;) {
      call(work, i);
      done.fetch_add(1, std::memory_order_acq_rel);
    }
  }
};

// Calls work(i) for i in 0 … chunks − 1, from several threads. Returns when all have returned.
template <typename Work>
void share(xla::ffi::ThreadPool& pool, int64_t chunks, Work work) {
  const int64_t helpers = std::min<int64_t>(chunks, pool.num_threads()) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < chunks; ++i) work(i);
    return;
  }
  auto region = std::make_shared<Region>();
  region->call = [](void* w, int64_t i) { (*static_cast<Work*>(w))(i); };
  region->work = &work;
  region->chunks = chunks;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([region] { region->help(); });
  region->help();
  for (int spins = 0; region->done.load(std::memory_order_acquire) < chunks; ++spins) {
    if (spins < 2000) pause_cpu();
    else std::this_thread::yield();
  }
}

}  // namespace decoder

#endif  // DECODER_TEAM_H_
