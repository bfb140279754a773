// UCC as a library of torch.distributed: a c10d backend for dense tensors on the CPU. See team.h for how it runs.
//
// Reductions use UCC's types and operators; an average is a sum that is divided, because UCC's own exists for some
// operations only. fp16 is reduced as fp32 and rounded once: UCC 1.9 has it on GPUs only, and where it is asked for on a
// CPU it prints an error, reports success and leaves the tensors as they were. So whatever it cannot reduce is refused
// here. What is only moved travels as bytes. send and recv are broadcasts between two ranks.

#include "team.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <numeric>

namespace benchlib {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class UccWork : public c10d::Work {
 public:
  UccWork(int rank, c10d::OpType type, std::string what, Tensors results)
      : Work(rank, type),
        what_(std::move(what)),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  void end(const std::string& error, const std::function<void()>& after) {
    std::exception_ptr failure;
    try {
      if (!error.empty()) throw std::runtime_error("ucc " + what_ + ": " + error);
      if (after) after();
    } catch (...) {
      failure = std::current_exception();
    }
    finish(failure);
    if (failure) {
      future_->setError(failure);
    } else {
      future_->markCompleted(c10::IValue(results_));
    }
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  Tensors result() override { return results_; }

 private:
  std::string what_;
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class UccGroup : public c10d::Backend {
 public:
  UccGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size, double timeout_s)
      : Backend(rank, size), timeout_s_(timeout_s), team_(std::make_unique<Team>(std::move(store), rank, size)) {}

  const std::string getBackendName() const override { return "libucc"; }
  void shutdown() override { team_->close(); }

  // Reductions

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto tensor = one("all_reduce", tensors);
    auto args = reduction("all_reduce", UCC_COLL_TYPE_ALLREDUCE, opts.reduceOp, tensor);
    auto data = wide(tensor);
    args.flags |= UCC_COLL_ARGS_FLAG_IN_PLACE;
    args.src.info = args.dst.info = typed(data);
    return run("all_reduce", c10d::OpType::ALLREDUCE, args, tensors, settle(opts.reduceOp, data, tensor), tensor.numel());
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto tensor = one("reduce", tensors);
    auto args = reduction("reduce", UCC_COLL_TYPE_REDUCE, opts.reduceOp, tensor);
    auto data = wide(tensor);
    args.root = opts.rootRank;
    args.src.info = typed(data);
    if (getRank() != opts.rootRank) return run("reduce", c10d::OpType::REDUCE, args, tensors, keep(nullptr, {data}), tensor.numel());
    args.flags |= UCC_COLL_ARGS_FLAG_IN_PLACE;
    args.dst.info = typed(data);
    return run("reduce", c10d::OpType::REDUCE, args, tensors, settle(opts.reduceOp, data, tensor), tensor.numel());
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    parts("reduce_scatter", output, input);
    auto args = reduction("reduce_scatter", UCC_COLL_TYPE_REDUCE_SCATTER, opts.reduceOp, input);
    auto source = wide(overlap(input, output) ? input.clone() : input);
    auto data = source.scalar_type() == output.scalar_type() ? output : at::empty(output.sizes(), source.options());
    args.src.info = typed(source);
    args.dst.info = typed(data);
    auto after = keep(settle(opts.reduceOp, data, output), {source});
    return run("reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, args, {output}, after, input.numel());
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto output = one("reduce_scatter", outputs);
    auto whole = joined("reduce_scatter", inputs.at(0));
    return _reduce_scatter_base(output, whole, opts);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    return each(outputs.size(), [&](size_t index) { return _reduce_scatter_base(outputs[index], inputs[index], opts); });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return each(tensors.size(), [&](size_t index) {
      Tensors single{tensors[index]};
      return allreduce(single, opts);
    });
  }

  // Moves

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto tensor = one("broadcast", tensors);
    auto args = blank(UCC_COLL_TYPE_BCAST);
    args.root = opts.rootRank;
    args.src.info = bytes(tensor);
    return run("broadcast", c10d::OpType::BROADCAST, args, tensors, nullptr, tensor.numel());
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& /*opts*/) override {
    return gather_all(output, input, {output}, nullptr);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& /*opts*/) override {
    auto input = one("all_gather", inputs);
    auto list = outputs.at(0);
    auto whole = joined("all_gather", list);
    return gather_all(whole, input, list, [list, whole] { spread(whole, list); });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return each(outputs.size(), [&](size_t index) { return _allgather_base(outputs[index], inputs[index], opts); });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto input = one("gather", inputs);
    auto args = blank(UCC_COLL_TYPE_GATHER);
    args.root = opts.rootRank;
    args.src.info = bytes(input);
    if (getRank() != opts.rootRank) return run("gather", c10d::OpType::GATHER, args, {}, keep(nullptr, {input}), input.numel());
    auto list = outputs.at(0);
    auto whole = joined("gather", list);
    parts("gather", input, whole);
    auto source = overlap(input, whole) ? input.clone() : input;
    args.src.info = bytes(source);
    args.dst.info = bytes(whole);
    auto after = [list, whole, source] { spread(whole, list); };
    return run("gather", c10d::OpType::GATHER, args, list, after, input.numel());
  }

