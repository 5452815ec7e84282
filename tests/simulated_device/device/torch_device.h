// What torch asks of a device: which one is current, its streams, its events, its allocators.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {

using c10::Device;
using c10::DeviceIndex;

inline Device device(int index) {
  return Device(DeviceType::PrivateUse1, index);
}
inline int index_of(Device device) {
  return device.has_index() ? device.index() : t_device;
}
inline Stream* stream_of(const c10::Stream& stream) {
  return stream_of(stream.device_index(), stream.id());
}
inline c10::Stream torch_stream(Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, device(stream->device), stream->id);
}
inline void set_device(int index) {
  TORCH_CHECK(index >= 0 && index < kNumDevices, "simulated device: there is no device ", index);
  t_device = index;
}
inline void synchronize_device(int index) {
  std::vector<Stream*> streams;
  {
    Held held(driver().lock);
    streams = driver().of_device[index];
  }
  for (auto* stream : streams) host_wait(stream, "synchronize a device");
}

struct Event {
  MarkPtr mark;  // of the last record
};
inline MarkPtr mark_of(void* event) {
  return event ? static_cast<Event*>(event)->mark : nullptr;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::PrivateUse1;
  Guard() = default;
  explicit Guard(DeviceType) {}

  DeviceType type() const override { return static_type; }
  Device getDevice() const override { return device(t_device); }
  void setDevice(Device to) const override { set_device(index_of(to)); }
  void uncheckedSetDevice(Device to) const noexcept override { t_device = index_of(to); }
  Device exchangeDevice(Device to) const override {
    const auto before = getDevice();
    setDevice(to);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  c10::Stream getStream(Device of) const override { return torch_stream(current_stream(index_of(of))); }
  c10::Stream getDefaultStream(Device of) const override { return torch_stream(stream_of(index_of(of), 0)); }
  c10::Stream getNewStream(Device of, int priority) const override {
    return torch_stream(make_stream(index_of(of), priority < 0 ? "high" : "side"));
  }
  c10::Stream getStreamFromGlobalPool(Device of, bool is_high) const override {
    return getNewStream(of, is_high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto before = getStream(to.device());
    t_current[to.device_index()] = to.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return stream_of(stream)->is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_wait(stream_of(stream), "synchronize a stream");
  }
  void synchronizeDevice(const DeviceIndex index) const override { synchronize_device(index < 0 ? t_device : index); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), stream_of(stream));
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex index, const c10::EventFlag) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(), "an event of device ", int(index), " is recorded on ",
                stream);
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->mark = simulated::record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto mark = mark_of(event)) simulated::wait(stream_of(stream), mark);
  }
  bool queryEvent(void* event) const override {
    auto mark = mark_of(event);
    if (!mark) return true;
    const bool is_passed = mark->is_passed();
    if (is_passed) host_saw(mark);
    return is_passed;
  }
  void synchronizeEvent(void* event) const override {
    if (auto mark = mark_of(event)) host_wait(mark, "synchronize an event");
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(mark_of(to)->at() - mark_of(from)->at()).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kNumDevices; }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  void setCurrentDevice(DeviceIndex to) const override {
    if (to >= 0) set_device(to);
  }
  DeviceIndex exchangeDevice(DeviceIndex to) const override {
    const int before = t_device;
    setCurrentDevice(to);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchangeDevice(to); }
  bool isPinnedPtr(const void* data) const override {
    Held held(driver().lock);
    return pinned_at(data) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  Device getDeviceFromPtr(void* data) const override { return device(device_of(data)); }
  // kernels are the CPU's, and so is their generator
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override;
};

}  // namespace simulated
