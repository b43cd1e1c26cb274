"""The threads of the process: one OpenMP team, shared by torch and by our kernels.

torch runs its own loops and oneDNN's matrix products on the OpenMP runtime that its
wheel brings along. Our kernels run on the very same team: a second pool (numba's, for
one) would put twice as many threads as cores to work, and each of its wake-ups would
fight with the workers of the first, which spin for a while after a product.

A team belongs to the Python thread that starts it, so all steps must run in one thread.

Environment, to be set before the process starts:

- compute: GOMP_SPINCOUNT=4000 lets workers spin for some 50 µs: enough for the gaps
  between the kernels of a step, and no faster if raised to 100,000. The default, seconds,
  keeps waiting threads on the cores that other processes' threads need: with another busy
  process on two cores it made a step ten times slower.
- every other process: OMP_NUM_THREADS=1; they have no arithmetic to share out.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import torch

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_char_p)

_log = logging.getLogger(__name__)


class Team:
    """The threads that run a kernel together.

    A kernel is compiled code of the C type void(int64_t *arguments). The first two
    arguments tell it how to find its place: the address of a function that returns the
    number of the calling thread (0: there is only one), and how many threads there are.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.thread_number = 0  # first argument of a kernel that runs on all threads
        self._fork: Callable[..., None] | None = None
        library = _openmp_library()
        if library is None:
            self.num_threads = 1
            _log.warning("no GNU OpenMP runtime beside torch: kernels run on one thread")
            return
        fork = library.GOMP_parallel
        fork.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
        fork.restype = None
        self._fork = fork
        address = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p).value
        self.thread_number = address or 0

    def run_alone(self, address: int, arguments: bytes) -> None:
        """Run the kernel at `address` on the calling thread."""
        _KERNEL(address)(arguments)

    def run(self, address: int, arguments: bytes) -> None:
        """Run the kernel at `address` on all threads and wait for them."""
        if self._fork is None:
            raise RuntimeError("this team has one thread: call the kernel itself")
        self._fork(address, arguments, self.num_threads, 0)


def configure(num_threads: int) -> None:
    """Set how many threads a step uses. Call once, before the first tensor operation.

    Raises ValueError unless num_threads is at least 1.
    """
    global _team
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, not {num_threads}")
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    _team = Team(num_threads)


def team() -> Team:
    """The configured team; as many threads as torch uses if nobody has configured one."""
    global _team
    if _team is None:
        _team = Team(torch.get_num_threads())
    return _team


_team: Team | None = None


def _openmp_library() -> ctypes.CDLL | None:
    """The runtime torch has loaded. A copy of another origin would start its own threads."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        return ctypes.CDLL(str(path))
    return None