  // As SCATTERV, which UCC's transport over UCX has; it has no SCATTER.
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto output = one("scatter", outputs);
    auto args = blank(UCC_COLL_TYPE_SCATTERV);
    args.root = opts.rootRank;
    args.dst.info = bytes(output);
    if (getRank() != opts.rootRank) return run("scatter", c10d::OpType::SCATTER, args, outputs, nullptr, output.numel());
    auto whole = joined("scatter", inputs.at(0));
    parts("scatter", output, whole);
    if (overlap(output, whole)) whole = whole.clone();
    auto blocks = std::make_shared<Blocks>(std::vector<int64_t>(getSize(), args.dst.info.count), 1);
    args.src.info_v = blocks->of(whole);
    args.flags |= UCC_COLL_ARGS_FLAG_COUNT_64BIT | UCC_COLL_ARGS_FLAG_DISPLACEMENTS_64BIT;
    return run("scatter", c10d::OpType::SCATTER, args, outputs, [blocks, whole] {}, output.numel());
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                        std::vector<int64_t>& input_rows, const c10d::AllToAllOptions& /*opts*/) override {
    whole_block("all_to_all", output);
    whole_block("all_to_all", input);
    auto source = overlap(input, output) ? input.clone() : input;
    if (!output_rows.empty() || !input_rows.empty()) return uneven(output, source, output_rows, input_rows, {output}, nullptr);
    TORCH_CHECK_VALUE(input.numel() == output.numel() && input.numel() % getSize() == 0,
                      "ucc all_to_all: ", input.numel(), " elements cannot be split over ", getSize(), " ranks: give the split sizes");
    auto args = blank(UCC_COLL_TYPE_ALLTOALL);
    args.src.info = bytes(source);
    args.dst.info = bytes(output);
    return run("all_to_all", c10d::OpType::ALLTOALL_BASE, args, {output}, keep(nullptr, {source}), input.numel());
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& /*opts*/) override {
    std::vector<int64_t> received, sent;
    int64_t total = 0;
    for (auto& tensor : inputs) sent.push_back((whole_block("all_to_all", tensor), tensor.numel()));
    for (auto& tensor : outputs) received.push_back((whole_block("all_to_all", tensor), tensor.numel())), total += tensor.numel();
    Tensors flat;
    for (auto& tensor : inputs) flat.push_back(tensor.reshape({-1}));
    auto source = at::cat(flat);
    auto target = at::empty({total}, source.options());
    auto list = outputs;
    auto after = [list, target] {
      int64_t start = 0;
      for (auto& tensor : list) {
        tensor.view({-1}).copy_(target.narrow(0, start, tensor.numel()));
        start += tensor.numel();
      }
    };
    return uneven(target, source, received, sent, list, after);
  }

