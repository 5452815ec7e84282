// Memory of the devices, and host memory that they copy from and to.
//
// A device's memory has two mappings. Tensors have addresses of the first, which nobody may touch: a host that does
// ends by SIGSEGV. Kernels use the second.
#pragma once

#include "checker.h"

#include <c10/core/Allocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace simulated {

using c10::DeviceType;

constexpr size_t kDeviceNbytes = size_t(8) << 30;  // of addresses; pages come with their first use
constexpr size_t kBlockNbytes = 512;               // sizes are rounded up to it, as CUDA's allocator does
constexpr int kPoison = 0xff;                      // NaN in every floating dtype

struct DeviceMemory {
  char* guarded = nullptr;  // what tensors point to
  char* open = nullptr;     // what kernels use
  size_t nbytes_used = 0;
};

// A piece that the allocator gives away, takes back and gives away again.
struct Block {
  char* start;
  size_t nbytes;
  Stream* home;  // which allocated it. Whoever gets it next is on this stream, too
  std::string name;
  bool is_live = false;
  bool is_named = true;           // false: the first operator that writes it will name it
  std::set<Stream*> users;        // others, by record_stream
  std::vector<MarkPtr> in_use{};  // of the users, when it was freed
};

// Host memory that a device knows: of the pinned allocator, or registered in place.
struct Pinned {
  size_t nbytes;
  bool is_registered;
  std::string name;
  std::vector<MarkPtr> in_use{};
};

struct Memory {
  DeviceMemory devices[kNumDevices];
  std::map<char*, Block*> blocks;  // all of them, by start
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> free;
  std::vector<Block*> waiting;  // freed, but in use on other streams
  size_t nbytes_allocated[kNumDevices] = {}, nbytes_peak[kNumDevices] = {};
  std::map<char*, Pinned> pinned;
  std::vector<std::pair<char*, Pinned>> pinned_waiting;
};
inline Memory& memory() {
  static Memory& one = *new Memory();
  return one;
}

