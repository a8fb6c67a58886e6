"""Every entry of compat_matrix.yaml, missing, of another type, or with a value that is none."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import yaml
from fakes import run
from packaging.version import Version

from speculators_vllm_compat import matrix
from speculators_vllm_compat.errors import MatrixError
from speculators_vllm_compat.patches import PATCHES

VALID = {
    "schema": 1,
    "releases": [
        {
            "version": "0.16.0",
            "versions": ">=0.16.0.dev0,<0.17.0.dev0",
            "torch": "2.10.0",
            "transformers": ">=4.56.0,<5",
            "python": ">=3.10",
            "environment": ["torch==2.10.0"],
        }
    ],
    "cells": [
        {
            "speculators": "0.3.0",
            "vllm": "0.16.0",
            "patches": ["request_init", "none_hash"],
            "verified": [
                {
                    "date": "2026-01-01",
                    "device": "cpu",
                    "largest_difference": 6.0e-6,
                    "cases": 3,
                    "evidence": "evidence/a.json",
                }
            ],
        }
    ],
}
REPOSITORY = Path(__file__).resolve().parents[2]
KNOWN = {"request_init", "none_hash"}
_RELEASE, _CELL = ("releases", 0), ("cells", 0)
_VERIFIED = (*_CELL, "verified", 0)


def changed(place: tuple[str | int, ...], value: object) -> str:
    """The valid matrix with one entry replaced, as YAML; with the entry removed for ``...``."""
    data = copy.deepcopy(VALID)
    owner = data
    for key in place[:-1]:
        owner = owner[key]
    if value is ...:
        del owner[place[-1]]
    else:
        owner[place[-1]] = value
    return yaml.safe_dump(data)


def name_of(place: tuple[str | int, ...]) -> str:
    """The place as messages spell it."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(parts).lstrip(".")


def message_of(text: str) -> str:
    with pytest.raises(MatrixError) as raised:
        matrix.parse(text, "m.yaml", KNOWN)
    return str(raised.value)


def test_the_valid_one_is_valid():
    parsed = matrix.parse(yaml.safe_dump(VALID), "m.yaml", KNOWN)
    [release], [cell] = parsed.releases, parsed.cells
    assert (release.version, release.torch, release.python) == (
        Version("0.16.0"),
        "2.10.0",
        ">=3.10",
    )
    assert (release.environment, release.transformers) == (("torch==2.10.0",), ">=4.56.0,<5")
    assert (cell.speculators, cell.vllm, cell.patches) == (Version("0.3.0"), release, KNOWN)
    [verified] = cell.verified
    assert (verified.date, verified.device, verified.cases) == ("2026-01-01", "cpu", 3)
    assert (verified.largest_difference, verified.evidence) == (6.0e-6, "evidence/a.json")


def test_without_known_patches_any_id_goes():
    text = changed((*_CELL, "patches"), ["whatever"])
    assert matrix.parse(text, "m.yaml").cells[0].patches == {"whatever"}


def test_the_real_one():
    path = REPOSITORY / "compat_matrix.yaml"
    ids = [patch.id for patch in PATCHES]
    parsed = matrix.parse(path.read_text(), str(path), ids)
    assert parsed == matrix.load()
    order = {patch_id: number for number, patch_id in enumerate(ids)}
    for cell in yaml.safe_load(path.read_text())["cells"]:
        assert cell["patches"] == sorted(set(cell["patches"]), key=order.__getitem__), cell


_MAPPINGS = {
    (): VALID,
    _RELEASE: VALID["releases"][0],
    _CELL: VALID["cells"][0],
    _VERIFIED: VALID["cells"][0]["verified"][0],
}


@pytest.mark.parametrize(
    ("owner", "key"), [(owner, key) for owner, mapping in _MAPPINGS.items() for key in mapping]
)
def test_missing_key(owner, key):
    keys = sorted(_MAPPINGS[owner])
    found = sorted(set(keys) - {key})
    assert message_of(changed((*owner, key), ...)) == (
        f"m.yaml: {name_of(owner) or 'the file'}: expected the keys {keys}, found {found!r}. "
        "Mend that entry."
    )


@pytest.mark.parametrize("owner", list(_MAPPINGS))
def test_extra_key(owner):
    message = message_of(changed((*owner, "more"), 1))
    assert message.startswith(f"m.yaml: {name_of(owner) or 'the file'}: expected the keys ")
    assert "'more'" in message


@pytest.mark.parametrize("owner", [place for place in _MAPPINGS if place])
@pytest.mark.parametrize("value", [None, "text", 3, []])
def test_no_mapping(owner, value):
    message = message_of(changed(owner, value))
    assert message.startswith(f"m.yaml: {name_of(owner)}: expected the keys [")
    assert message.endswith(f"found {value!r}. Mend that entry.")


_TEXT, _LIST, _VERSION = "a text in quotes", "a list", "a PEP 440 version"
_NUMBER, _COUNT = "a number such as 6.0e-6", "a count of at least 1"


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (("schema",), 2, "1"),
        (("schema",), "1", "1"),
        (("releases",), {}, _LIST),
        (("cells",), None, _LIST),
        ((*_RELEASE, "version"), 0.16, _TEXT),
        ((*_RELEASE, "version"), "zero", _VERSION),
        ((*_RELEASE, "version"), "", _TEXT),
        ((*_RELEASE, "versions"), ["a"], _TEXT),
        ((*_RELEASE, "versions"), "=>0.16", "PEP 440 specifiers"),
        ((*_RELEASE, "torch"), 2.10, _TEXT),
        ((*_RELEASE, "transformers"), None, _TEXT),
        ((*_RELEASE, "python"), 3.1, _TEXT),
        ((*_RELEASE, "environment"), "torch", _LIST),
        ((*_CELL, "speculators"), 0.3, _TEXT),
        ((*_CELL, "speculators"), "0.3.x", _VERSION),
        ((*_CELL, "vllm"), 0.16, _TEXT),
        ((*_CELL, "vllm"), "0.16", "one of ['0.16.0']"),
        ((*_CELL, "patches"), "request_init", _LIST),
        ((*_CELL, "patches"), {"request_init": None}, _LIST),
        ((*_CELL, "verified"), None, _LIST),
        ((*_VERIFIED, "largest_difference"), "6e-6", _NUMBER),
        ((*_VERIFIED, "largest_difference"), None, _NUMBER),
        ((*_VERIFIED, "cases"), 0, _COUNT),
        ((*_VERIFIED, "cases"), -1, _COUNT),
        ((*_VERIFIED, "cases"), "3", _COUNT),
        ((*_VERIFIED, "cases"), 3.0, _COUNT),
        ((*_VERIFIED, "device"), [], _TEXT),
        ((*_VERIFIED, "evidence"), "", _TEXT),
        (("schema",), True, "1"),
        ((*_VERIFIED, "cases"), True, _COUNT),
        ((*_VERIFIED, "largest_difference"), float("nan"), _NUMBER),
        ((*_VERIFIED, "largest_difference"), float("inf"), _NUMBER),
        ((*_VERIFIED, "largest_difference"), -1.0, _NUMBER),
    ],
)
def test_value_that_is_none(place, value, expected):
    assert message_of(changed(place, value)) == (
        f"m.yaml: {name_of(place)}: expected {expected}, found {value!r}. Mend that entry."
    )


@pytest.mark.parametrize(
    ("place", "expected"),
    [((*_RELEASE, "environment"), _TEXT), ((*_CELL, "patches"), _TEXT)],
)
def test_list_with_something_else_in_it(place, expected):
    message = message_of(changed(place, [3]))
    assert message == f"m.yaml: {name_of(place)}: expected {expected}, found 3. Mend that entry."


def test_unknown_patches_are_all_named():
    message = message_of(changed((*_CELL, "patches"), ["none_hash", "b", "a"]))
    assert "cells[0].patches: expected ids of patches, found 'a, b'" in message


def test_date_that_is_no_day():
    assert "cells[0].verified[0].date" in message_of(changed((*_VERIFIED, "date"), "yesterday"))


def test_key_written_twice():
    text = yaml.safe_dump(VALID).replace("  vllm: 0.16.0", "  vllm: 0.16.0\n  vllm: 0.16.0")
    assert text.count("vllm:") == 2
    assert "vllm" in message_of(text)


def test_ranges_that_overlap_between_their_releases():
    second = {**VALID["releases"][0], "version": "0.17.0", "versions": ">=0.16.5,<0.18.0.dev0"}
    text = changed(("releases",), [VALID["releases"][0], second])
    assert message_of(text).startswith("m.yaml: releases: expected one range to hold ")


def test_the_same_release_twice():
    text = changed(("releases",), VALID["releases"] * 2)
    assert "releases: expected one range to hold 0.16.0, found '0.16.0, 0.16.0'" in message_of(text)


def test_the_same_pair_twice():
    text = changed(("cells",), VALID["cells"] * 2)
    assert "cells[1]: expected each pair once, found '0.3.0 x 0.16.0'" in message_of(text)


@pytest.mark.parametrize("text", ["", "3", "[]", "text"])
def test_file_that_is_no_mapping(text):
    assert message_of(text).startswith("m.yaml: the file: expected the keys ['cells', ")


@pytest.mark.parametrize("text", ["a: [", "\tb: 1", "a: b: c", "? [a]\n: 1", "!!python/name:os.x"])
def test_file_that_is_no_yaml(text):
    assert message_of(text).startswith("m.yaml is not YAML: ")


def test_installation_without_the_file(tmp_path):
    source = REPOSITORY / "src/speculators_vllm_compat"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, tmp_path / "a/b/speculators_vllm_compat", ignore=ignored)
    code = """
        from speculators_vllm_compat import errors, matrix
        assert "/a/b/" in matrix.__file__
        try:
            matrix.load()
        except errors.MatrixError as error:
            print(error)
        """
    out = run(
        tmp_path,
        code,
        prelude=False,
        SPECULATORS_VLLM_COMPAT="off",
        PYTHONPATH=str(tmp_path / "a/b"),
    )
    assert out.startswith("compat_matrix.yaml was not found beside ")
    assert "Install the package again" in out
