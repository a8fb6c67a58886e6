"""Whether a callable takes an argument."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a callable takes a keyword; one that does not tell is assumed to."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a callable that does not tell, such as a builtin
        return True
    kinds = {parameter.kind for parameter in parameters.values()}
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds
