"""cuDNN's C functions, enums and descriptors, through ctypes."""
