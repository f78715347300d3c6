#include "python.hpp"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cwchar>
#include <mutex>
#include <vector>

#ifndef UCUDNN_PYTHON
#define UCUDNN_PYTHON "python3"
#endif
#ifndef UCUDNN_LIBPYTHON
#define UCUDNN_LIBPYTHON ""
#endif

#ifndef UCUDNN_BUILD
#define UCUDNN_BUILD ""
#endif

namespace ucudnn {
namespace {

// Python reads in the library's file what it was built from.
__attribute__((used)) const char build[] = "ucudnn build " UCUDNN_BUILD;

// The functions of Python's stable C interface that are used. They are looked up, not linked, so that any Python works.
struct Python {
  int (*is_initialized)() = nullptr;
  int (*is_finalizing)() = nullptr;
  void (*initialize)(int) = nullptr;
  void (*set_program_name)(const wchar_t*) = nullptr;
  wchar_t* (*decode)(const char*, std::size_t*) = nullptr;
  void* (*save_thread)() = nullptr;
  void (*restore_thread)(void*) = nullptr;
  int (*ensure)() = nullptr;
  void (*release)(int) = nullptr;
  int (*run)(const char*, void*) = nullptr;
  // These replace set_program_name, which Python 3.15 removes:
  void* (*config_create)() = nullptr;
  int (*config_set)(void*, const char*, const char*) = nullptr;
  int (*config_set_int)(void*, const char*, long long) = nullptr;
  int (*config_run)(void*) = nullptr;
  void (*config_free)(void*) = nullptr;

  bool load(void* library) {
    const auto find = [library](auto* function, const char* name) {
      *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(dlsym(library, name));
      return *function != nullptr;
    };
    find(&config_create, "PyInitConfig_Create");
    find(&config_set, "PyInitConfig_SetStr");
    find(&config_set_int, "PyInitConfig_SetInt");
    find(&config_run, "Py_InitializeFromInitConfig");
    find(&config_free, "PyInitConfig_Free");
    find(&set_program_name, "Py_SetProgramName");
    find(&is_finalizing, "Py_IsFinalizing") || find(&is_finalizing, "_Py_IsFinalizing");
    return find(&is_initialized, "Py_IsInitialized") && find(&initialize, "Py_InitializeEx") &&
           find(&decode, "Py_DecodeLocale") && find(&save_thread, "PyEval_SaveThread") &&
           find(&restore_thread, "PyEval_RestoreThread") && find(&ensure, "PyGILState_Ensure") &&
           find(&release, "PyGILState_Release") && find(&run, "PyRun_SimpleStringFlags");
  }

