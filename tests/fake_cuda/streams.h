// Streams, each with a thread that does its work in order, and events.
// FAKE_CUDA_DELAY_US: how long each piece of work takes at least.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

using Clock = std::chrono::steady_clock;
using Work = std::function<void()>;
using Guard = std::lock_guard<std::mutex>;
using Wait = std::unique_lock<std::mutex>;

const long delay_us = getenv("FAKE_CUDA_DELAY_US") ? atol(getenv("FAKE_CUDA_DELAY_US")) : 0;

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = true;
  long recorded = 0;  // how often
  Clock::time_point at = Clock::now();

  long record() {
    Guard lock(mutex);
    done = false;
    return ++recorded;
  }

  void pass(long record) {
    Guard lock(mutex);
    if (recorded != record) return;  // it was recorded again
    done = true;
    at = Clock::now();
    changed.notify_all();
  }

  bool passed() {
    Guard lock(mutex);
    return done;
  }

  long last_record() {
    Guard lock(mutex);
    return recorded;
  }

  void wait(long record) {
    Wait lock(mutex);
    changed.wait(lock, [&] { return done || recorded != record; });
  }
};

struct Stream {
  int priority;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  bool busy = false;
  std::atomic<bool> capturing{false};

  explicit Stream(int priority) : priority(priority) {
    std::thread([this] { run(); }).detach();
  }

  void run() {
    for (;;) {
      Work work;
      {
        Wait lock(mutex);
        changed.wait(lock, [this] { return !queue.empty(); });
        work = std::move(queue.front());
        queue.pop_front();
        busy = true;
      }
      if (delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      work();
      work = nullptr;
      {
        Guard lock(mutex);
        busy = false;
      }
      changed.notify_all();
    }
  }

  void put(Work work) {
    {
      Guard lock(mutex);
      queue.push_back(std::move(work));
    }
    changed.notify_all();
  }

  bool idle() {
    Guard lock(mutex);
    return queue.empty() && !busy;
  }

  void synchronize() {
    Wait lock(mutex);
    changed.wait(lock, [this] { return queue.empty() && !busy; });
  }
};
