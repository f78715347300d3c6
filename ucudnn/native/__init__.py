"""For C++ programs: `UcudnnHandle_t`, a handle type that replaces cudnnHandle_t and is planned by this package.

`include/ucudnn.hpp` declares it, `src/` implements it, and `python -m ucudnn.native` prints the flags for a build. The
C++ side starts Python unless it runs, asks it once for each convolution, and executes the answer itself.
"""
