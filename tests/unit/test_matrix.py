"""compat_matrix.yaml: the real one is valid, and an invalid one says where and why."""

from __future__ import annotations

import pytest
from packaging.version import Version

from speculators_vllm_compat import matrix
from speculators_vllm_compat.errors import MatrixError
from speculators_vllm_compat.patches import PATCHES

VALID = """
schema: 1
releases:
  - version: "0.16.0"
    versions: ">=0.16.0.dev0,<0.17.0.dev0"
    torch: "2.10.0"
    transformers: ">=4.56.0,<5"
    python: ">=3.10"
    environment: ["torch==2.10.0"]
cells:
  - speculators: "0.3.0"
    vllm: "0.16.0"
    patches: [request_init]
    verified:
      - date: "2026-01-01"
        device: "cpu"
        largest_difference: 6.0e-6
        cases: 3
        evidence: "evidence/a.json"
"""


def parse(text: str) -> matrix.Matrix:
    return matrix.parse(text, "m.yaml", {"request_init"})


def test_the_real_one_is_valid_and_complete():
    real = matrix.load()
    pairs = {(str(c.speculators), str(c.vllm.version)) for c in real.cells}
    expected = {(s, v) for s in ("0.3.0", "0.4.0", "0.4.0.1") for v in ("0.16.0", "0.29.0")}
    assert expected <= pairs
    listed = {p.id for p in PATCHES if p.depends_on == "pair"}
    assert {patch for cell in real.cells for patch in cell.patches} <= listed


def test_a_valid_one():
    [cell] = parse(VALID).cells
    assert (cell.word, cell.patches, cell.verified[0].cases) == ("verified", {"request_init"}, 3)
    [cell] = parse(VALID.split("    verified:")[0] + "    verified: []\n").cells
    assert cell.word == "unverified"


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0.16.0", True),
        ("0.16.0.dev0", True),
        ("0.16.0rc1.dev5+g123", True),
        ("0.16.0rc2", True),
        ("0.16.0+cu129", True),
        ("0.16.0.post1", True),
        ("0.16.1.dev3", True),
        ("0.16.9", True),
        ("0.17.0.dev1", False),
        ("0.17.0rc1", False),
        ("0.17.0", False),
        ("0.15.1", False),
        ("0.15.2.dev4+gabc", False),
        ("1.16.0", False),
    ],
)
def test_which_versions_belong_to_a_release(version, found):
    cell = parse(VALID).find(Version("0.3.0"), Version(version))
    assert (cell is not None) is found


def test_versions_that_are_none_are_in_no_cell():
    parsed = parse(VALID)
    assert parsed.find(None, Version("0.16.0")) is None
    assert parsed.find(Version("0.3.0"), None) is None
    assert parsed.find(Version("0.4.0"), Version("0.16.0")) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema: 1", "schema: 2", "schema: expected 1, found 2"),
        ("schema: 1", "", "the file: expected the keys"),
        ("schema: 1", "schema: 1\nmore: 1", "the file: expected the keys"),
        ("schema: 1", "schema: [", "is not YAML"),
        ('version: "0.16.0"', 'version: "zero"', r"releases\[0\].version: expected a PEP 440"),
        ('version: "0.16.0"', "version: 0.16", r"releases\[0\].version: expected a text in quotes"),
        (">=0.16.0.dev0,<0.17.0.dev0", "=>1", r"releases\[0\].versions: expected PEP 440 specif"),
        (">=0.16.0.dev0", ">=0.16.1", r"versions: expected a range that holds 0.16.0"),
        ('    torch: "2.10.0"\n', "", r"releases\[0\]: expected the keys"),
        ('environment: ["torch==2.10.0"]', "environment: torch", r"environment: expected a list"),
        ('vllm: "0.16.0"', 'vllm: "0.17.0"', r"cells\[0\].vllm: expected one of \['0.16.0'\]"),
        ("[request_init]", "[requset_init]", r"cells\[0\].patches: expected ids of patches, found"),
        ("[request_init]", "request_init", r"cells\[0\].patches: expected a list"),
        ("6.0e-6", '"small"', r"verified\[0\].largest_difference: expected a number"),
        ("cases: 3", "cases: 0", r"verified\[0\].cases: expected a count of at least 1, found 0"),
        ('date: "2026-01-01"', "date: 2026-01-01", r"verified\[0\].date: expected a text"),
        ('speculators: "0.3.0"', 'speculators: "x"', r"cells\[0\].speculators: expected a PEP 440"),
    ],
)
def test_invalid(old, new, message):
    assert old in VALID
    with pytest.raises(MatrixError, match=message) as raised:
        parse(VALID.replace(old, new, 1))
    assert str(raised.value).startswith("m.yaml")


def test_overlapping_ranges_and_repeated_pairs():
    release = VALID.split("releases:\n")[1].split("cells:")[0]
    wide = release.replace("0.16.0", "0.17.0").replace(">=0.17.0.dev0,<0.17.0.dev0", ">=0.15,<0.18")
    with pytest.raises(
        MatrixError, match=r"expected one range to hold 0\.16\.0, found '0\.16\.0, "
    ):
        parse(VALID.replace(release, release + wide))
    cell = VALID.split("cells:\n")[1]
    with pytest.raises(MatrixError, match=r"cells\[1\]: expected each pair once"):
        parse(VALID + cell)