  WorkPtr barrier(const c10d::BarrierOptions& /*opts*/) override {
    return run("barrier", c10d::OpType::BARRIER, blank(UCC_COLL_TYPE_BARRIER), {}, nullptr, 1);
  }

  // Messages

  WorkPtr send(Tensors& tensors, int target, int tag) override {
    return message("send", c10d::OpType::SEND, tensors, getRank(), target, tag);
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return message("recv", c10d::OpType::RECV, tensors, source, getRank(), tag);
  }

 private:
  // Several operations under one handle, the last one's: the others are waited for.
  static WorkPtr each(size_t count, const std::function<WorkPtr(size_t)>& start) {
    std::vector<WorkPtr> works;
    for (size_t index = 0; index < count; ++index) works.push_back(start(index));
    for (size_t index = 0; index + 1 < count; ++index) works[index]->wait();
    return works.at(count - 1);
  }

  WorkPtr message(const std::string& what, c10d::OpType type, Tensors& tensors, int source, int target, int tag) {
    auto tensor = one(what, tensors);
    TORCH_CHECK_VALUE(tag >= 0 && tag < 1 << 15, "ucc ", what, ": tag ", tag, " is not below 32768");
    auto args = blank(UCC_COLL_TYPE_BCAST);
    args.mask |= UCC_COLL_ARGS_FIELD_ACTIVE_SET | UCC_COLL_ARGS_FIELD_TAG;
    args.tag = tag;
    args.root = source;
    args.active_set.start = source;
    args.active_set.stride = target - source;
    args.active_set.size = 2;
    args.src.info = bytes(tensor);
    return run(what, type, args, tensors, nullptr, tensor.numel());
  }

  WorkPtr gather_all(at::Tensor& output, at::Tensor& input, Tensors results, std::function<void()> after) {
    parts("all_gather", input, output);
    auto args = blank(UCC_COLL_TYPE_ALLGATHER);
    auto source = input;
    const auto block = input.numel() * input.element_size();
    if (input.data_ptr() == static_cast<char*>(output.data_ptr()) + getRank() * block) {
      args.flags |= UCC_COLL_ARGS_FLAG_IN_PLACE;
    } else if (overlap(input, output)) {
      source = input.clone();
    }
    args.src.info = bytes(source);
    args.dst.info = bytes(output);
    return run("all_gather", c10d::OpType::ALLGATHER, args, std::move(results), keep(after, {source, output}), input.numel());
  }

  // Blocks of a tensor, one after the other, as bytes.
  struct Blocks {
    std::vector<uint64_t> counts, starts;

    Blocks(const std::vector<int64_t>& rows, uint64_t row_bytes) {
      uint64_t start = 0;
      for (auto count : rows) {
        counts.push_back(count * row_bytes);
        starts.push_back(start);
        start += count * row_bytes;
      }
    }

    ucc_coll_buffer_info_v_t of(const at::Tensor& tensor) {
      return {tensor.data_ptr(), reinterpret_cast<ucc_count_t*>(counts.data()), reinterpret_cast<ucc_aint_t*>(starts.data()),
              UCC_DT_UINT8, UCC_MEMORY_TYPE_HOST};
    }
  };

  std::shared_ptr<Blocks> rows(const at::Tensor& tensor, const std::vector<int64_t>& given) const {
    const int64_t length = tensor.dim() ? tensor.size(0) : 1, size = getSize();
    const auto wanted = given.empty() ? std::vector<int64_t>(size, length / size) : given;
    const int64_t sum = std::accumulate(wanted.begin(), wanted.end(), int64_t{0});
    TORCH_CHECK_VALUE(static_cast<int64_t>(wanted.size()) == size && sum == length,
                      "ucc all_to_all: the split sizes do not add up to ", length, " rows over ", size, " ranks");
    return std::make_shared<Blocks>(wanted, length ? tensor.numel() * tensor.element_size() / length : 0);
  }

