#include "pool.h"

#include "shards.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace dovetail {
namespace {

// About 30 microseconds: longer than the serial stretches between two parts of a layer, far shorter than the wait for the next pass.
constexpr int SPINS = 2000;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A thread that the system has not let run when the caller has done its own part finds its part done: where another process has one of the cores, every wait
// would last for a time slice of it, several milliseconds.
class Pool {
public:
    ~Pool() { resize(1); }

    void resize(int threads) {
        stop();
        const unsigned now = generation_.load();
        claims_ = std::vector<Claim>(threads);
        for (auto& claim : claims_) claim.taken = now;
        divide_threads(threads);
        for (int part = 1; part < threads; part++)
            workers_.emplace_back([this, part, now] {
                settle(part);
                work(part, now);
            });
    }

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    void run(Task task, void* context, bool at_home) {
        if (workers_.empty()) return task(context, 0, 1);
        task_ = task;
        context_ = context;
        left_.store(size() - 1, std::memory_order_relaxed);
        const unsigned mine = generation_.load(std::memory_order_relaxed) + 1;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            generation_.store(mine, std::memory_order_release);
        }
        wake_.notify_all();
        task(context, 0, size());
        for (int part = 1, stop = at_home ? first_part(1) : size(); part < stop; part++) attempt(part, mine);
        for (int spins = 0; left_.load(std::memory_order_acquire) != 0; spins++) {
            if (spins < SPINS) pause();
            else std::this_thread::yield();
        }
    }

private:
    // By which run a part was last taken, on a cache line of its own.
    struct alignas(64) Claim {
        std::atomic<unsigned> taken{0};
        Claim() = default;
        Claim(const Claim& other) : taken(other.taken.load()) {}
    };

    // Does a part of a run unless it has been taken. A part that is not done keeps its run from ending, and the next one from beginning.
    void attempt(int part, unsigned run) {
        unsigned before = run - 1;
        if (!claims_[part].taken.compare_exchange_strong(before, run, std::memory_order_acq_rel)) return;
        task_(context_, part, size());
        left_.fetch_sub(1, std::memory_order_release);
    }

    void work(int part, unsigned seen) {
        for (;;) {
            seen = await(seen);
            if (stopping_.load(std::memory_order_acquire)) return;
            attempt(part, seen);
        }
    }

    // The number of another run than the one that was seen last.
    unsigned await(unsigned seen) {
        unsigned now;
        for (int spins = 0; spins < SPINS; spins++) {
            if ((now = generation_.load(std::memory_order_acquire)) != seen) return now;
            pause();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return (now = generation_.load(std::memory_order_acquire)) != seen; });
        return now;
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
    }

    std::vector<std::thread> workers_;
    std::vector<Claim> claims_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<unsigned> generation_{0};
    std::atomic<int> left_{0};
    std::atomic<bool> stopping_{false};
    Task task_ = nullptr;
    void* context_ = nullptr;
};

// Never destroyed: at exit the system ends its threads, and a destructor would wait for one that is in the middle of a task.
Pool& pool() {
    static Pool* const one = new Pool;
    return *one;
}

}  // namespace

void set_threads(int threads) { pool().resize(threads); }
int threads() { return pool().size(); }
void run(Task task, void* context, bool at_home) { pool().run(task, context, at_home); }

}  // namespace dovetail
