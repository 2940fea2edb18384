"""Huge pages for large results.

On Linux a large new tensor is freshly mapped memory, and its first use costs a page fault every 4 KiB: often more time than it
takes to compute the content. The system maps pages of 2 MiB where madvise asks for them.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from torch import Tensor

_PAGE = 4096
_MIN_BYTES = 2**22  # below this the system call costs more than it saves
_MADV_HUGEPAGE = 14


def advise_huge_pages(x: Tensor) -> Tensor:
    """Ask for huge pages under `x`, just allocated and not yet written to; returns `x`."""
    if type(x) is Tensor and x.device.type == "cpu" and x.nbytes >= _MIN_BYTES and (madvise := _madvise()) is not None:
        start = -(-x.data_ptr() // _PAGE) * _PAGE
        end = (x.data_ptr() + x.nbytes) // _PAGE * _PAGE
        madvise(start, end - start, _MADV_HUGEPAGE)  # only advice: the result does not matter
    return x


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
