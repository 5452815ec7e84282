// torch's operators on the device. A kernel is the CPU's, as a task of the current stream; what the result looks like
// is asked of torch's meta kernels at once, so the host waits only where the result's shape depends on data.
#pragma once

#include "torch_device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/record_function.h>
#include <torch/library.h>

namespace simulated {

using at::Tensor;
using c10::IValue;

inline bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == DeviceType::PrivateUse1;
}

// The operator that allocates and launches, for names in reports.
struct Naming {
  explicit Naming(std::string name) : before(std::exchange(t_operator, std::move(name))) {}
  ~Naming() { t_operator = std::move(before); }
  std::string before;
};

inline Tensor with_flags_of(const Tensor& tensor, Tensor twin) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) twin.unsafeGetTensorImpl()->set_wrapped_number(true);
  return twin;
}
// The same memory as a CPU tensor, for a kernel. It is an ordinary one in inference mode, too: the threads that write it
// are in no such mode.
inline Tensor opened(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  c10::InferenceMode off(false);
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  if (!tensor.numel()) return with_flags_of(tensor, at::empty_strided(tensor.sizes(), tensor.strides(), options));
  return with_flags_of(tensor,
                       at::from_blob(open_address(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options));
}
inline Tensor without_data(const Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && !tensor.dim()))
    return tensor;  // a number on the host may go into any kernel
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta);
  return with_flags_of(tensor, at::empty_strided(tensor.sizes(), tensor.strides(), options));
}

// --- memory of tensors: views are made as on any device ---

inline Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                    std::optional<Device> on, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(on));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &device_allocator(), keys, c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<Device> on, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(on));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), keys, c10::dtype_or_default(dtype));
}
inline Tensor as_strided(const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}
inline Tensor view(const Tensor& self, c10::IntArrayRef sizes) {
  return at::native::view(self, sizes);
}
inline Tensor reshape_alias(const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}
inline Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

