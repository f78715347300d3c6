"""cuDNN's C functions, enumerations and descriptors, through ctypes."""