  WorkPtr uneven(at::Tensor& output, at::Tensor& source, const std::vector<int64_t>& received,
                 const std::vector<int64_t>& sent, Tensors results, std::function<void()> after) {
    auto from = rows(source, sent), into = rows(output, received);
    auto args = blank(UCC_COLL_TYPE_ALLTOALLV);
    args.flags |= UCC_COLL_ARGS_FLAG_COUNT_64BIT | UCC_COLL_ARGS_FLAG_DISPLACEMENTS_64BIT;
    args.src.info_v = from->of(source);
    args.dst.info_v = into->of(output);
    auto finished = [after, from, into, source, output] {
      if (after) after();
    };
    return run("all_to_all", c10d::OpType::ALLTOALL, args, std::move(results), finished, 1);
  }

  // `after` runs when the operation is through, before anybody is told; it also holds what must live that long.
  WorkPtr run(const std::string& what, c10d::OpType type, ucc_coll_args_t args, Tensors results,
              std::function<void()> after, int64_t elements) {
    auto work = c10::make_intrusive<UccWork>(getRank(), type, what, std::move(results));
    if (elements == 0) {
      work->end("", after);
      return work;
    }
    Operation operation;
    operation.what = what;
    operation.args = args;
    operation.timeout_s = timeout_s_;
    operation.done = [work, after = std::move(after)](const std::string& error) { work->end(error, after); };
    team_->add(std::move(operation));
    return work;
  }

  static ucc_coll_args_t blank(ucc_coll_type_t type) {
    ucc_coll_args_t args{};
    args.mask = UCC_COLL_ARGS_FIELD_FLAGS;
    args.coll_type = type;
    return args;
  }

