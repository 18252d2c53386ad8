"""One range of host memory: that of an engine for chunks, or of a node server and its clients.

Contracts
---------
* Without ``lazy`` all memory is there when the constructor returns, or it has raised. On a system
  that overcommits, memory that was only requested would get some process killed later.
* Memory that is ``shared`` has a file descriptor, which another process gets over a Unix socket. It
  can map the memory for reading only, and neither process can change its length: the file is
  sealed. The file has no name, so the memory is gone with the last process that has it.
* Memory of another process is mapped for reading only, and only if its length can never change: a
  process that reads a file after it was cut short is killed by SIGBUS.
* Forked processes inherit neither page-locked nor shared memory.
* A GPU copies no object that lies across one of :attr:`Arena.borders`, where its memory is
  page-locked.
* Ordinary memory is freed with the last view or tensor of it, page-locked memory once
  :meth:`Arena.close` is called, which must not happen while a GPU copies from or to it.
* Any thread may call all methods.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.memory.pages import (
    address_of,
    lockable,
    map_pages,  # noqa: TID251
    page_lock,
    populate,
    require_free,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

#: ``F_SEAL_FUTURE_WRITE`` of Linux 5.1, which Python has no name for.
_SEAL_FUTURE_WRITE: Final = 0x10
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: ``statfs.f_type`` of shared memory that is no hugetlbfs.
_TMPFS: Final = 0x01021994


class Arena:
    """One range of host memory.

    Parameters
    ----------
    nbytes : int
    shared : bool
        Other processes can map it, see :attr:`fd`.
    lazy : bool
        The system gives each page when it is first written to; free memory is not checked.
    inherited : bool
        Processes that are forked from this one have it as well. Shared memory never is.

    Attributes
    ----------
    nbytes : int
    borders : range
        Where pieces begin that are page-locked by themselves, but the first one.
    view : memoryview
        The bytes, writable unless they are another process's. They start at a multiple of 4096, and
        of 2 MiB unless shared.
    fd : int or None
        Descriptor of shared memory, open until :meth:`close`.

    Raises
    ------
    ConfigError
        If there is not so much free memory and a sixteenth more, or the arguments contradict
        themselves.
    UnsupportedError
        If the system knows no sealed shared memory (Linux before 5.1).

    Examples
    --------
    >>> arena = Arena(1 << 20)
    >>> arena.view[:5] = b"bytes"
    >>> arena.tensor[:5].tolist()
    [98, 121, 116, 101, 115]
    >>> arena.close()
    """

    def __init__(
        self,
        nbytes: int,
        *,
        shared: bool = False,
        lazy: bool = False,
        inherited: bool = True,
    ) -> None:
        if nbytes < 1:
            raise ConfigError(f"an arena of {nbytes} bytes was requested; expected at least 1")
        self._begin(nbytes)
        try:
            self.view = self._map(shared=shared, lazy=lazy, inherited=inherited)
        except (OSError, MemoryError) as error:
            self.close()
            raise ConfigError(
                f"there is no memory for an arena of {nbytes} bytes: {error}. Ask for less"
                " (memory of an engine, memory_bytes of a ChunkCache, --memory of"
                " `kvshelf serve`), or give the machine or the container more memory"
            ) from error
        except BaseException:
            self.close()
            raise

    def _begin(self, nbytes: int) -> None:
        self.nbytes = nbytes
        piece = lockable(nbytes)
        self.borders = range(piece, nbytes, piece)
        self.fd: int | None = None
        self.view = memoryview(b"")
        self._unlocks: list[Callable[[], None]] = []

    @classmethod
    def of(cls, fd: int, nbytes: int) -> Arena:
        """Map the shared memory of another process for reading.

        Parameters
        ----------
        fd : int
            The caller closes it.
        nbytes : int
            The size that the other process has announced.

        Returns
        -------
        Arena
            Its :attr:`view` is read-only.

        Raises
        ------
        ValueError
            If it is no memory, or its size is another one or can change.
        OSError
            If the system does not map it.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            raise ValueError("the descriptor that was passed is no shared memory (memfd)") from None
        if seals & _SIZE_SEALS != _SIZE_SEALS:
            raise ValueError(
                "the shared memory that was passed is not sealed against changes of its size"
            )
        if _filesystem(fd) != _TMPFS:
            # The system may have no huge page left when one is first read: SIGBUS.
            raise ValueError("the shared memory that was passed has huge pages of hugetlbfs")
        size = os.fstat(fd).st_size
        if size != nbytes or nbytes < 1:
            raise ValueError(f"the shared memory that was passed has {size} bytes, not {nbytes}")
        arena = cls.__new__(cls)
        arena._begin(nbytes)
        arena.view = memoryview(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        return arena

    def __repr__(self) -> str:
        return f"Arena({self.nbytes} bytes{', shared' if self.fd is not None else ''})"

    @cached_property
    def tensor(self) -> Tensor:
        """The bytes as a uint8 tensor of shape ``[nbytes]``."""
        import torch

        # vLLM's step runs under inference_mode. Other threads cannot write to tensors that are
        # created there.
        with torch.inference_mode(False):
            return torch.frombuffer(self.view, dtype=torch.uint8)

    def take(self, start: int, stop: int, device: torch.device | None = None) -> None:
        """Have the bytes ``[start, stop)`` of lazy memory from now on.

        Parameters
        ----------
        start, stop : int
        device : torch.device, optional
            A GPU for which they are page-locked too, until :meth:`close`.

        Raises
        ------
        MemoryError
            If there is not so much free memory and a sixteenth more.
        RuntimeError
            If CUDA cannot page-lock them.
        """
        piece = self.view[start:stop]
        populate(piece)
        if device is not None:
            self._unlocks.append(page_lock(piece, device))

    def offset_of(self, buffer: memoryview) -> int | None:
        """Return where bytes lie in the memory; None if they do not lie there whole."""
        if not self.view:
            return None
        start = address_of(buffer) - address_of(self.view)
        return start if 0 <= start <= self.nbytes - buffer.nbytes else None

    def close(self) -> None:
        """End page-locking, close the descriptor and drop the memory. Idempotent."""
        self.view = memoryview(b"")
        self.__dict__.pop("tensor", None)
        while self._unlocks:
            self._unlocks.pop()()
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def _map(self, *, shared: bool, lazy: bool, inherited: bool) -> memoryview:
        if not lazy:
            # Checked before the mapping: the system's own refusal does not say what is free.
            require_free(self.nbytes)
        if shared:
            self.fd = os.memfd_create("kvshelf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        # After a fork, the first process that writes to a private page gets a copy of it, and a
        # GPU would continue with the other one. To shared pages both would write.
        view = map_pages(self.nbytes, fd=self.fd, inherited=inherited and not shared)
        if self.fd is not None:
            try:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
            except OSError as error:
                raise UnsupportedError(
                    f"the system cannot seal shared memory against writers ({error}); it takes"
                    " Linux 5.1 or newer"
                ) from error
        if not lazy:
            populate(view)
        return view


def _filesystem(fd: int) -> int:
    """Return the type of the filesystem of an open file (``statfs.f_type``)."""
    buffer = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).fstatfs(fd, buffer):
        return 0
    return ctypes.c_long.from_buffer(buffer).value


def copy_bytes(into: memoryview, source: bytes | bytearray | memoryview) -> None:
    """Copy bytes to memory of the same length, without the GIL meanwhile."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def bytes_at(view: memoryview) -> torch.Tensor:
    """Return bytes as a tensor, uint8 [bytes], that does not keep their memory alive.

    `view` may be read-only: the caller must not write to the tensor then.
    """
    import torch

    # torch.frombuffer warns of read-only memory, and its tensors would keep a mapping open.
    array = np.frombuffer(view, np.uint8)
    address = array.__array_interface__["data"][0]
    # vLLM's step runs under inference_mode. Other threads cannot write to tensors that are created
    # there.
    with torch.inference_mode(False):
        return torch.frombuffer(
            (ctypes.c_uint8 * array.size).from_address(address), dtype=torch.uint8
        )