inline void resize_storage(const c10::Storage& storage, size_t nbytes) {
  Naming naming("resize");
  c10::DeviceGuard guard(storage.device());
  auto fresh = device_allocator().allocate(nbytes);
  const size_t kept = std::min(storage.nbytes(), nbytes);
  if (kept) {
    const char* from = open_address(storage.data());
    char* to = open_address(fresh.get());
    const std::vector<Access> accesses{{{range_of(storage.data(), kept)}, false},
                                       {{range_of(fresh.get(), kept)}, true}};
    launch(current_stream(t_device), "resize", accesses, [=] { std::memcpy(to, from, kept); });
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
}
inline void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const {
  resize_storage(storage, nbytes);
}
inline const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  const size_t nbytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (self.numel() && self.storage().nbytes() < nbytes) resize_storage(self.storage(), nbytes);
  return self;
}
inline Tensor& set_strided(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                           c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  strides.size() == sizes.size() ? impl->set_sizes_and_strides(sizes, strides) : impl->set_sizes_contiguous(sizes);
  return self;
}
inline Tensor& set_storage(Tensor& self, at::Storage source) {
  const int64_t numel = source.nbytes() / self.element_size();
  return set_strided(self, std::move(source), 0, {numel}, {});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_strided(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline Tensor& set_nothing(Tensor& self) {
  auto& allocator = device_allocator();
  return set_strided(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true), 0,
                     {0}, {});
}
inline void record_stream(Tensor& self, c10::Stream stream) {
  if (self.storage().nbytes()) record_use(self.storage().data(), stream_of(stream));
}

// --- copies: the host goes on if memory of the host is pinned and it was asked not to wait, as on a GPU ---

inline bool is_one_piece(const Tensor& from, const Tensor& to) {
  return from.dtype() == to.dtype() && from.sizes() == to.sizes() && from.is_contiguous() && to.is_contiguous();
}
inline Tensor copy_from(const Tensor& from, const Tensor& to, bool is_asynchronous) {
  Naming naming("aten::copy_");
  if (!to.numel()) return to;
  c10::DeviceGuard guard(is_ours(to) && !is_ours(from) ? to.device() : from.device());
  auto* stream = current_stream(t_device);
  const auto source = from.expand(to.sizes());
  const auto opened_from = opened(source);
  auto opened_to = opened(to);
  if (is_ours(from) && is_ours(to)) {
    const bool is_between_devices = from.device() != to.device();
    auto* other = current_stream(to.get_device());
    if (is_between_devices) wait(stream, record(other));  // as CUDA's copy between devices
    launch(stream, "copy on the device", {read_of(source), write_of(to)},
           [=]() mutable { opened_to.copy_(opened_from); });
    if (is_between_devices) wait(other, record(stream));
    return to;
  }
  const bool is_down = is_ours(from);
  const auto& host = is_down ? to : from;
  const char* const name = is_down ? "copy to the host" : "copy from the host";
  std::unique_lock<std::recursive_mutex> held(driver().lock);
  auto* pinned = pinned_at(host.data_ptr());
  if (pinned && is_asynchronous && is_one_piece(from, to)) {
    launch(stream, name, {read_of(from), write_of(to)},
           [target = opened_to.data_ptr(), start = opened_from.data_ptr(), nbytes = to.nbytes()] {
             std::memcpy(target, start, nbytes);
           });
    auto& in_use = pinned->second.in_use;
    in_use.erase(std::remove_if(in_use.begin(), in_use.end(), [](auto& mark) { return mark->is_passed(); }),
                 in_use.end());
    in_use.push_back(record(stream));
    return to;
  }
  held.unlock();
  if (is_down) {
    launch(stream, name, {read_of(from)}, [] {});
    host_wait(stream, is_asynchronous ? "aten::copy_ to memory that is not pinned" : "aten::copy_ to the host");
    opened_to.copy_(opened_from);
    return to;
  }
  const auto kept = source.to(to.scalar_type(), /*non_blocking=*/false, /*copy=*/true).contiguous();
  launch(stream, name, {write_of(to)}, [=]() mutable { opened_to.copy_(kept); });
  // CUDA's driver may wait for the stream before it has read memory that is not pinned
  host_wait(stream, is_asynchronous ? "aten::copy_ from memory that is not pinned" : "aten::copy_ from the host");
  return to;
}
inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
inline at::Scalar local_scalar(const Tensor& self) {
  c10::DeviceGuard guard(self.device());
  launch(current_stream(t_device), "aten::item", {read_of(self)}, [] {});
  host_wait(current_stream(t_device), "aten::item");
  return at::_local_scalar_dense(opened(self));
}

// --- all other operators ---

using Change = std::function<Tensor(const Tensor&)>;
inline IValue with_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const auto& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}
inline void visit_tensors(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  with_tensors(value, [&](const Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), schema_(op.schema()) {
    const auto num = schema_.arguments().size();
    args_.assign(stack->end() - num, stack->end());
    torch::jit::drop(*stack, num);
    name_ = schema_.operator_name().name;
    for (auto& returned : schema_.returns())
      TORCH_CHECK(!returned.alias_info() || returned.alias_info()->isWrite(),
                  "simulated device: no kernel for the view ", name_);
  }

  void run(torch::jit::Stack* stack) {
    at::AutoDispatchBelowADInplaceOrView kernels_only;
    Naming naming(name_);
    c10::DeviceGuard guard(device_of_arguments());
    stream_ = current_stream(t_device);
    for (size_t k = 0; k < args_.size(); ++k) {
      if (is_out(k))
        on_cpu_.push_back(at::empty({0}, at::TensorOptions().dtype(args_[k].toTensor().dtype())));
      else
        on_cpu_.push_back(args_[k].isDevice() ? IValue(Device(at::kCPU)) : with_tensors(args_[k], opened));
    }
    const bool is_known = infer();
    if (is_known) size_outs();
    for (size_t k = 0; k < args_.size(); ++k)
      visit_tensors(args_[k], [&](const Tensor& tensor) {
        if (!is_ours(tensor)) return;
        const bool is_changed = is_written(schema_.arguments()[k]);
        accesses_.push_back({ranges_of(tensor), is_changed});
        if (is_changed && tensor.numel()) name_memory(tensor.storage().data());
      });
    is_known ? launch_call(stack) : wait_and_call(stack);
  }

 private:
  static bool is_written(const c10::Argument& argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
  }

  Device device_of_arguments() const {
    std::optional<Device> found;
    for (auto& arg : args_)
      visit_tensors(arg, [&](const Tensor& tensor) {
        if (is_ours(tensor) && !found) found = tensor.device();
      });
    for (auto& arg : args_)
      if (!found && arg.isDevice() && arg.toDevice().has_index()) found = arg.toDevice();
    return found.value_or(device(t_device));
  }

  // The argument that a result is, if it is one: of operators in place and with out=.
  const IValue* argument_of_result(size_t result) const {
    const auto* alias = schema_.returns()[result].alias_info();
    for (size_t k = 0; alias && k < args_.size(); ++k)
      if (is_written(schema_.arguments()[k]) &&
          schema_.arguments()[k].alias_info()->beforeSets() == alias->beforeSets())
        return &args_[k];
    return nullptr;
  }

  // Whether an argument is out=. Kernels get a fresh tensor in its place, because they may resize it on their way.
  bool is_out(size_t k) const {
    return schema_.arguments()[k].is_out() && args_[k].isTensor() && is_ours(args_[k].toTensor());
  }

  // What the results look like. False: that depends on data, or they are no tensors.
  bool infer() {
    for (auto& returned : schema_.returns()) {
      const auto kind = returned.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
    }
    for (size_t k = 0; k < args_.size(); ++k) {
      const auto& arg = args_[k];
      if (is_out(k))
        inferred_.push_back(at::empty({0}, at::TensorOptions().dtype(arg.toTensor().dtype()).device(at::kMeta)));
      else if (arg.isDevice())
        inferred_.push_back(Device(at::kMeta));
      else if (arg.isGenerator())
        inferred_.push_back(IValue());
      else
        inferred_.push_back(with_tensors(arg, without_data));
    }
    try {
      op_.callBoxed(&inferred_);
    } catch (const std::exception&) {
      return false;
    }
    // mean and deviation: the CPU's kernels, unlike others, have them in the dtype of the weight
    if (name_ == "aten::native_layer_norm" && inferred_.size() == 3) {
      const auto& typed = args_[2].isTensor() && args_[2].toTensor().defined() ? args_[2] : args_[0];
      for (size_t k = 1; k < 3; ++k)
        inferred_[k] = inferred_[k].toTensor().to(typed.toTensor().scalar_type());
    }
    return true;
  }

  // Before the accesses are listed: a resize moves memory.
  void size_outs() const {
    const size_t num = schema_.returns().size();
    for (size_t k = 0; k < num; ++k) sized_argument(k, inferred_[inferred_.size() - num + k]);
  }

  // The argument that a result is, if it is one, in the result's size.
  const IValue* sized_argument(size_t result, const IValue& value) const {
    const auto* argument = argument_of_result(result);
    if (argument && is_out(argument - args_.data()) && argument->toTensor().sizes() != value.toTensor().sizes())
      resize_(argument->toTensor(), value.toTensor().sizes(), std::nullopt);
    return argument;
  }

  Tensor fresh_like(const Tensor& result) {
    if (!result.defined()) return result;
    const auto options = at::TensorOptions().dtype(result.dtype()).device(device(t_device));
    return at::empty_strided(result.sizes(), result.strides(), options);
  }

  void launch_call(torch::jit::Stack* stack) {
    std::vector<Tensor> targets;  // of the results that the kernel makes apart, in order
    std::vector<bool> is_apart;
    const size_t num = schema_.returns().size();
    for (size_t k = 0; k < num; ++k) {
      const auto& result = inferred_[inferred_.size() - num + k];
      const auto* argument = sized_argument(k, result);
      is_apart.push_back(!argument || is_out(argument - args_.data()));
      if (argument && is_apart.back()) targets.push_back(opened(argument->toTensor()));
      stack->push_back(argument ? *argument : with_tensors(result, [&](const Tensor& tensor) {
        auto fresh = fresh_like(tensor);
        targets.push_back(fresh.defined() ? opened(fresh) : fresh);
        if (fresh.defined()) accesses_.push_back(write_of(fresh));
        return fresh;
      }));
    }
    launch(stream_, name_, accesses_, [op = op_, args = on_cpu_, targets, is_apart, num, name = name_]() mutable {
      op.callBoxed(&args);
      auto target = targets.begin();
      for (size_t k = 0; k < num; ++k)
        if (is_apart[k])
          visit_tensors(args[args.size() - num + k], [&](const Tensor& result) {
            auto& to = *target++;
            if (!result.defined() || !to.defined() || !result.numel()) return;
            TORCH_CHECK(result.sizes() == to.sizes(), name, " has ", result.sizes(), ", its meta kernel said ",
                        to.sizes());
            if (to.numel()) to.copy_(result);
          });
    });
  }

  void wait_and_call(torch::jit::Stack* stack) {
    launch(stream_, name_, accesses_, [] {});
    host_wait(stream_, name_);
    op_.callBoxed(&on_cpu_);
    const size_t num = schema_.returns().size();
    const auto fill = [&](const Tensor& target, const Tensor& result) {
      if (target.defined() && target.numel())
        launch(stream_, name_, {write_of(target)}, [result, to = opened(target)]() mutable { to.copy_(result); });
      return target;
    };
    for (size_t k = 0; k < num; ++k) {
      const auto& result = on_cpu_[on_cpu_.size() - num + k];
      const auto* argument = sized_argument(k, result);
      if (argument && is_out(argument - args_.data())) fill(argument->toTensor(), result.toTensor());
      stack->push_back(argument ? *argument : with_tensors(result, [&](const Tensor& tensor) {
        return fill(fresh_like(tensor), tensor);
      }));
    }
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  Stream* stream_ = nullptr;
  std::vector<IValue> args_;
  torch::jit::Stack on_cpu_, inferred_;
  std::vector<Access> accesses_;
};
inline void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run(stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&call>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("resize_", &resize_);
  library.impl("set_", &set_nothing);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_strided);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("record_stream", &record_stream);
  // of these torch has forms for any device, which ask for other operators: they are the CPU's, too
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&call>());
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&call>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&call>());
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
}

