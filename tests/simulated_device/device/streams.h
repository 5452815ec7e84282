// Streams and events. A stream is a thread that runs its tasks in order. An event is a mark that this thread passes.
//
// Beside what the threads happen to do, each stream has a clock: what the program has *ordered*. The checker looks at
// clocks alone, so it reports a missing wait also where the threads were lucky.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {

using Time = std::chrono::steady_clock;
using Task = std::function<void()>;
using Counts = std::map<std::pair<std::string, std::string>, int64_t>;  // (phase, operator) -> how many

constexpr int kNumDevices = 2;
constexpr int kHost = 0;  // the number of the host in clocks; streams are numbered from 1

// By number of the host or a stream: how many of its operations are done before the next one of the clock's owner.
class Clock {
 public:
  uint64_t of(int number) const { return size_t(number) < counts_.size() ? counts_[number] : 0; }
  void set(int number, uint64_t count) {
    if (counts_.size() <= size_t(number)) counts_.resize(number + 1);
    counts_[number] = count;
  }
  void join(const Clock& other) {
    for (size_t k = 0; k < other.counts_.size(); ++k)
      if (of(k) < other.counts_[k]) set(k, other.counts_[k]);
  }

 private:
  std::vector<uint64_t> counts_;
};

// What an event records.
class Mark {
 public:
  Clock clock;  // of the stream, where the mark was queued

  void pass() {
    std::lock_guard<std::mutex> held(lock_);
    at_ = Time::now();
    is_passed_ = true;
    passed_.notify_all();
  }
  bool is_passed() {
    std::lock_guard<std::mutex> held(lock_);
    return is_passed_;
  }
  void wait() {
    std::unique_lock<std::mutex> held(lock_);
    passed_.wait(held, [this] { return is_passed_; });
  }
  bool wait_for(std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> held(lock_);
    return passed_.wait_for(held, limit, [this] { return is_passed_; });
  }
  Time::time_point at() {
    wait();
    return at_;
  }

 private:
  std::mutex lock_;
  std::condition_variable passed_;
  bool is_passed_ = false;
  Time::time_point at_;
};
using MarkPtr = std::shared_ptr<Mark>;

inline thread_local bool t_is_stream = false;  // whether this thread is a stream's

class Stream {
 public:
  const int number, device;
  const c10::StreamId id;
  const std::string kind;  // "default", "high" (priority), "side", or "group" (a process group's own)
  Clock clock;             // guarded by the driver's lock, as is the count
  uint64_t num_launched = 0;

  Stream(int number, int device, c10::StreamId id, std::string kind)
      : number(number), device(device), id(id), kind(std::move(kind)) {
    std::thread([this] { run(); }).detach();  // a stream lives as long as the process, as those of torch's pools
  }
  void push(Task task);
  bool is_idle() {
    std::lock_guard<std::mutex> held(lock_);
    return num_done_ == num_pushed_;
  }
  std::string name() const {
    return kind + " stream " + std::to_string(number) + " of device " + std::to_string(device);
  }

 private:
  void run();

  std::mutex lock_;
  std::condition_variable has_tasks_;
  std::deque<std::pair<std::chrono::microseconds, Task>> tasks_;  // how late each begins
  uint64_t num_pushed_ = 0, num_done_ = 0;
};

// What all threads share. `lock` is held for a whole launch, so all agree on one order of launches.
struct Driver {
  std::recursive_mutex lock;
  std::vector<Stream*> streams{nullptr};        // by number
  std::vector<Stream*> of_device[kNumDevices];  // by torch's id: 0 is the default stream
  Clock host;                                   // all host threads are one: they do not race with each other here
  uint64_t num_host_operations = 0;
  std::string phase;  // of the loop, as the test calls it
  Counts host_waits, side_allocations;
  int64_t num_kernels = 0;
  std::string error;  // the first of a kernel; every later launch raises it, as after an assertion on a device

  std::mutex delays_lock;
  std::map<std::string, int> delays;  // microseconds before each task that is queued, by kind of stream
  int jitter = 0;                     // at most as many more, drawn by seed, stream and number of the task
  uint64_t seed = 0;
};
inline Driver& driver() {
  static Driver& one = *new Driver();  // never destroyed: streams run until the process ends
  return one;
}
using Held = std::lock_guard<std::recursive_mutex>;

inline thread_local int t_device = 0;
inline thread_local c10::StreamId t_current[kNumDevices] = {};
inline thread_local std::string t_operator;  // the operator that is being launched

inline uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

inline void Stream::push(Task task) {
  std::lock_guard<std::mutex> held(lock_);
  int64_t pause = 0;
  {
    std::lock_guard<std::mutex> held_too(driver().delays_lock);
    auto found = driver().delays.find(kind);
    if (found != driver().delays.end()) pause = found->second;
    if (driver().jitter) pause += mixed(mixed(driver().seed * 1000003 + number) + num_pushed_) % driver().jitter;
  }
  tasks_.emplace_back(pause, std::move(task));
  ++num_pushed_;
  has_tasks_.notify_one();
}

inline void Stream::run() {
  t_is_stream = true;
  at::AutoDispatchBelowADInplaceOrView kernels_only;  // nor versions, which inference tensors lack
  while (true) {
    std::pair<std::chrono::microseconds, Task> next;
    {
      std::unique_lock<std::mutex> held(lock_);
      has_tasks_.wait(held, [this] { return !tasks_.empty(); });
      next = std::move(tasks_.front());
      tasks_.pop_front();
    }
    if (next.first.count()) std::this_thread::sleep_for(next.first);
    try {
      next.second();
    } catch (const std::exception& error) {
      Held held(driver().lock);
      if (driver().error.empty()) driver().error = error.what();
    }
    next.second = nullptr;  // what it holds is freed before it counts as done
    std::lock_guard<std::mutex> held(lock_);
    ++num_done_;
  }
}

inline Stream* make_stream(int device, std::string kind) {
  Held held(driver().lock);
  auto& known = driver().of_device[device];
  if (known.empty() && kind != "default") make_stream(device, "default");
  auto* stream = new Stream(driver().streams.size(), device, known.size(), std::move(kind));
  driver().streams.push_back(stream);
  known.push_back(stream);
  return stream;
}
inline Stream* stream_of(int device, c10::StreamId id) {
  Held held(driver().lock);
  if (driver().of_device[device].empty()) make_stream(device, "default");
  return driver().of_device[device].at(id);
}
inline Stream* current_stream(int device) {
  return stream_of(device, t_current[device]);
}

inline void raise_error() {
  Held held(driver().lock);
  TORCH_CHECK(driver().error.empty(), "simulated device: a kernel failed: ", driver().error);
}

inline MarkPtr record(Stream* stream) {
  Held held(driver().lock);
  auto mark = std::make_shared<Mark>();
  stream->clock.join(driver().host);
  mark->clock = stream->clock;
  stream->push([mark] { mark->pass(); });
  return mark;
}
inline void wait(Stream* stream, const MarkPtr& mark) {
  Held held(driver().lock);
  stream->clock.join(mark->clock);
  stream->push([mark] { mark->wait(); });
}

// The host knows that the mark is passed: what it issues from here on comes after that.
inline void host_saw(const MarkPtr& mark) {
  Held held(driver().lock);
  driver().host.join(mark->clock);
}
inline void host_wait(const MarkPtr& mark, const std::string& why) {
  {
    Held held(driver().lock);
    ++driver().host_waits[{driver().phase, why}];
  }
  mark->wait();
  host_saw(mark);
  raise_error();
}
inline void host_wait(Stream* stream, const std::string& why) {
  host_wait(record(stream), why);
}

}  // namespace simulated