  bool configure(const std::string& executable) {
    void* config = config_create();
    config_set_int(config, "isolated", 0);
    config_set_int(config, "use_environment", 1);
    config_set_int(config, "install_signal_handlers", 0);
    if (!executable.empty()) config_set(config, "program_name", executable.c_str());
    const int status = config_run(config);
    config_free(config);
    return status == 0;
  }
};

Python python;
std::atomic<bool> loaded{false};  // whether there is an interpreter

// Ask an interpreter that has ucudnn for its shared library.
std::string library_of(const std::string& executable) {
  std::string quoted;
  for (char letter : executable) quoted += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  std::string found;
  if (FILE* pipe = popen(("'" + quoted + "' -m ucudnn.native --libpython").c_str(), "r")) {
    char text[1024];
    while (std::fgets(text, sizeof text, pipe)) found += text;
    pclose(pipe);
  }
  while (!found.empty() && (found.back() == '\n' || found.back() == ' ')) found.pop_back();
  return found;
}

// Whether a path names a shared library, such as libpython3.12.so.1.0, and not an executable.
bool is_library(const std::string& path) {
  const std::string name = path.substr(path.rfind('/') + 1);
  const std::size_t at = name.find(".so");
  return at != std::string::npos && (at + 3 == name.size() || name[at + 3] == '.');
}

void initialize(const std::string& executable) {
  // The path of the executable, not of the library, determines the virtual environment and its site-packages.
  if (!executable.empty()) {
    python.set_program_name(python.decode(executable.c_str(), nullptr));  // never freed, because Python keeps using it
  }
  python.initialize(0);  // without Python's signal handlers
}

// Start Python in a child process first, because a Python that cannot start ends its process, for example if PYTHONHOME
// belongs to another Python. Returns the reason why it cannot start, or ''.
std::string trial(const std::string& executable) {
  constexpr char well = 1;
  int ends[2];
  if (pipe(ends) != 0) return "";
  const pid_t child = fork();
  if (child == 0) {
    std::atexit([] { _exit(1); });  // without the program's own exit handlers
    std::signal(SIGALRM, SIG_DFL);
    alarm(60);
    dup2(ends[1], STDERR_FILENO);
    initialize(executable);
    _exit(write(ends[1], &well, 1) == 1 ? 0 : 1);
  }
  close(ends[1]);
  std::string said;
  char text[1024];
  for (ssize_t size = 1; child > 0 && (size > 0 || (size < 0 && errno == EINTR));) {
    size = read(ends[0], text, sizeof text);
    if (size > 0) said.append(text, static_cast<std::size_t>(size));
  }
  close(ends[0]);
  if (child < 0) return "";  // no child could be started, so there is no trial
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  const bool slow = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;  // then it is unknown whether Python can start
  if (slow || (!said.empty() && said.back() == well)) return "";
  const std::string mark = "Fatal Python error: ";
  const std::size_t begin = said.find(mark);
  if (begin == std::string::npos) return "its process ended";
  return said.substr(begin + mark.size(), said.find('\n', begin) - begin - mark.size());
}

bool start(std::string* error) {
  std::string executable = UCUDNN_PYTHON, library = UCUDNN_LIBPYTHON;
  const char* named = std::getenv("UCUDNN_PYTHON");
  if (named && *named) {
    executable = named;
    const bool itself = is_library(executable);
    library = itself ? executable : library_of(executable);
    if (itself) executable.clear();
  }
  if (library.empty()) {
    *error = "no shared library (libpython) of " + executable + ": UCUDNN_PYTHON names another Python, with ucudnn";
    return false;
  }
  // RTLD_GLOBAL, because Python's extension modules need its symbols.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!handle || !python.load(handle)) {
    const char* reason = handle ? "it lacks functions of Python's" : dlerror();
    *error = "Python cannot be loaded: " + library + ": " + (reason ? reason : "");
    return false;
  }
  if (python.is_initialized()) return true;  // the program embeds it, but does not show its symbols to others
  if (python.set_program_name) {
    const std::string reason = trial(executable);
    if (!reason.empty()) {
      *error = "Python cannot be started: " + library + ": " + reason;
      return false;
    }
    initialize(executable);
  } else if (!python.config_create || !python.configure(executable)) {
    *error = "Python cannot be started: " + library;
    return false;
  }
  python.save_thread();  // no thread holds the lock now, so that any thread may take it
  return true;
}

}  // namespace

bool start_python(std::string* error) {
  static std::once_flag once;
  static auto* reason = new std::string;  // never destroyed, because handles may outlive statics
  std::call_once(once, [] {
    // If the program is Python, or embeds it, its symbols are loaded already.
    const bool running = python.load(RTLD_DEFAULT) && python.is_initialized();
    loaded = running || start(reason);
  });
  if (!loaded) *error = *reason;
  return loaded;
}

bool run_python(const std::string& statements, std::string* error) {
  const int state = python.ensure();
  const int status = python.run(statements.c_str(), nullptr);
  python.release(state);
  if (status != 0) *error = "Python could not run what connects it";
  return status == 0;
}

void without_python(const std::function<void()>& wait) {
  if (!python_lives()) return wait();
  const int state = python.ensure();
  void* const thread = python.save_thread();
  wait();
  python.restore_thread(thread);
  python.release(state);
}

bool python_lives() {
  return loaded && python.is_initialized() && !(python.is_finalizing && python.is_finalizing());
}

}  // namespace ucudnn
