// A process group for tensors of the device, with a stream of its own as NCCL's has: a collective waits for the stream
// it was called on, and whoever waits for its work lets the current stream wait. gloo carries the bytes.
#pragma once

#include "operators.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace simulated {

using Tensors = std::vector<Tensor>;

inline Tensors opened(const Tensors& tensors) {
  Tensors all;
  for (auto& tensor : tensors) all.push_back(opened(tensor));
  return all;
}

// Tensors of works that were dropped unwaited: they are kept until the collective is done, as NCCL's watchdog does.
struct Shelf {
  std::mutex lock;
  std::vector<std::pair<MarkPtr, Tensors>> kept;

  void keep(MarkPtr mark, Tensors tensors) {
    std::lock_guard<std::mutex> held(lock);
    kept.emplace_back(std::move(mark), std::move(tensors));
  }
  void clear() {
    std::vector<std::pair<MarkPtr, Tensors>> done, still;
    {
      std::lock_guard<std::mutex> held(lock);
      for (auto& one : kept) (one.first->is_passed() ? done : still).push_back(std::move(one));
      kept.swap(still);
    }
    for (auto& one : done) host_saw(one.first);
  }
};
inline Shelf& shelf() {
  static Shelf& one = *new Shelf();
  return one;
}

class GroupWork final : public c10d::Work {
 public:
  GroupWork(MarkPtr mark, Tensors tensors, int device)
      : mark_(std::move(mark)), tensors_(std::move(tensors)), device_(device) {}
  ~GroupWork() override {
    if (!tensors_.empty()) shelf().keep(mark_, std::move(tensors_));
  }
  bool isCompleted() override {
    const bool is_passed = mark_->is_passed();
    if (is_passed) host_saw(mark_);
    return is_passed;
  }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    simulated::wait(current_stream(device_), mark_);
    std::lock_guard<std::mutex> held(lock_);
    tensors_.clear();  // the current stream is behind the collective now, so may the allocator be
  }
  bool wait(std::chrono::milliseconds limit) override {
    synchronize();
    if (limit == kNoTimeout) return true;
    TORCH_CHECK(mark_->wait_for(limit), "simulated device: a collective has not ended in ", limit.count(), " ms");
    host_wait(mark_, "a work with a time limit");
    return true;
  }

 private:
  MarkPtr mark_;
  std::mutex lock_;
  Tensors tensors_;
  int device_;
};

class Group final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "simccl"; }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return queue("broadcast", {}, tensors, options.asyncOp,
                 [=, all = opened(tensors), gloo = gloo_]() mutable { gloo->broadcast(all, options)->wait(); });
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return queue("allreduce", {}, tensors, options.asyncOp,
                 [=, all = opened(tensors), gloo = gloo_]() mutable { gloo->allreduce(all, options)->wait(); });
  }
  Work allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> to{opened(outs.at(0))};
    const bool are_even =
        std::all_of(to[0].begin(), to[0].end(), [&](auto& out) { return out.sizes() == to[0][0].sizes(); });
    return queue("allgather", ins, outs[0], options.asyncOp,
                 [=, from = opened(ins), gloo = gloo_, rank = getRank()]() mutable {
                   if (are_even) {
                     gloo->allgather(to, from, options)->wait();
                     return;
                   }
                   for (size_t k = 0; k < to[0].size(); ++k) {  // NCCL broadcasts each then; gloo refuses them
                     Tensors one{to[0][k]};
                     if (int(k) == rank && one[0].data_ptr() != from[0].data_ptr()) one[0].copy_(from[0]);
                     c10d::BroadcastOptions from_rank;
                     from_rank.rootRank = k;
                     gloo->broadcast(one, from_rank)->wait();
                   }
                 });
  }
  Work _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    return queue("all_gather", {in}, {out}, options.asyncOp,
                 [=, to = opened(out), from = opened(in), gloo = gloo_]() mutable {
                   auto own = from.clone();  // it may be a part of the output, which gloo does not allow
                   gloo->_allgather_base(to, own, options)->wait();
                 });
  }
  Work _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return queue("reduce_scatter", {in}, {out}, options.asyncOp,
                 [=, to = opened(out), from = opened(in), gloo = gloo_]() mutable {
                   auto own = from.clone();  // the output may be a part of it
                   gloo->_reduce_scatter_base(to, own, options)->wait();
                 });
  }
  Work alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                     const c10d::AllToAllOptions& options) override {
    return queue(
        "all_to_all", {in}, {out}, options.asyncOp,
        [=, to = opened(out), from = opened(in), gloo = gloo_, out_sizes = out_sizes, in_sizes = in_sizes]() mutable {
          gloo->alltoall_base(to, from, out_sizes, in_sizes, options)->wait();
        });
  }
  Work send(Tensors& tensors, int to, int tag) override {
    return queue("send", tensors, {}, true,
                 [=, all = opened(tensors), gloo = gloo_]() mutable { gloo->send(all, to, tag)->wait(); });
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    return queue("recv", {}, tensors, true,
                 [=, all = opened(tensors), gloo = gloo_]() mutable { gloo->recv(all, from, tag)->wait(); });
  }
  Work barrier(const c10d::BarrierOptions& options) override {
    synchronize_device(t_device);
    return gloo_->barrier(options);
  }

 private:
  Work queue(const char* name, const Tensors& reads, const Tensors& writes, bool is_asynchronous, Task task) {
    shelf().clear();
    Tensors all(reads);
    all.insert(all.end(), writes.begin(), writes.end());
    std::vector<Access> accesses;
    for (auto& tensor : all) TORCH_CHECK(is_ours(tensor), "simccl: ", name, " of a tensor on ", tensor.device());
    for (auto& tensor : reads) accesses.push_back(read_of(tensor));
    for (auto& tensor : writes) accesses.push_back(write_of(tensor));
    c10::DeviceGuard guard(all.at(0).device());
    auto* current = current_stream(t_device);
    auto* own = current;  // NCCL, too, runs a collective that is not asynchronous on the current stream
    if (is_asynchronous) {
      auto& known = streams_[t_device];
      if (!known) known = make_stream(t_device, "group");
      own = known;
      simulated::wait(own, record(current));
    }
    launch(own, name, accesses, std::move(task));
    return c10::make_intrusive<GroupWork>(record(own), is_asynchronous ? all : Tensors{}, t_device);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<int, Stream*> streams_;  // by device
};

}  // namespace simulated
