"""Import hooks that run before or after a module's code, and that fail loudly.

wrapt's post-import hooks come too late for two of our needs: a name that is gone must be
back before speculators imports it, and a hook that raised is dropped, so that the next
import of the module goes through unpatched. Here a hook runs inside the module's own
import: when it raises, the import fails, Python forgets the module, and the next attempt
runs the hook again.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class ImportHooks(MetaPathFinder):
    """Calls back around the import of the modules it watches.

    Args:
        watched: The modules' full names. Others pass through untouched.
        before: Called with the name before the module is loaded.
        after: Called with the name once the module's code has run.
    """

    def __init__(
        self,
        watched: frozenset[str],
        before: Callable[[str], None],
        after: Callable[[str], None],
    ) -> None:
        self._watched = watched
        self._before = before
        self._after = after
        self._searching = threading.local()

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the protocol's signature
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Find the module as if this finder were absent, and hook its loader."""
        if fullname not in self._watched or getattr(self._searching, "name", None) == fullname:
            return None
        self._searching.name = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.name = None
        if spec is None or spec.loader is None:
            return None
        spec.loader = _HookedLoader(spec.loader, self._before, self._after)
        return spec


class _HookedLoader(Loader):
    """Delegates to the module's own loader; everything else about the module stays as it was."""

    def __init__(
        self, loader: Loader, before: Callable[[str], None], after: Callable[[str], None]
    ) -> None:
        self._loader = loader
        self._before = before
        self._after = after

    def __getattr__(self, name: str) -> Any:  # runpy and others ask a loader for more
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Readers of the module's resources or source ask its loader, so it gets its own back.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._before(module.__name__)
        self._loader.exec_module(module)
        self._after(module.__name__)
