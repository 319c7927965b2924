"""Python runs this before anything else in every process of a command that `lockstep judge` watches: its folder is the
first of PYTHONPATH. It makes the watcher begin when torch has been imported, and changes nothing else; only where ranks
are to share a GPU (`--share-gpu`) does each become its own host to NCCL, and take the first GPU.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Torch(importlib.abc.MetaPathFinder):
    """Finds torch as it would be found without us, and has the watcher started behind its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(self, spec.loader)
        return spec


class Loader(importlib.abc.Loader):
    """Torch's own, and then the watcher."""

    def __init__(self, finder: Torch, inner: Any) -> None:
        self.finder, self.inner = finder, inner

    def create_module(self, spec: Any) -> Any:
        return self.inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        sys.meta_path.remove(self.finder)
        module.__spec__.loader = module.__loader__ = self.inner
        self.inner.exec_module(module)
        importlib.import_module("lockstep.judge.watcher").begin(Path(os.environ["LOCKSTEP_JUDGE"]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class OursToo(importlib.abc.MetaPathFinder):
    """Finds this package where the script's Python does not have it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "lockstep":
            return None
        package = HERE.parents[1]
        return importlib.util.spec_from_file_location(
            name, package / "__init__.py", submodule_search_locations=[str(package)]
        )


def _go_on() -> None:
    """With the sitecustomize that Python would have run."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").absolute() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        theirs = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(theirs)


if os.environ.get("LOCKSTEP_JUDGE_SHARES_GPU"):
    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    if "LOCAL_RANK" in os.environ:  # by which scripts choose their device
        os.environ["LOCAL_RANK"] = "0"
if os.environ.get("LOCKSTEP_JUDGE"):
    sys.meta_path.insert(0, Torch())
    sys.meta_path.append(OursToo())
_go_on()
