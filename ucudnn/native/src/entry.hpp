// Entry: a call that uses a handle. While it lasts, no other call may: it would overwrite the handle's workspace, or
// plan in the middle of planning. A signal handler can make such a call on the same thread.
#ifndef UCUDNN_ENTRY_HPP_
#define UCUDNN_ENTRY_HPP_

#include <atomic>

#include "planner.hpp"

namespace ucudnn {

class Entry {
 public:
  explicit Entry(std::atomic<bool>& busy) : busy_(busy) {
    if (within()) {
      say_once("a convolution was called inside another one of the same thread, as signal handlers can do: refused; "
               "let the handler set a flag, and convolve after it");
    } else if (busy_.exchange(true, std::memory_order_acquire)) {
      say_once("a handle was used by two threads at the same time: refused; give each thread a handle of its own");
    } else {
      within() = granted_ = true;
    }
  }
  ~Entry() { end(); }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  bool granted() const { return granted_; }
  // The handle may be destroyed after this.
  void end() {
    if (!granted_) return;
    granted_ = within() = false;
    busy_.store(false, std::memory_order_release);
  }

 private:
  static bool& within() {
    static thread_local bool inside = false;
    return inside;
  }

  std::atomic<bool>& busy_;
  bool granted_ = false;
};

}  // namespace ucudnn
#endif
