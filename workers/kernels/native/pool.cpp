#include "pool.h"

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

class Pool {
public:
    ~Pool() { resize(1); }

    void resize(int threads) {
        stop();
        for (int part = 1; part < threads; part++) workers_.emplace_back([this, part, seen = generation_.load()] { work(part, seen); });
    }

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    void run(Task task, void* context) {
        if (workers_.empty()) return task(context, 0, 1);
        task_ = task;
        context_ = context;
        left_.store(size() - 1, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        task(context, 0, size());
        for (int spins = 0; left_.load(std::memory_order_acquire) != 0; spins++) {
            if (spins < SPINS) pause();
            else std::this_thread::yield();
        }
    }

private:
    void work(int part, unsigned seen) {
        for (;;) {
            await(seen);
            seen++;
            if (stopping_.load(std::memory_order_acquire)) return;
            task_(context_, part, size());
            left_.fetch_sub(1, std::memory_order_release);
        }
    }

    void await(unsigned seen) {
        for (int spins = 0; spins < SPINS; spins++) {
            if (generation_.load(std::memory_order_acquire) != seen) return;
            pause();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
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
void run(Task task, void* context) { pool().run(task, context); }

}  // namespace dovetail
