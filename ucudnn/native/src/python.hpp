// A Python interpreter for this process: the running one, or an embedded one. It is loaded at run time, not linked.
#ifndef UCUDNN_PYTHON_HPP_
#define UCUDNN_PYTHON_HPP_

#include <string>

namespace ucudnn {

// Run statements in their own namespace, and start Python first if it does not run. False if there is no Python;
// `error` tells why. The statements must catch their exceptions.
bool run_python(const std::string& statements, std::string* error);

// Whether there is an interpreter that can be called.
bool python_lives();

}  // namespace ucudnn
#endif
