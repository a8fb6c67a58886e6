"""The catalogue of patches is complete and consistent."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from speculators_vllm_compat.activation import _WATCHED
from speculators_vllm_compat.patches import PATCHES

TESTS = Path(__file__).resolve().parents[1] / "boundaries"
BY_ID = {patch.id: patch for patch in PATCHES}


def test_ids_are_unique_and_every_module_is_listed():
    assert len(BY_ID) == len(PATCHES)
    folder = Path(import_module("speculators_vllm_compat.patches").__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert modules == set(BY_ID)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_declaration(patch):
    module = import_module(f"speculators_vllm_compat.patches.{patch.id}")
    assert module.PATCH is patch
    assert module.__doc__
    for text in (patch.summary, patch.why, patch.upstream, patch.removable):
        assert len(text) > 3
    assert patch.process in {"driver", "worker", "both"}
    if patch.part_of:
        assert BY_ID[patch.part_of].apply is not None
        assert (patch.apply, patch.target) == (None, "")
    elif patch.id == "imported_names":  # which adapts nothing, and only tells
        assert (patch.apply, patch.target) == (None, "")
    else:
        assert patch.apply is not None
        assert patch.target in _WATCHED
    assert (TESTS / f"test_{patch.id}.py").is_file()
