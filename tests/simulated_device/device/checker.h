// Which operation reads and writes which bytes, and whether the one before in conflict is ordered before it.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>

namespace simulated {

// [start, stop) are addresses, of a device's memory or of pinned memory.
struct Range {
  uint64_t start, stop;
};
struct Access {
  std::vector<Range> ranges;
  bool is_write;
};

// The bytes of a tensor, without the gaps between its rows.
inline std::vector<Range> ranges_of(const at::Tensor& tensor) {
  std::vector<Range> ranges;
  if (!tensor.numel()) return ranges;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t k = 0; k < tensor.dim(); ++k)
    if (tensor.size(k) > 1 && tensor.stride(k)) dims.emplace_back(tensor.stride(k), tensor.size(k));
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;  // elements that lie side by side
  size_t inner = 0;
  for (; inner < dims.size() && dims[inner].first == run; ++inner) run *= dims[inner].second;
  const auto first =
      reinterpret_cast<uint64_t>(tensor.storage().data()) + tensor.storage_offset() * tensor.element_size();
  std::vector<int64_t> offsets{0};
  for (size_t k = inner; k < dims.size(); ++k) {
    std::vector<int64_t> more;
    for (int64_t j = 0; j < dims[k].second; ++j)
      for (auto offset : offsets) more.push_back(offset + j * dims[k].first);
    offsets.swap(more);
  }
  for (auto offset : offsets) {
    const auto start = first + offset * tensor.element_size();
    ranges.push_back({start, start + run * tensor.element_size()});
  }
  return ranges;
}
inline Access read_of(const at::Tensor& tensor) {
  return {ranges_of(tensor), false};
}
inline Access write_of(const at::Tensor& tensor) {
  return {ranges_of(tensor), true};
}

struct Race {
  std::string how;                // "read after write", ...
  std::string before[3], now[3];  // operator, phase, stream
  std::string buffer;
  bool operator<(const Race& other) const { return key() < other.key(); }
  std::tuple<std::string, std::string, std::string, std::string, std::string, std::string, std::string, std::string>
  key() const {
    return {how, before[0], before[1], before[2], now[0], now[1], now[2], buffer};
  }
};

// A map from bytes to who wrote them last, and who has read them since. Neighbours that one operation wrote are one
// entry. The driver's lock guards it.
class Checker {
 public:
  bool is_on = true;
  std::map<Race, int64_t> races;
  std::function<std::string(uint64_t)> buffer_at;  // the name of the memory at an address

  // One operation of the host or a stream, whose clock holds what is done before it.
  void operation(int number, uint64_t count, const Clock& clock, const std::string& name,
                 const std::vector<Access>& accesses) {
    if (!is_on) return;
    const Touch now{number, count, index_of(name)};
    for (bool is_write : {false, true})  // an operation in place reads what it writes
      for (auto& access : accesses)
        if (access.is_write == is_write)
          for (auto& range : access.ranges) is_write ? write(range, now, clock) : read(range, now, clock);
  }
  // The memory at these addresses is another one from here on.
  void forget(Range range) { erase(range); }

 private:
  struct Touch {
    int number = -1;
    uint64_t count = 0;
    int what = -1;
  };
  struct Entry {
    uint64_t stop;
    Touch write;
    std::vector<Touch> reads;  // the last one of each stream
  };

  void write(Range range, const Touch& now, const Clock& clock) {
    for (auto it = first(range); it != entries_.end() && it->first < range.stop; ++it) {
      check("write after write", it->first, it->second.write, now, clock);
      for (auto& read : it->second.reads) check("write after read", it->first, read, now, clock);
    }
    erase(range);
    entries_.emplace(range.start, Entry{range.stop, now, {}});
  }
  void read(Range range, const Touch& now, const Clock& clock) {
    split(range.stop);
    auto it = first(range);
    for (uint64_t at = range.start; at < range.stop;) {
      if (it == entries_.end() || it->first > at) {  // nobody has touched what lies before the next entry
        const auto stop = it == entries_.end() ? range.stop : std::min(range.stop, it->first);
        it = entries_.emplace(at, Entry{stop, {}, {}}).first;
      }
      check("read after write", at, it->second.write, now, clock);
      auto& reads = it->second.reads;
      auto own = std::find_if(reads.begin(), reads.end(), [&](auto& read) { return read.number == now.number; });
      own == reads.end() ? reads.push_back(now) : void(*own = now);
      at = it->second.stop;
      ++it;
    }
  }
  void check(const char* how, uint64_t address, const Touch& before, const Touch& now, const Clock& clock) {
    if (before.number < 0 || before.number == now.number || clock.of(before.number) >= before.count) return;
    Race race{how, {}, {}, buffer_at(address)};
    describe(before, race.before);
    describe(now, race.now);
    ++races[race];
  }
  void describe(const Touch& touch, std::string (&to)[3]) const {
    to[0] = operations_[touch.what].first;
    to[1] = operations_[touch.what].second;
    to[2] = touch.number == kHost ? "host" : driver().streams[touch.number]->name();
  }
  int index_of(const std::string& name) {
    const std::pair<std::string, std::string> key{name, driver().phase};
    const auto [found, is_new] = indices_.emplace(key, operations_.size());
    if (is_new) operations_.push_back(key);
    return found->second;
  }
  void split(uint64_t at) {
    auto it = entries_.upper_bound(at);
    if (it == entries_.begin()) return;
    --it;
    if (it->first >= at || it->second.stop <= at) return;
    Entry right = it->second;
    it->second.stop = at;
    entries_.emplace(at, std::move(right));
  }
  std::map<uint64_t, Entry>::iterator first(Range range) {
    split(range.start);
    return entries_.lower_bound(range.start);
  }
  void erase(Range range) {
    split(range.stop);
    auto it = first(range);
    while (it != entries_.end() && it->first < range.stop) it = entries_.erase(it);
  }

  std::map<uint64_t, Entry> entries_;                            // by their start
  std::vector<std::pair<std::string, std::string>> operations_;  // (operator, phase)
  std::map<std::pair<std::string, std::string>, int> indices_;
};
inline Checker& checker() {
  static Checker& one = *new Checker();
  return one;
}

// Queues a kernel.
inline void launch(Stream* stream, const std::string& name, const std::vector<Access>& accesses, Task task) {
  raise_error();
  Held held(driver().lock);
  ++driver().num_kernels;
  stream->clock.join(driver().host);
  stream->clock.set(stream->number, ++stream->num_launched);
  checker().operation(stream->number, stream->num_launched, stream->clock, name, accesses);
  stream->push(std::move(task));
}

// What the host does itself with memory that a device may use, too.
inline void host_operation(const std::string& name, const std::vector<Access>& accesses) {
  Held held(driver().lock);
  driver().host.set(kHost, ++driver().num_host_operations);
  checker().operation(kHost, driver().num_host_operations, driver().host, name, accesses);
}

}  // namespace simulated
