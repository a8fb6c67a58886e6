"""The catalogue of patches: what its entries refer to is there."""

from __future__ import annotations

import re

import pytest

from speculators_vllm_compat import activation, matrix
from speculators_vllm_compat.patches import PATCHES
from speculators_vllm_compat.patching import CUSTOM_WORKER, GENERATOR

_IDS = [patch.id for patch in PATCHES]


def test_every_watched_module_is_a_target_or_the_root():
    targets = {patch.target for patch in PATCHES if patch.target}
    assert targets | {"speculators", GENERATOR, CUSTOM_WORKER} == activation._WATCHED


@pytest.mark.parametrize("patch", PATCHES, ids=_IDS)
def test_texts(patch):
    assert re.fullmatch(r"[a-z][a-z0-9_]*", patch.id)
    assert not re.search(r"\d+_\d+", patch.id), "named after the API, never after a version"
    assert patch.summary.endswith(".")
    assert "\n" not in patch.summary
    assert patch.depends_on in {"pair", "environment"}
    for text in (patch.summary, patch.why, patch.upstream, patch.removable):
        assert text.strip() == text
        assert "  " not in text
        assert text


@pytest.mark.parametrize("patch", [p for p in PATCHES if p.part_of], ids=lambda patch: patch.id)
def test_a_carried_out_patch_names_one_that_is_applied(patch):
    carriers = [carrier for carrier in PATCHES if carrier.id == patch.part_of]
    assert len(carriers) == 1
    assert carriers[0].apply is not None
    assert not carriers[0].part_of
    assert (patch.apply, patch.target) == (None, "")


def test_the_matrix_lists_only_patches_the_pair_decides_on():
    by_pair = {patch.id for patch in PATCHES if patch.depends_on == "pair"}
    for cell in matrix.load().cells:
        assert cell.patches <= by_pair
        # Whoever is carried out needs its carrier.
        carriers = {p.part_of for p in PATCHES if p.part_of and p.id in cell.patches}
        assert carriers <= cell.patches


def test_what_must_run_first_comes_first():
    """An earlier wrapper is the inner one, so its own part behind the call runs earlier."""
    assert _IDS.index("none_hash") < _IDS.index("block_hasher")
    assert _IDS.index("hashing_location") < _IDS.index("none_hash")
