"""How many threads torch's CPU loops use on the calling thread."""

import ctypes
import re
from pathlib import Path

import torch


def use_one_thread_here() -> None:
    """On the calling thread only, run torch's CPU loops single-threaded.

    A loop over a large tensor is split over a team of OpenMP threads, and each calling thread has its own team. So a
    second thread beside the main one would double the number of threads, which all spin at the end of each loop, and
    slow the main one down by far more than it gains. (`torch.set_num_threads` cannot be set for one thread only.)
    """
    torch.get_num_threads()  # the first call on a new thread applies torch's number; ours must come after it
    maps = Path("/proc/self/maps")
    libraries = set(re.findall(r"(/\S*lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps.read_text() if maps.exists() else ""))
    for library in libraries:
        ctypes.CDLL(library).omp_set_num_threads(1)
