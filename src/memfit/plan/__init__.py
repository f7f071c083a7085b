"""The planner: search over what the strategies offer, and the reasons for what it chose.

The room has the name of the call that people know, ``memfit.plan(...)``: the package itself can be called and hands
the call to :func:`memfit.api.plan`, however it came to be imported.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _CallableRoom(types.ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """See :func:`memfit.api.plan`."""
        return importlib.import_module("memfit.api").plan(*arguments, **options)


sys.modules[__name__].__class__ = _CallableRoom
