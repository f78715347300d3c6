// A Python interpreter for this process: the running one, or an embedded one. It is loaded at run time, not linked.
#ifndef UCUDNN_PYTHON_HPP_
#define UCUDNN_PYTHON_HPP_

#include <functional>
#include <string>

namespace ucudnn {

// Start Python unless it runs. This waits for no thread that holds Python's lock (the GIL). False if there is no
// Python; `error` tells why.
bool start_python(std::string* error);

// Run statements in their own namespace, after start_python. This waits for Python's lock, so the caller must hold no
// lock that a thread with Python's lock may wait for. The statements must catch their exceptions.
bool run_python(const std::string& statements, std::string* error);

// Wait for another thread that may need Python's lock: this thread gives the lock up meanwhile, if it holds it.
void without_python(const std::function<void()>& wait);

// Whether there is an interpreter that can be called.
bool python_lives();

}  // namespace ucudnn
#endif
