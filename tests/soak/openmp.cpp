// What the kernels use of OpenMP's runtime, on std::thread. GCC's own runtime synchronizes in ways that ThreadSanitizer does not see, so
// that it would report every loop; this one it understands. Linked into the kernels in place of libgomp, and built like them.

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct Loop {
    std::atomic<long> next;
    long end, step;  // step: that of a chunk
};

struct Team {
    const int threads;
    std::mutex mutex;
    std::condition_variable all_there;
    int waiting = 0;
    long barriers = 0;
    std::map<long, Loop> loops;  // by their number in the region

    void barrier() {
        std::unique_lock<std::mutex> lock(mutex);
        const long passed = barriers;
        if (++waiting == threads) {
            waiting = 0;
            ++barriers;
            all_there.notify_all();
        } else {
            all_there.wait(lock, [&] { return barriers != passed; });
        }
    }
};

thread_local Team* team = nullptr;
thread_local int number = 0;
thread_local long loops_begun = 0;
thread_local Loop* loop = nullptr;

}  // namespace

#pragma GCC visibility push(hidden)

extern "C" {

int omp_get_num_threads() { return team ? team->threads : 1; }
int omp_get_thread_num() { return number; }
void GOMP_barrier() { team->barrier(); }

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
    Team here{static_cast<int>(threads ? threads : 1)};
    const auto work = [&](int n) {
        team = &here;
        number = n;
        loops_begun = 0;
        body(data);
        team = nullptr;
        number = 0;
    };
    std::vector<std::thread> others;
    for (int n = 1; n < here.threads; ++n) others.emplace_back(work, n);
    work(0);
    for (std::thread& other : others) other.join();
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* begin, long* end) {
    const long first = loop->next.fetch_add(loop->step);
    if (first >= loop->end) return false;
    *begin = first;
    *end = first + loop->step < loop->end ? first + loop->step : loop->end;
    return true;
}

// The loops of the kernels count up by 1.
bool GOMP_loop_nonmonotonic_dynamic_start(long start, long stop, long, long chunk, long* begin, long* end) {
    {
        std::lock_guard<std::mutex> lock(team->mutex);
        const auto found = team->loops.find(loops_begun);
        if (found != team->loops.end()) {
            loop = &found->second;
        } else {
            loop = &team->loops[loops_begun];
            loop->next = start;
            loop->end = stop;
            loop->step = chunk;
        }
        ++loops_begun;
    }
    return GOMP_loop_nonmonotonic_dynamic_next(begin, end);
}

void GOMP_loop_end() { team->barrier(); }
void GOMP_loop_end_nowait() {}

}  // extern "C"

#pragma GCC visibility pop
