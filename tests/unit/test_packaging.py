"""The wheel holds what it should, and nothing heavy is required."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder), "."],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def read(wheel, ending: str) -> str:
    [name] = [name for name in wheel.namelist() if name.endswith(ending)]
    return wheel.read(name).decode()


def test_metadata(wheel):
    lines = read(wheel, ".dist-info/METADATA").splitlines()
    assert "Name: speculators-vllm-compat" in lines
    assert "Version: 0.1.0" in lines
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: <3.14,>=3.10" in lines
    required = {line.split(": ")[1].split(">")[0] for line in lines if "Requires-Dist" in line}
    assert {name.lower() for name in required} == {"packaging", "pyyaml", "wrapt"}


def test_contents(wheel):
    names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "speculators_vllm_compat",
        "speculators_vllm_compat_plugin.py",
    }
    assert "speculators_vllm_compat/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert read(wheel, ".dist-info/entry_points.txt").split() == [
        "[console_scripts]",
        "speculators-vllm-compat",
        "=",
        "speculators_vllm_compat.cli:main",
        "[vllm.general_plugins]",
        "speculators_vllm_compat",
        "=",
        "speculators_vllm_compat_plugin:register",
    ]


def test_the_matrix_travels_and_is_the_one_that_is_read(wheel, tmp_path):
    inside = "speculators_vllm_compat/compat_matrix.yaml"
    assert wheel.read(inside) == (REPOSITORY / "compat_matrix.yaml").read_bytes()
    wheel.extractall(tmp_path)
    (tmp_path / inside).write_text("schema: 1\nreleases: []\ncells: []\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from speculators_vllm_compat import matrix\nprint(matrix.__file__, matrix.load().cells)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == [str(tmp_path / "speculators_vllm_compat/matrix.py"), "()"]


def test_an_editable_install_reads_the_checkouts():
    from speculators_vllm_compat import matrix

    assert Path(matrix.__file__).is_relative_to(REPOSITORY / "src")
    assert matrix.load().cells