// --- what the host does itself: operators of the CPU on pinned memory ---

// Operators that look at no element, though they take tensors and return no view.
inline bool reads_nothing(const std::string& name) {
  for (const char* part : {"::empty", "_like", "::new_", "::is_", "::resize", "::set_", "::record_stream",
                           "result_type", "::to", "_to_copy", "pin_memory"})
    if (name.find(part) != std::string::npos) return true;
  return false;
}
inline std::unique_ptr<at::ObserverContext> watch_host(const at::RecordFunction& function) {
  if (t_is_stream) return nullptr;
  Held held(driver().lock);
  if (memory().pinned.empty()) return nullptr;
  const auto schema = function.operator_schema();
  if (!schema) return nullptr;
  std::vector<Access> accesses;
  bool is_of_device = false;
  for (size_t k = 0; k < function.inputs().size() && k < schema->arguments().size(); ++k) {
    const auto* alias = schema->arguments()[k].alias_info();
    visit_tensors(function.inputs()[k], [&](const Tensor& tensor) {
      is_of_device = is_of_device || is_ours(tensor);
      if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != at::kStrided || !tensor.has_storage()) return;
      if (pinned_at(tensor.storage().data())) accesses.push_back({ranges_of(tensor), alias && alias->isWrite()});
    });
  }
  if (accesses.empty() || is_of_device || reads_nothing(schema->name())) return nullptr;
  for (auto& returned : schema->returns())
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return nullptr;  // a view
  host_operation(schema->name(), accesses);
  return nullptr;
}

}  // namespace simulated
