"""Compile the kernels for GPUs with NVRTC, where no CUDA compiler is installed.

NVRTC is the device half of nvcc as a library, and comes from a package index; so does
``fatbinary``, which joins machine code for several devices, and PTX, into one file. CMake builds
that file into the library (``KVSHELF_FATBIN`` in ``cuda/CMakeLists.txt``).
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

MACHINE_CODE = (75, 80, 90, 100)
PTX = 100
#: The same in CMake's notation.
ARCHITECTURES = "75-real;80-real;90-real;100"

# NVRTC has no headers of C++; the kernels need one.
CSTDINT = b"""
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
#define INT32_MAX 2147483647
#define UINT32_MAX 4294967295U
"""


class Nvrtc:
    """NVRTC, loaded from a file.

    Parameters
    ----------
    library : Path
        ``libnvrtc.so.12``; its builtins lie beside it.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, source: Path, include: Path, architecture: str, kind: str) -> bytes:
        """Compile one file.

        Parameters
        ----------
        source, include : Path
            The file, and the folder of its headers.
        architecture : str
            ``sm_90`` or ``compute_90``.
        kind : str
            ``CUBIN`` or ``PTX``.

        Raises
        ------
        SystemExit
            With the compiler's messages, if it fails, or if a kernel spills registers.
        """
        program = ctypes.c_void_p()
        options = [
            f"--gpu-architecture={architecture}".encode(),
            b"--std=c++17",
            # The headers also hold functions for the host, which no kernel calls.
            b"--device-as-default-execution-space",
            f"--include-path={include}".encode(),
            b"--ptxas-options=-v",
        ]
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.read_bytes(),
            source.name.encode(),
            1,
            (ctypes.c_char_p * 1)(CSTDINT),
            (ctypes.c_char_p * 1)(b"cstdint"),
        )
        failed = self._library.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        log = self._get(program, "ProgramLog").decode()
        spilled = re.search(r"[1-9]\d* bytes (stack frame|spill)", log)
        if failed or spilled:
            raise SystemExit(f"{source.name} for {architecture}:\n{log}")
        result = self._get(program, kind)
        self._call("nvrtcDestroyProgram", ctypes.byref(program))
        return result

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        error = getattr(self._library, function)(*arguments)
        if error:
            raise SystemExit(f"{function}: {self._library.nvrtcGetErrorString(error).decode()}")


def build(cuda: Path, packages: Path, folder: Path) -> tuple[Path, list[str]]:
    """Compile the kernels.

    Parameters
    ----------
    cuda : Path
        The folder ``cuda`` of the sources.
    packages : Path
        Where NVRTC and fatbinary are installed: the folder that holds ``nvidia``.
    folder : Path
        Where to write.

    Returns
    -------
    tuple[Path, list[str]]
        The fat binary, and the names of the kernels in it.
    """
    nvrtc = Nvrtc(packages / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    source, include = cuda / "src/copy_kernel.cu", cuda / "include"
    images = []
    for number in MACHINE_CODE:
        image = folder / f"sm_{number}.cubin"
        image.write_bytes(nvrtc.compile(source, include, f"sm_{number}", "CUBIN"))
        images.append(f"--image3=kind=elf,sm={number},file={image}")
    ptx = nvrtc.compile(source, include, f"compute_{PTX}", "PTX").rstrip(b"\0")
    image = folder / f"compute_{PTX}.ptx"
    image.write_bytes(ptx)
    images.append(f"--image3=kind=ptx,sm={PTX},file={image}")

    joined = folder / "kernels.fatbin"
    fatbinary = packages / "nvidia/cu13/bin/fatbinary"
    # Not compressed: drivers older than the tool do not know its compression.
    subprocess.run(
        [fatbinary, "--64", "--compress-mode=none", f"--create={joined}", *images], check=True
    )
    return joined, re.findall(r"\.entry (\w+)", ptx.decode())
