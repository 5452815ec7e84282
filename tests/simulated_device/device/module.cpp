// A simulated accelerator for tests, on the CPU. What Python sees of it; simulated.py makes it a device of torch.
#include "process_group.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

using namespace simulated;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using WithoutGil = pybind11::call_guard<pybind11::gil_scoped_release>;
  map_memory();
  checker().buffer_at = &buffer_at;
  static Hooks& hooks = *new Hooks();
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(DeviceType::PrivateUse1, &device_allocator(), /*priority=*/100);
  at::addGlobalCallback(at::RecordFunctionCallback(&watch_host).needsInputs(true).scopes({at::RecordScope::FUNCTION}));

  module.attr("num_devices") = kNumDevices;
  module.def("current_device", [] { return t_device; });
  module.def("set_device", &set_device);
  module.def("synchronize", &synchronize_device, WithoutGil());
  module.def(
      "make_group",
      [](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Group>(gloo, rank, size);
      });
  module.def("register_memory", &register_memory);
  module.def("unregister_memory", &unregister_memory);
  module.def("nbytes_allocated", [](int device) {
    Held held(driver().lock);
    return memory().nbytes_allocated[device];
  });
  module.def("nbytes_peak", [](int device) {
    Held held(driver().lock);
    return memory().nbytes_peak[device];
  });

  // the program that is watched
  module.def("set_phase", [](std::string phase) {
    Held held(driver().lock);
    return std::exchange(driver().phase, std::move(phase));
  });
  module.def("set_name", [](const Tensor& tensor, std::string name) {
    Held held(driver().lock);
    const void* address = tensor.storage().data();
    if (auto* block = block_at(address)) {
      block->name = std::move(name);
      block->is_named = true;
    } else if (auto* pinned = pinned_at(address)) {
      pinned->second.name = std::move(name);
    }
  });
  module.def("set_delays", [](std::map<std::string, int> delays, int jitter, uint64_t seed) {
    std::lock_guard<std::mutex> held(driver().delays_lock);
    driver().delays = std::move(delays);
    driver().jitter = jitter;
    driver().seed = seed;
  });

  // what was seen
  module.def("set_checking", [](bool is_on) {
    Held held(driver().lock);
    checker().is_on = is_on;
  });
  module.def("races", [] {
    Held held(driver().lock);
    std::vector<std::tuple<std::string, std::array<std::string, 3>, std::array<std::string, 3>, std::string, int64_t>>
        all;
    for (auto& [race, count] : checker().races)
      all.push_back({race.how,
                     {race.before[0], race.before[1], race.before[2]},
                     {race.now[0], race.now[1], race.now[2]},
                     race.buffer,
                     count});
    return all;
  });
  module.def("host_waits", [] {
    Held held(driver().lock);
    return driver().host_waits;
  });
  module.def("side_allocations", [] {
    Held held(driver().lock);
    return driver().side_allocations;
  });
  module.def("num_kernels", [] {
    Held held(driver().lock);
    return driver().num_kernels;
  });
  module.def("streams", [] {
    Held held(driver().lock);
    std::vector<std::tuple<int, int64_t, std::string>> all;  // device, torch's id, kind
    for (size_t k = 1; k < driver().streams.size(); ++k)
      all.push_back({driver().streams[k]->device, driver().streams[k]->id, driver().streams[k]->kind});
    return all;
  });
  module.def("error", [] {
    Held held(driver().lock);
    return driver().error;
  });
  module.def("clear", [] {  // for the next test in this process
    Held held(driver().lock);
    checker().races.clear();
    driver().host_waits.clear();
    driver().side_allocations.clear();
  });
}
