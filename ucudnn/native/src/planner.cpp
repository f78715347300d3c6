#include "planner.hpp"

#include <dlfcn.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>

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
  if (is_set("UCUDNN_PLAIN")) return nullptr;
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
  std::string error;
  if (!run_python(statements, &error)) {
    say_plain(error);
    return nullptr;
  }
  return callbacks.plan ? &callbacks : nullptr;
}

}  // namespace

const Callbacks* planner() {
  static std::once_flag once;
  static const Callbacks* found = nullptr;
  std::call_once(once, [] { found = connect(); });
  // A Python process removes the callbacks when it exits.
  return found && found->plan && python_lives() ? found : nullptr;
}

void stop_at_exit() {
  // Exit handlers run in reverse order, so this one must be registered after cuDNN's libraries, which are loaded when
  // they are first used.
  static std::atomic<int> times{0};
  if (times++ >= kMostExits) return;
  std::atexit([] {
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

void say_plain(const std::string& reason) {
  static std::mutex mutex;
  static auto* said = new std::set<std::string>;  // never destroyed, because handles may outlive statics
  const std::lock_guard<std::mutex> lock(mutex);
  if (said->insert(reason).second) say("plain cuDNN, not in micro-batches: %s", reason.c_str());
}

bool verbose() {
  static const bool asked = is_set("UCUDNN_VERBOSE");
  return asked;
}

}  // namespace ucudnn
