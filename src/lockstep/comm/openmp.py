"""How many threads torch's loops use on the calling thread."""

import ctypes
import re
from pathlib import Path

import torch


def use_one_thread_here() -> None:
    """On this thread only, let torch's loops run alone.

    A loop over a large tensor is shared out among a team of OpenMP threads, and each calling thread has a team of its
    own. A thread that works beside the main one would thus double the threads, all spinning at the end of each loop,
    and slow the main one down by far more than it gains. (`torch.set_num_threads` is not for one thread alone.)
    """
    torch.get_num_threads()  # a new thread takes over torch's number at its first question; ours must come after
    maps = Path("/proc/self/maps")
    libraries = set(re.findall(r"(/\S*lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps.read_text() if maps.exists() else ""))
    for library in libraries:
        ctypes.CDLL(library).omp_set_num_threads(1)
