"""Makes `dist.init_process_group("shm")` work after `import lockstep`, without importing torch for it.

Importing torch takes seconds, and `lockstep --help` should not; so if torch.distributed is not there yet, we ask
Python's import system for a callback.
"""

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WAITED_FOR = "torch.distributed"


def register_shm() -> None:
    """Now if torch.distributed is imported, else right after it is."""
    if WAITED_FOR in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    """Registers the backend as soon as torch.distributed has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != WAITED_FOR:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    dist = sys.modules[WAITED_FOR]
    if sys.platform == "linux" and dist.is_available() and not hasattr(dist.Backend, "SHM"):
        dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any = None) -> Any:
    from lockstep.comm.shm.group import ShmGroup  # imports torch

    return ShmGroup(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)
