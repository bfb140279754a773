// A UCC team over the ranks of one process group, and the thread that drives it.
//
// All calls into UCC of a team come from its thread: it starts operations in the order in which they were asked for,
// keeps several under way, and ends each with its status. While nothing is under way it sleeps.
#pragma once

#include <sched.h>
#include <ucc/api/ucc.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace benchlib {

inline void ucc_check(ucc_status_t status, const std::string& what) {
  if (status < 0) throw std::runtime_error("ucc " + what + ": " + ucc_status_string(status));
}

// One operation. `args` is what UCC gets; `done` is called once, with an empty text where all went well.
struct Operation {
  std::string what;
  ucc_coll_args_t args{};
  std::function<void(const std::string&)> done;
  double timeout_s = 0;
  ucc_coll_req_h request = nullptr;
  std::chrono::steady_clock::time_point due;
};

class Team {
 public:
  Team(c10::intrusive_ptr<c10d::Store> store, int rank, int size) : store_(std::move(store)), rank_(rank), size_(size) {
    thread_ = std::thread([this] { live(); });
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return state_ != State::starting; });
    if (state_ == State::broken) {
      lock.unlock();
      thread_.join();
      throw std::runtime_error(error_);
    }
  }

  ~Team() {
    // Without close(): peers may be gone, so nothing that needs them is tried.
    stop(false);
  }

  // Wait for what is under way and take the team down. All ranks call it.
  void close() { stop(true); }

  void add(Operation operation) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (state_ != State::running) throw std::runtime_error("ucc " + operation.what + ": the group was shut down");
      fresh_.push_back(std::move(operation));
    }
    changed_.notify_all();
  }

 private:
  enum class State { starting, running, closing, leaving, broken };

  void stop(bool together) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (state_ == State::running) state_ = together ? State::closing : State::leaving;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void live() {
    try {
      build();
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = error.what();
      state_ = State::broken;
      changed_.notify_all();
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      state_ = State::running;
    }
    changed_.notify_all();
    while (take()) {
      ucc_context_progress(context_);
      if (!sweep()) sched_yield();
    }
    if (state_ == State::closing && !stuck_) destroy();
  }

  // Start what was added; false when the team is to end and nothing is under way.
  bool take() {
    std::deque<Operation> fresh;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (under_way_.empty()) changed_.wait(lock, [this] { return !fresh_.empty() || state_ != State::running; });
      if (state_ == State::leaving || (state_ == State::closing && fresh_.empty() && under_way_.empty())) return false;
      fresh.swap(fresh_);
    }
    for (auto& operation : fresh) start(std::move(operation));
    return true;
  }

  void start(Operation operation) {
    ucc_status_t status = ucc_collective_init(&operation.args, &operation.request, team_);
    if (status == UCC_OK) {
      status = ucc_collective_post(operation.request);
      if (status < 0) ucc_collective_finalize(operation.request);
    }
    if (status < 0) {
      operation.done(ucc_status_string(status));
      return;
    }
    operation.due = std::chrono::steady_clock::now() +
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(operation.timeout_s));
    under_way_.push_back(std::move(operation));
  }

  // End what is through; whether anything was.
  bool sweep() {
    bool any = false;
    const auto now = std::chrono::steady_clock::now();
    for (auto one = under_way_.begin(); one != under_way_.end();) {
      const ucc_status_t status = ucc_collective_test(one->request);
      const bool late = status > 0 && now > one->due;
      if (status > 0 && !late) {
        ++one;
        continue;
      }
      if (late) stuck_ = true;  // UCC cannot take an operation back: its request and the team stay as they are
      if (!late) ucc_collective_finalize(one->request);
      one->done(late ? "timed out: a rank of the group did not take part" : status < 0 ? ucc_status_string(status) : "");
      one = under_way_.erase(one);
      any = true;
    }
    return any;
  }

  void build() {
    ucc_lib_config_h lib_config;
    ucc_lib_params_t lib_params{};
    lib_params.mask = UCC_LIB_PARAM_FIELD_THREAD_MODE;
    lib_params.thread_mode = UCC_THREAD_MULTIPLE;  // groups share the library's own state
    ucc_check(ucc_lib_config_read(nullptr, nullptr, &lib_config), "configuration");
    const ucc_status_t status = ucc_init(&lib_params, lib_config, &lib_);
    ucc_lib_config_release(lib_config);
    ucc_check(status, "start");

    ucc_context_config_h config;
    ucc_check(ucc_context_config_read(lib_, nullptr, &config), "configuration of the context");
    ucc_context_params_t params{};
    params.mask = UCC_CONTEXT_PARAM_FIELD_OOB;
    params.oob = exchange();
    const ucc_status_t created = ucc_context_create(lib_, &params, config, &context_);
    ucc_context_config_release(config);
    ucc_check(created, "context");

    ucc_team_params_t team{};
    team.mask = UCC_TEAM_PARAM_FIELD_EP | UCC_TEAM_PARAM_FIELD_EP_RANGE | UCC_TEAM_PARAM_FIELD_OOB;
    team.oob = exchange();
    team.ep = rank_;
    team.ep_range = UCC_COLLECTIVE_EP_RANGE_CONTIG;
    ucc_check(ucc_team_create_post(&context_, 1, &team, &team_), "team");
    ucc_status_t made;
    while ((made = ucc_team_create_test(team_)) > 0) ucc_context_progress(context_);
    ucc_check(made, "team");
  }

  void destroy() {
    while (ucc_team_destroy(team_) == UCC_INPROGRESS) ucc_context_progress(context_);
    ucc_context_destroy(context_);
    ucc_finalize(lib_);
    // The above goes through the store, which ends with the run's first rank, and that can only be the first rank here.
    try {
      auto left = store_->add("ucc-left", 1);
      for (int wait = 0; rank_ == 0 && left < size_ && wait < 5000; ++wait) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        left = store_->add("ucc-left", 0);
      }
    } catch (const std::exception&) {  // the store is gone: nobody is left to wait for
    }
  }

  // The all-gather by which UCC exchanges addresses: through torch's store.
  ucc_oob_coll_t exchange() {
    ucc_oob_coll_t oob{};
    oob.allgather = [](void* source, void* target, size_t size, void* self, void** request) {
      *request = self;
      return static_cast<Team*>(self)->gather(source, target, size);
    };
    oob.req_test = [](void*) { return UCC_OK; };
    oob.req_free = [](void*) { return UCC_OK; };
    oob.coll_info = this;
    oob.n_oob_eps = size_;
    oob.oob_ep = rank_;
    return oob;
  }

  ucc_status_t gather(void* source, void* target, size_t size) {
    const std::string round = "ucc" + std::to_string(exchanges_++) + "-";
    const auto* bytes = static_cast<const uint8_t*>(source);
    try {
      store_->set(round + std::to_string(rank_), std::vector<uint8_t>(bytes, bytes + size));
      for (int rank = 0; rank < size_; ++rank) {
        const auto found = store_->get(round + std::to_string(rank));
        if (found.size() != size) return UCC_ERR_INVALID_PARAM;
        std::memcpy(static_cast<uint8_t*>(target) + rank * size, found.data(), size);
      }
    } catch (const std::exception&) {
      return UCC_ERR_NO_MESSAGE;  // the store's time limit: a rank is not there
    }
    return UCC_OK;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;
  int exchanges_ = 0;
  bool stuck_ = false;
  State state_ = State::starting;
  std::string error_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> fresh_;
  std::list<Operation> under_way_;
  ucc_lib_h lib_ = nullptr;
  ucc_context_h context_ = nullptr;
  ucc_team_h team_ = nullptr;
  std::thread thread_;
};

}  // namespace benchlib
