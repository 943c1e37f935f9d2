"""Host copies of tensors: in memory, or in files of a directory on the host."""

from __future__ import annotations

import os
import tempfile

import torch
from torch import Tensor

from torchrl_ext.errors import StoreError

__all__ = ["HostCopies"]


class HostCopies:
    """Makes copies that live as long as their tensors.

    A file loses its name as soon as it is mapped: the filesystem takes it back when the last process that maps it ends,
    however it ends, so that nothing is left behind and nothing old is ever read.

    Args:
        folder: a directory on a local disk, made where there is none; None keeps copies in memory.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor on the host, of any dtype.

        Raises:
            StoreError: the directory cannot be written to, or has no room.
        """
        if self._folder is None or not tensor.nbytes:
            return tensor.to("cpu", copy=True)
        try:
            os.makedirs(self._folder, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".torchrl-ext-") as file:
                os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a full disk says so here, and not by a signal
                raw = torch.from_file(file.name, shared=True, size=tensor.nbytes, dtype=torch.uint8)
        except OSError as error:
            raise StoreError(
                f"{self._folder} cannot take a copy of {tensor.nbytes} bytes: {error}",
                state="the engine serves what it served",
                hint="give local_dir a directory on a local disk with room for the model, or leave it out",
            ) from error
        copied = raw.view(tensor.dtype).view(tensor.shape)
        copied.copy_(tensor)
        return copied
