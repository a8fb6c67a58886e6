"""transformers 5: PreTrainedConfig is annotated with torch, a name its module does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..patching import Finding, Ledger, Patch, Sources
from ..probing import at, needed, not_needed, unknown

if TYPE_CHECKING:
    from types import ModuleType


def probe(sources: Sources) -> Finding:
    module = sources.transformers.module("configuration_utils") if sources.transformers else None
    if module is None:
        return unknown("no transformers", "transformers/configuration_utils.py", "transformers")
    name = next((n for n in ("PreTrainedConfig", "PretrainedConfig") if module.line(n)), "")
    if not name:
        return unknown("no PreTrainedConfig", str(module.path), "a class PreTrainedConfig")
    where = at(module, module.line(name))
    if not module.annotated_with(name, "torch"):
        return not_needed(f"{name} has no field annotated with torch", where)
    if module.binds("torch"):
        return not_needed("the module holds the name torch", where)
    return needed(f"{name} is annotated with torch, which the module does not hold", where)


def apply(module: ModuleType, ledger: Ledger) -> None:
    import torch

    if "torch" not in vars(module):
        ledger.add(module, "torch", torch)


PATCH = Patch(
    id="pretrained_config_torch",
    summary="Puts the name torch into transformers.configuration_utils.",
    why="From transformers 5 pydantic resolves the annotations of PreTrainedConfig when "
    "speculators subclasses it: PydanticUndefinedAnnotation: name 'torch' is not defined.",
    upstream="transformers/configuration_utils.py, 5.0",
    process="both",
    probe=probe,
    target="transformers.configuration_utils",
    imports=("torch",),
    apply=apply,
    depends_on="environment",
    removable="when speculators no longer mixes pydantic models with PreTrainedConfig",
)
