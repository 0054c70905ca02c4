"""Work that waits for a module of torch: done when a program imports that module, at once if it has, never otherwise.

``torch.utils.flop_counter`` and ``torch.distributed.tensor`` take up to seconds to import, and few programs use them,
so what flash_ext adds to them must not import them. Called by ``flash_ext/__init__.py``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Loader(Loader):
    """The module's own loader, and the work when it is done."""

    def __init__(self, loader: Any, work: Callable[[], None]) -> None:
        self._loader, self._work = loader, work

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Who looks at the module finds its own loader.
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._work()


class _Finder(MetaPathFinder):
    """Finds nothing itself: asks the others for the modules that are waited for."""

    def __init__(self) -> None:
        self.work: dict[str, Callable[[], None]] = {}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        work = self.work.get(name)
        if work is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, work)
                return spec
        return None


# A finder of an earlier import of this package would be asked, and ask this one, without end.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != __name__]
_finder = _Finder()


def when_imported(name: str, work: Callable[[], None]) -> None:
    """Calls ``work`` after module ``name`` was imported, each time it is; a second call replaces the first one's work.

    ``work`` finds the module complete and may import it.
    """
    _finder.work[name] = work
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if name in sys.modules:
        importlib.import_module(name)  # waits where another thread is importing it
        work()
