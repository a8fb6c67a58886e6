"""Every probe and every plan, over the recorded facts of every release, without any source."""

from __future__ import annotations

import copy
import dataclasses
import json
import re

import pytest

import snapshots
from speculators_vllm_compat import matrix
from speculators_vllm_compat.errors import MatrixError, UnknownFormError
from speculators_vllm_compat.patches import PATCHES
from speculators_vllm_compat.patching import Verdict

CELLS = matrix.load().cells
PAIRS = [(str(cell.speculators), str(cell.vllm.version)) for cell in CELLS]


def test_every_release_has_a_snapshot_and_every_pair_a_cell():
    recorded = {path.stem for path in (snapshots.FOLDER / "vllm").glob("*.json")}
    assert recorded == {str(release.version) for release in matrix.load().releases}
    assert set(PAIRS) == {(s, v) for s in snapshots.SPECULATORS for v in recorded}
    assert len(PAIRS) == len(set(PAIRS)) >= 105


@pytest.mark.parametrize(("speculators", "vllm"), PAIRS)
def test_plan_agrees_with_the_matrix(speculators, vllm):
    """The plan itself reports a patch the matrix does not expect, or expects and does not get."""
    plan = snapshots.plan(speculators, vllm)
    assert plan.cell is not None
    assert not plan.problems
    assert (
        snapshots.verdicts(plan)
        == snapshots.snapshot("vllm", vllm).content["verdicts"][speculators]
    )
    needed = {p.id for p in plan.needed if p.depends_on == "pair"}
    assert needed == plan.cell.patches


def test_probed_is_every_patch_that_the_pair_decides():
    asked = {patch.id for patch in PATCHES if patch.depends_on == "pair"}
    for speculators, vllm in PAIRS:
        assert snapshots.verdicts(snapshots.plan(speculators, vllm)).keys() == asked


@pytest.mark.parametrize("cell", CELLS[:: len(CELLS) // 7], ids=str)
def test_disagreement_is_found_both_ways(cell, monkeypatch):
    """One patch more, and one less, than the probes ask for."""
    for changed in (cell.patches | {"invented"}, cell.patches - {min(cell.patches)}):
        other = dataclasses.replace(cell, patches=changed)
        monkeypatch.setattr(matrix.Matrix, "find", lambda *_, other=other: other)
        [problem] = snapshots.plan(str(cell.speculators), str(cell.vllm.version)).problems
        assert isinstance(problem, MatrixError)
        assert "the matrix expects other patches than the probes ask for" in str(problem)


def facts_of(version: str) -> snapshots.Snapshot:
    """A snapshot of its own, to be changed."""
    found = snapshots.Snapshot("vllm", version)
    found.content = copy.deepcopy(found.content)
    return found


def test_a_changed_fact_is_an_unknown_form():
    vllm = facts_of("0.16.0")
    signature = vllm.content["modules"]["v1.request"]["function Request.__init__"]
    signature["takes"].append("tenant")
    plan = snapshots.plan_over(
        snapshots.snapshot("speculators", "0.4.0.1"), vllm, "0.4.0.1", "0.16.0"
    )
    [problem] = plan.problems
    assert isinstance(problem, UnknownFormError)
    assert re.search(
        r"request_init: vllm/v1/request.py:\d+: found .* requires tenant", str(problem)
    )


def test_a_question_that_was_not_recorded_is_told():
    vllm = facts_of("0.16.0")
    del vllm.content["modules"]["v1.request"]["function Request.__init__"]
    found = snapshots.plan_over(
        snapshots.snapshot("speculators", "0.4.0.1"), vllm, "0.4.0.1", "0.16.0"
    )
    [problem] = found.problems
    assert "request_init" in str(problem)
    assert "python dev.py snapshots" in str(problem)


def test_recording_a_snapshot_gives_it_again():
    """The facts the probes ask are the facts recorded: none is stale, none is superfluous."""
    for vllm in ("0.11.0", "0.16.0", "0.33.0"):
        recorded = snapshots.snapshot("vllm", vllm)
        heard = snapshots.listen(
            vllm,
            recorded,
            {name: snapshots.snapshot("speculators", name) for name in snapshots.SPECULATORS},
        )
        assert heard == {k: recorded.content[k] for k in ("modules", "verdicts")}


def test_written_as_committed():
    for path in sorted(snapshots.FOLDER.glob("*/*.json")):
        assert snapshots.dumps(json.loads(path.read_text())) == path.read_text(), path


def test_no_source_text():
    """Names and numbers only: no fact is longer than an expression in one of our probes."""
    for path in snapshots.FOLDER.glob("*/*.json"):
        for facts in json.loads(path.read_text())["modules"].values():
            for question, answer in (facts or {}).items():
                if isinstance(answer, str) and question != "path":
                    assert re.fullmatch(r"[\w.()='\[\], |-]{0,120}", answer), (
                        path,
                        question,
                        answer,
                    )


def test_comparing_a_release_with_the_one_before(monkeypatch):
    """What a maintainer reads when a release is new; its source is played by a snapshot here."""
    monkeypatch.setattr(snapshots.releases, "package", lambda project, version: (project, version))
    monkeypatch.setattr(snapshots, "SourceTree", lambda root: snapshots.snapshot(*root))
    changes, unknown = snapshots.compare("0.32.0", "0.33.0")
    assert not unknown
    text = "\n".join(changes)
    assert "kv_cache_location: for speculators 0.3.0 not needed in 0.32.0, needed in 0.33.0" in text
    assert "gained cp_kv_cache_interleave_size" in text
    assert snapshots.compare("0.33.0", "0.33.0") == ([], [])


def test_comparing_tells_an_unknown_form(monkeypatch):
    vllm = facts_of("0.33.0")
    vllm.content["modules"]["v1.core.sched.scheduler"]["function Scheduler.schedule"][
        "takes"
    ].append("deadline")
    monkeypatch.setattr(snapshots.releases, "package", lambda project, version: (project, version))
    monkeypatch.setattr(
        snapshots,
        "SourceTree",
        lambda root: vllm if root[0] == "vllm" else snapshots.snapshot(*root),
    )
    changes, unknown = snapshots.compare("0.33.0", "0.34.0")
    assert "generate_loop: vllm/v1/core/sched/scheduler.py" in "\n".join(changes)
    [line] = unknown
    assert line.startswith("generate_loop: vllm/v1/core/sched/scheduler.py:")
    assert "requires deadline" in line


def test_verdicts_are_of_known_forms():
    for path in (snapshots.FOLDER / "vllm").glob("*.json"):
        for found in json.loads(path.read_text())["verdicts"].values():
            assert Verdict.UNKNOWN_FORM.value not in found.values(), path
