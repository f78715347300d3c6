#include "planner.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "python.hpp"

namespace ucudnn {
namespace {

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value && std::string(value) != "0";
}

// Python must use the same cuDNN as this process, because they pass handles and plans to each other.
std::string cudnn_file() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&cudnnGetVersion), &info) || !info.dli_fname) return "";
  char* real = realpath(info.dli_fname, nullptr);
  const std::string found = real ? real : info.dli_fname;
  std::free(real);
  return found;
}

constexpr int kMostExits = 16;

Callbacks callbacks;

const Callbacks* connect() {
  std::string error;
  if (is_set("UCUDNN_PLAIN")) return nullptr;
  if (!start_python(&error)) {
    say_plain(error);
    return nullptr;
  }
  static const std::string file = cudnn_file();
  callbacks.cudnn = file.c_str();
  cudaGetDevice(&callbacks.device);
  callbacks.version = kVersion;
  char address[32];
  std::snprintf(address, sizeof address, "%llu", static_cast<unsigned long long>(
      reinterpret_cast<std::uintptr_t>(&callbacks)));
  const std::string statements = std::string("exec('''\n") +
      "try:\n"
      "    from ucudnn.native.bridge import attach\n"
      "    attach(" + address + ")\n"
      "except BaseException as error:\n"
      "    import sys\n"
      "    sys.stderr.write(f'ucudnn: plain cuDNN, not in micro-batches: {type(error).__name__}: {error} "
      "(Python {sys.version.split()[0]}, {sys.prefix})' + chr(10))\n"
      "''', {})";
  if (!run_python(statements, &error)) {
    say_plain(error);
    return nullptr;
  }
  return callbacks.plan ? &callbacks : nullptr;
}

// The connection with Python. The first thread makes it, and waits for Python's lock (the GIL) while it does. A thread
// that has Python's lock may come meanwhile. So the first thread holds no lock of this library (std::call_once would be
// one), and the others give Python's lock up while they wait.
class Connection {
 public:
  // The planner; null if there is none, or if this very thread is connecting.
  const Callbacks* get() {
    if (done_.load(std::memory_order_acquire)) return found_;
    if (begins()) {
      try {
        found_ = connect();
      } catch (const std::exception& error) {
        say_plain(error.what());
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      done_.store(true, std::memory_order_release);
      changed_.notify_all();
      return found_;
    }
    if (connecting_ == std::this_thread::get_id()) return nullptr;  // such as a signal handler of Python's
    std::string unused;
    if (!is_set("UCUDNN_PLAIN") && start_python(&unused)) without_python([this] { wait(); });
    else wait();
    return found_;
  }

 private:
  bool begins() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (connecting_ != std::thread::id()) return false;
    connecting_ = std::this_thread::get_id();
    return true;
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_.load(std::memory_order_acquire); });
  }

  std::mutex mutex_;  // never held while anything else is waited for
  std::condition_variable changed_;
  std::atomic<bool> done_{false};
  std::thread::id connecting_;
  const Callbacks* found_ = nullptr;
};

}  // namespace

const Callbacks* planner() {
  static auto* connection = new Connection;  // never destroyed, because handles may outlive statics
  const Callbacks* const found = connection->get();
  // A Python process removes the callbacks when it exits.
  return found && found->plan && python_lives() ? found : nullptr;
}

void stop_at_exit() {
  // Exit handlers run in reverse order, so this one must be registered after cuDNN's libraries, which are loaded when
  // they are first used.
  static std::atomic<int> times{0};
  if (times++ >= kMostExits) return;
  static const pid_t owner = getpid();
  std::atexit([] {
    if (getpid() != owner) return;  // a forked child has none of these threads, and would wait for them forever
    if (const Callbacks* python = planner()) python->forget(0, 0);
  });
}

void say(const char* format, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "ucudnn: %s\n", text);
}

void say_once(const std::string& text) {
  static std::mutex mutex;
  static auto* said = new std::set<std::string>;  // never destroyed, because handles may outlive statics
  const std::lock_guard<std::mutex> lock(mutex);
  if (said->insert(text).second) say("%s", text.c_str());
}

void say_plain(const std::string& reason) { say_once("plain cuDNN, not in micro-batches: " + reason); }

bool verbose() {
  static const bool asked = is_set("UCUDNN_VERBOSE");
  return asked;
}

}  // namespace ucudnn
