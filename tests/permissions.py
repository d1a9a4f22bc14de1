"""Permissions of files for tests that run as root, who may otherwise read and write everything."""

import ctypes
import os
import sys
import tempfile
from pathlib import Path

_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION_3 = 0x20080522


def obey_permissions() -> None:
    """Make this process and its children obey the permissions of files, even as root. Does nothing except on Linux."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted and inheritable capabilities 0 to 31, and the same for 32 to 63.
    capabilities = (ctypes.c_uint32 * 6)()
    libc.capget(header, capabilities)
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        # Programs that root starts have all capabilities of the bounding set.
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        for index in range(3):
            capabilities[index] &= ~(1 << capability)
    libc.capset(header, capabilities)


def ignores_permissions() -> bool:
    """Return whether this process may write into a folder without permissions."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0)
        is_allowed = os.access(folder, os.W_OK)
        Path(folder).chmod(0o700)
        return is_allowed