  static ucc_coll_args_t reduction(const std::string& what, ucc_coll_type_t type, const c10d::ReduceOp& op, const at::Tensor& tensor) {
    auto args = blank(type);
    switch (op) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG: args.op = UCC_OP_SUM; break;
      case c10d::ReduceOp::PRODUCT: args.op = UCC_OP_PROD; break;
      case c10d::ReduceOp::MIN: args.op = UCC_OP_MIN; break;
      case c10d::ReduceOp::MAX: args.op = UCC_OP_MAX; break;
      case c10d::ReduceOp::BAND: args.op = UCC_OP_BAND; break;
      case c10d::ReduceOp::BOR: args.op = UCC_OP_BOR; break;
      case c10d::ReduceOp::BXOR: args.op = UCC_OP_BXOR; break;
      default: TORCH_CHECK_VALUE(false, "ucc ", what, ": this reduction is not offered: use sum, avg, product, min or max");
    }
    const bool bits = op == c10d::ReduceOp::BAND || op == c10d::ReduceOp::BOR || op == c10d::ReduceOp::BXOR;
    TORCH_CHECK_VALUE(!bits || !tensor.is_floating_point(), "ucc ", what, ": floats have no bitwise reduction");
    datatype(wide(tensor));
    return args;
  }

  static at::Tensor wide(const at::Tensor& tensor) { return tensor.scalar_type() == at::kHalf ? tensor.to(at::kFloat) : tensor; }

  // Divide the sum of an average (whole numbers towards zero), and round into the tensor that was given.
  std::function<void()> settle(const c10d::ReduceOp& op, at::Tensor data, at::Tensor target) {
    return [data, target, mean = op == c10d::ReduceOp::AVG, size = getSize()]() mutable {
      if (mean && data.is_floating_point()) data.div_(size);
      if (mean && !data.is_floating_point()) data.div_(size, "trunc");
      if (!data.is_same(target)) target.copy_(data);
    };
  }

  static std::function<void()> keep(std::function<void()> after, Tensors tensors) {
    return [after = std::move(after), tensors = std::move(tensors)] {
      if (after) after();
    };
  }

  static ucc_datatype_t datatype(const at::Tensor& tensor) {
    switch (tensor.scalar_type()) {
      case at::kFloat: return UCC_DT_FLOAT32;
      case at::kDouble: return UCC_DT_FLOAT64;
      case at::kBFloat16: return UCC_DT_BFLOAT16;
      case at::kChar: return UCC_DT_INT8;
      case at::kByte: return UCC_DT_UINT8;
      case at::kShort: return UCC_DT_INT16;
      case at::kInt: return UCC_DT_INT32;
      case at::kLong: return UCC_DT_INT64;
      default: TORCH_CHECK_VALUE(false, "ucc: cannot reduce ", tensor.scalar_type(), ": convert the tensor to a number type");
    }
  }

  static ucc_coll_buffer_info_t typed(const at::Tensor& tensor) {
    return {tensor.data_ptr(), static_cast<ucc_count_t>(tensor.numel()), datatype(tensor), UCC_MEMORY_TYPE_HOST};
  }

  static ucc_coll_buffer_info_t bytes(const at::Tensor& tensor) {
    return {tensor.data_ptr(), static_cast<ucc_count_t>(tensor.numel() * tensor.element_size()), UCC_DT_UINT8, UCC_MEMORY_TYPE_HOST};
  }

  static void whole_block(const std::string& what, const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.layout() == at::kStrided,
                      "ucc ", what, ": a dense CPU tensor is needed: use .cpu()");
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "ucc ", what, ": the tensor with shape ", tensor.sizes(), " and strides ",
                      tensor.strides(), " is not contiguous: pass tensor.contiguous()");
  }

  static at::Tensor one(const std::string& what, const Tensors& tensors) {
    TORCH_CHECK_VALUE(tensors.size() == 1, "ucc ", what, ": one tensor at a time, not ", tensors.size());
    whole_block(what, tensors[0]);
    return tensors[0];
  }

  void parts(const std::string& what, const at::Tensor& part, const at::Tensor& whole) {
    whole_block(what, part);
    whole_block(what, whole);
    TORCH_CHECK_VALUE(part.scalar_type() == whole.scalar_type() && part.numel() * getSize() == whole.numel(), "ucc ", what,
                      ": ", whole.numel(), " elements are not ", getSize(), " ranks x ", part.numel(), " of the same type");
  }

  // One tensor for a list of equal ones: themselves where they lie side by side, else a copy.
  static at::Tensor joined(const std::string& what, const Tensors& list) {
    const auto& first = list.at(0);
    const auto block = first.numel() * first.element_size();
    bool beside = true;
    for (size_t index = 0; index < list.size(); ++index) {
      whole_block(what, list[index]);
      TORCH_CHECK_VALUE(list[index].numel() == first.numel() && list[index].scalar_type() == first.scalar_type(),
                        "ucc ", what, ": tensors of one size and type are needed");
      beside = beside && list[index].storage().is_alias_of(first.storage()) &&
          list[index].data_ptr() == static_cast<char*>(first.data_ptr()) + index * block;
    }
    if (beside) return first.as_strided({static_cast<int64_t>(list.size()) * first.numel()}, {1});
    Tensors flat;
    for (auto& tensor : list) flat.push_back(tensor.reshape({-1}));
    return at::cat(flat);
  }

  static void spread(const at::Tensor& whole, const Tensors& list) {
    if (whole.storage().is_alias_of(list.at(0).storage())) return;
    for (size_t index = 0; index < list.size(); ++index)
      list[index].view({-1}).copy_(whole.narrow(0, index * list[index].numel(), list[index].numel()));
  }

  static bool overlap(const at::Tensor& one, const at::Tensor& other) {
    const auto* first = static_cast<const char*>(one.data_ptr());
    const auto* second = static_cast<const char*>(other.data_ptr());
    return first < second + other.numel() * other.element_size() && second < first + one.numel() * one.element_size();
  }

  const double timeout_s_;
  std::unique_ptr<Team> team_;
};

c10::intrusive_ptr<c10d::Backend> create(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, double timeout_s) {
  return c10::make_intrusive<UccGroup>(store, rank, size, timeout_s);
}

}  // namespace benchlib

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("create", &benchlib::create, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("version", [] { return std::string(ucc_get_version_string()); });
}
