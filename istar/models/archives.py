"""Reads what `torch.save` wrote, without executing anything in it."""

import zipfile
from pathlib import Path
from typing import Any


def load_archive(path: Path, mmap: bool = False) -> Any:
    """Return the plain data and tensors, on the CPU, of a file that `torch.save` wrote; verify its checksums.

    With `mmap`, tensors are read from the file when they are used, and checksums are not verified. Compressed files are
    refused, because torch never writes them: a few kilobytes could fill the memory, and `mmap` would return other
    numbers. For a file that is damaged or contains anything else, zipfile or torch raises an exception of any type.
    """
    import torch  # takes seconds to import, and comparisons of measured models do without it

    with zipfile.ZipFile(path) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise zipfile.BadZipFile("its content is compressed")
        if not mmap and (damaged_member := archive.testzip()):
            raise zipfile.BadZipFile(f"the checksum of {damaged_member} is wrong")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