inline void map_memory() {
  for (auto& device : memory().devices) {
    const int file = memfd_create("simulated device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kDeviceNbytes) == 0, "simulated device: no memory");
    const auto map = [&](int rights) {
      void* start = mmap(nullptr, kDeviceNbytes, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(start != MAP_FAILED, "simulated device: no addresses");
      return static_cast<char*>(start);
    };
    device.guarded = map(PROT_NONE);
    device.open = map(PROT_READ | PROT_WRITE);
    close(file);
  }
}
inline int device_of(const void* address) {
  for (int k = 0; k < kNumDevices; ++k) {
    const char* start = memory().devices[k].guarded;
    if (address >= start && address < start + kDeviceNbytes) return k;
  }
  return -1;
}
inline char* open_address(const void* address) {
  const int device = device_of(address);
  TORCH_CHECK(device >= 0, "simulated device: ", address, " is no address of a device");
  return static_cast<const char*>(address) - memory().devices[device].guarded + memory().devices[device].open;
}
inline Range range_of(const void* start, size_t nbytes) {
  const auto first = reinterpret_cast<uint64_t>(start);
  return {first, first + nbytes};
}

template <typename Map>
typename Map::iterator at_or_before(Map& map, const void* address) {
  auto it = map.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  return it == map.begin() ? map.end() : std::prev(it);
}
inline Block* block_at(const void* address) {
  auto it = at_or_before(memory().blocks, address);
  return it != memory().blocks.end() && address < it->first + it->second->nbytes ? it->second : nullptr;
}
inline std::pair<char* const, Pinned>* pinned_at(const void* address) {
  auto it = at_or_before(memory().pinned, address);
  return it != memory().pinned.end() && address < it->first + it->second.nbytes ? &*it : nullptr;
}
inline std::string buffer_at(uint64_t address) {
  const auto* start = reinterpret_cast<void*>(address);
  if (auto* block = block_at(start)) return block->name + (block->is_live ? "" : ", freed");
  if (auto* pinned = pinned_at(start)) return pinned->second.name;
  return "unknown memory";
}
inline std::string made_here(const std::string& what) {
  const auto& phase = driver().phase;
  return what + (t_operator.empty() ? "" : " of " + t_operator) + (phase.empty() ? "" : " in " + phase);
}

inline void name_memory(const void* address) {
  Held held(driver().lock);
  auto* block = block_at(address);
  if (!block || block->is_named) return;
  block->is_named = true;
  block->name = made_here("memory");
}

// In stream order: what uses the memory on its own stream without having it any more reads NaN, and what uses it on
// another stream is a race.
inline void poison(Block* block, const char* why) {
  char* start = open_address(block->start);
  const size_t nbytes = block->nbytes;
  launch(block->home, why, {{{range_of(block->start, nbytes)}, true}}, [=] { std::memset(start, kPoison, nbytes); });
}
inline void take_back(Block* block) {
  poison(block, "the allocator, which gives freed memory away");
  memory().free[{block->home, block->nbytes}].push_back(block);
}
inline void free_block(void* context) {
  Held held(driver().lock);
  auto* block = static_cast<Block*>(context);
  block->is_live = false;
  memory().nbytes_allocated[block->home->device] -= block->nbytes;
  block->users.erase(block->home);
  if (!driver().error.empty()) return;  // no launch works any more, and a deleter must not raise
  if (block->users.empty()) return take_back(block);
  for (auto* user : block->users) block->in_use.push_back(record(user));
  block->users.clear();
  memory().waiting.push_back(block);
}
inline bool are_passed(const std::vector<MarkPtr>& marks) {
  return std::all_of(marks.begin(), marks.end(), [](auto& mark) { return mark->is_passed(); });
}
// As CUDA's allocator, which asks events when it is asked for memory.
inline void take_back_unused() {
  std::vector<Block*> still;
  for (auto* block : memory().waiting) {
    if (!are_passed(block->in_use)) {
      still.push_back(block);
      continue;
    }
    for (auto& mark : block->in_use) block->home->clock.join(mark->clock);
    block->in_use.clear();
    take_back(block);
  }
  memory().waiting.swap(still);
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t asked) override {
    Held held(driver().lock);
    const c10::Device device(DeviceType::PrivateUse1, t_device);
    if (!asked) return {nullptr, nullptr, [](void*) {}, device};
    take_back_unused();
    const size_t nbytes = (asked + kBlockNbytes - 1) / kBlockNbytes * kBlockNbytes;
    auto* stream = current_stream(t_device);
    if (stream->id) ++driver().side_allocations[{driver().phase, t_operator}];
    auto& free = memory().free[{stream, nbytes}];
    Block* block;
    if (free.empty()) {
      auto& own = memory().devices[t_device];
      TORCH_CHECK(own.nbytes_used + nbytes <= kDeviceNbytes, "simulated device: out of memory");
      block = new Block{own.guarded + own.nbytes_used, nbytes, stream, {}};
      own.nbytes_used += nbytes;
      memory().blocks[block->start] = block;
      poison(block, "the allocator");
    } else {
      block = free.back();
      free.pop_back();
    }
    block->is_live = true;
    block->is_named = !t_operator.empty();  // many operators come in two parts, and the first only allocates
    block->name = made_here("memory");
    auto& allocated = memory().nbytes_allocated[t_device];
    allocated += nbytes;
    memory().nbytes_peak[t_device] = std::max(memory().nbytes_peak[t_device], allocated);
    return {block->start, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "simulated device: copy_data"); }
};
inline DeviceAllocator& device_allocator() {
  static DeviceAllocator& one = *new DeviceAllocator();
  return one;
}
inline void record_use(const void* address, Stream* stream) {
  Held held(driver().lock);
  if (auto* block = block_at(address)) block->users.insert(stream);
}

// Gives pinned memory back once the copies that use it are done.
inline void free_pinned(void* context) {
  Held held(driver().lock);
  auto found = memory().pinned.find(static_cast<char*>(context));
  memory().pinned_waiting.emplace_back(found->first, std::move(found->second));
  checker().forget(range_of(found->first, found->second.nbytes));
  memory().pinned.erase(found);
  std::vector<std::pair<char*, Pinned>> still;
  for (auto& [start, pinned] : memory().pinned_waiting) {
    if (!are_passed(pinned.in_use)) {
      still.emplace_back(start, std::move(pinned));
      continue;
    }
    std::memset(start, kPoison, pinned.nbytes);
    std::free(start);
  }
  memory().pinned_waiting.swap(still);
}
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    Held held(driver().lock);
    const c10::Device host(DeviceType::CPU);
    if (!nbytes) return {nullptr, nullptr, [](void*) {}, host};
    auto* start = static_cast<char*>(std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096));
    memory().pinned[start] = Pinned{nbytes, false, made_here("pinned memory")};
    return {start, start, &free_pinned, host};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
inline PinnedAllocator& pinned_allocator() {
  static PinnedAllocator& one = *new PinnedAllocator();
  return one;
}

// What cudaHostRegister and cudaHostUnregister do; their codes are CUDA's.
inline int register_memory(uint64_t address, size_t nbytes) {
  Held held(driver().lock);
  auto* start = reinterpret_cast<char*>(address);
  if (pinned_at(start) || pinned_at(start + nbytes - 1)) return 712;
  memory().pinned[start] = Pinned{nbytes, true, made_here("registered memory")};
  return 0;
}
inline int unregister_memory(uint64_t address) {
  Held held(driver().lock);
  auto found = memory().pinned.find(reinterpret_cast<char*>(address));
  if (found == memory().pinned.end() || !found->second.is_registered) return 713;
  TORCH_CHECK(are_passed(found->second.in_use), "simulated device: memory is unregistered while a copy uses it");
  checker().forget(range_of(found->first, found->second.nbytes));
  memory().pinned.erase(found);
  return 0;
}

}  // namespace simulated
