// Sets how the kernels of this process share their work among threads.
#include "crew.h"
#include "pool.h"

// `uses_openmp`: with OpenMP's threads, not with those of the pool. `spin`: ns that a thread of the pool waits before it sleeps.
extern "C" void set_waiting(int32_t uses_openmp, int64_t spin) {
  tokenloom_pool::settings.uses_openmp.store(uses_openmp != 0);
  tokenloom_pool::settings.spin.store(spin);
}

// At most so many threads compute a kernel, whatever its caller asks for.
extern "C" void set_most_threads(int32_t threads) { tokenloom_pool::settings.most_threads.store(threads); }

// Keeps OpenMP's threads off the calling thread's core, or lets them use it again. For the thread that calls kernels.
extern "C" void keep_apart(int32_t is_apart) { is_apart ? tokenloom_crew::keep_off_caller() : tokenloom_crew::let_go(); }
