"""A drop-in for `cupy.cuda.cudnn` as CuPy 13 had it, whose convolutions go in micro-batches.

    from ucudnn import cudnn  # instead of: from cupy.cuda import cudnn

Names, orders of arguments, keywords and constants are those of CuPy 13; addresses of descriptors, of memory on the
GPU and of host scalars are ints. `create` gives a cudnnHandle_t with a μ-cuDNN handle behind it: find..., get... and
convolution... of that handle are μ-cuDNN's, everything else is cuDNN's. The convolutions of `cupyx.cudnn` on CuPy
arrays are here as well. `adopt` is ours: it takes a `ucudnn.Handle` with a limit and policy of its own.

Importing this loads neither cuDNN nor CuPy: that is left to the first call.
"""
# ruff: noqa: F403  # each module lists in __all__ what it gives to this menu; constants are plain numbers

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import NoReturn as _NoReturn

from ucudnn.cudnn.algorithms import *
from ucudnn.cudnn.constants import *
from ucudnn.cudnn.convolution import *
from ucudnn.cudnn.cupyx_descriptors import *
from ucudnn.cudnn.cupyx_functions import *
from ucudnn.cudnn.descriptors import *
from ucudnn.cudnn.handles import *
from ucudnn.cudnn.loading import *
from ucudnn.cudnn.missing import explain as _explain
from ucudnn.cudnn.passthrough import *

if not _TYPE_CHECKING:  # type checkers shall find out what is missing

    def __getattr__(name: str) -> _NoReturn:
        raise AttributeError(_explain(name))
