"""The mechanisms by hand, each usable in anybody's own loop."""

from lockstep.parallel.data_parallel import DataParallel
from lockstep.parallel.local_sgd import LocalSGD

__all__ = ["DataParallel", "LocalSGD"]
