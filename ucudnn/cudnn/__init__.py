"""A replacement for `cupy.cuda.cudnn` of CuPy 13 that computes convolutions in micro-batches.

    from ucudnn import cudnn  # instead of: from cupy.cuda import cudnn

Names, orders of arguments, keywords and constants are those of CuPy 13. Addresses of descriptors, of GPU memory and of
host scalars are ints. `create` returns a cudnnHandle_t with a μ-cuDNN handle behind it. μ-cuDNN answers find..., get...
and convolution... for that handle, and cuDNN answers all other functions. The convolutions of `cupyx.cudnn` on CuPy
arrays are part of the package too. Only `adopt` and `report` are not CuPy's: `adopt` takes a
`ucudnn.Handle` with its own limit and policy, and `report` returns what was computed, and how.

The import loads neither cuDNN nor CuPy; the first call does.
"""
# ruff: noqa: F403  # the __all__ of each module lists its public names; those of constants are all public

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

if not _TYPE_CHECKING:  # otherwise type checkers would accept every name

    def __getattr__(name: str) -> _NoReturn:
        raise AttributeError(_explain(name))
