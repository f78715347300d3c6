"""C++ programs: `UcudnnHandle_t`, a handle type in the place of cudnnHandle_t, planned by this package.

`include/ucudnn.hpp` declares it, `src/` has what executes, `python -m ucudnn.native` tells a build what it needs. The
C++ side starts Python, or finds it running, asks it once for each convolution, and executes the answer by itself.
"""
