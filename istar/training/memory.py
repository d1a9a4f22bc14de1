"""Memory of a training on the CPU."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGE = 2**30


def keep_freed_memory() -> bool:
    """Let the allocator hand out again what was freed, instead of returning it to the system and asking for new pages.

    Left alone, glibc does that for every large tensor, and the system clears the pages each time: a tenth of a step in
    bfloat16. The peak stays what it is; memory is held until the process ends.

    Returns:
        Whether there is such an allocator.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
