"""Large pages for large results.

On Linux a large tensor is freshly mapped memory, and touching it first costs a page fault every 4 KiB: more than many a
mechanism takes to compute it. The kernel gives pages of 2 MiB to those who ask.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from torch import Tensor

from subquad.ops import native

_PAGE = 4096
_LEAST = 2**22  # bytes from which it pays
_MADV_HUGEPAGE = 14


def large_pages(x: Tensor) -> Tensor:
    """`x`, just allocated and not written to yet."""
    if native.is_plain(x) and x.nbytes >= _LEAST and (madvise := _madvise()) is not None:
        start = -(-x.data_ptr() // _PAGE) * _PAGE
        end = (x.data_ptr() + x.nbytes) // _PAGE * _PAGE
        madvise(start, end - start, _MADV_HUGEPAGE)  # a wish: whether it was granted does not matter
    return x


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
