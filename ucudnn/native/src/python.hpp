// A Python interpreter for this process: the one that runs already, or an embedded one. Nothing of it is linked.
#ifndef UCUDNN_PYTHON_HPP_
#define UCUDNN_PYTHON_HPP_

#include <string>

namespace ucudnn {

// Run statements in a namespace of their own, starting Python first where it does not run.
// False where there is no Python; `error` says why. What the statements raise, they have to catch.
bool run_python(const std::string& statements, std::string* error);

// Whether there is an interpreter that can still be called.
bool python_lives();

}  // namespace ucudnn
#endif
