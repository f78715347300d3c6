"""A Python process whose two threads make the first two handles: one waits for Python's lock, the other one has it.

Arguments: the two libraries, and for how many milliseconds the first thread is ahead.
"""

import ctypes
import sys
from threading import Event, Thread

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
gives_up = ctypes.CDLL(sys.argv[2])  # its functions are called without Python's lock
keeps = ctypes.PyDLL(sys.argv[2])  # with it, as an extension module may call them
libc = ctypes.PyDLL(None)
sys.setswitchinterval(100)  # the main thread gives the lock up only where it says so

handles = [ctypes.c_void_p(), ctypes.c_void_p()]
status = [-1, -1]
begins = Event()


def first():
    begins.set()
    status[0] = gives_up.ucudnn_create(ctypes.byref(handles[0]))


thread = Thread(target=first)
thread.start()
begins.wait()
ahead = int(sys.argv[3])
if ahead:
    thread.join(ahead / 1000)  # without the lock, so that the first thread gets on
libc.usleep(200_000)  # with the lock, so that the first thread comes to wait for it
status[1] = keeps.ucudnn_create(ctypes.byref(handles[1]))
thread.join()
assert status == [0, 0]
assert "ucudnn.native.bridge" in sys.modules
for handle in handles:
    assert gives_up.ucudnn_destroy(handle) == 0
sys.stdout.write("computed\n")
