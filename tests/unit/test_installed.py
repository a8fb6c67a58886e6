"""The package as pip installs it from the wheel, away from the checkout."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import speculators_vllm_compat.matrix

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that pip has installed the wheel into; nothing is downloaded."""
    lacking = [name for name in ("pip", "hatchling") if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"building a wheel offline takes {' and '.join(lacking)} in this environment")
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    _pip("wheel", "--no-build-isolation", "--wheel-dir", wheels, REPOSITORY)
    [wheel] = wheels.iterdir()
    assert wheel.name == "speculators_vllm_compat-0.1.0-py3-none-any.whl"
    _pip("install", "--target", site, wheel)
    return site


def _pip(action: str, *arguments: object) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            action,
            "-q",
            "--no-deps",
            "--no-index",
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def execute(site: Path, script: str) -> dict[str, object]:
    """Run a script that prints JSON where the installed package comes before the checkout."""
    script = f"import json, sys\nsys.path.insert(0, {str(site)!r})\n" + textwrap.dedent(script)
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=site, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_metadata(site):
    script = """
        from importlib import metadata
        [found] = metadata.distributions(path=[sys.path[0]])
        entries = {entry.group: entry for entry in found.entry_points}
        entry = entries["vllm.general_plugins"]
        script = entries["console_scripts"]
        print(json.dumps({
            "name": found.metadata["Name"],
            "version": found.version,
            "python": found.metadata["Requires-Python"],
            "license": found.metadata["License-Expression"],
            "requires": sorted(r.split(">")[0].lower() for r in found.requires),
            "entry": [entry.group, entry.name, entry.value],
            "script": [script.name, script.value],
        }))
        """
    assert execute(site, script) == {
        "name": "speculators-vllm-compat",
        "version": speculators_vllm_compat.__version__,
        "python": "<3.14,>=3.10",
        "license": "Apache-2.0",
        "requires": ["packaging", "pyyaml", "wrapt"],
        "entry": [
            "vllm.general_plugins",
            "speculators_vllm_compat",
            "speculators_vllm_compat_plugin:register",
        ],
        "script": ["speculators-vllm-compat", "speculators_vllm_compat.cli:main"],
    }


def test_every_source_file_and_nothing_else_is_there(site):
    source = REPOSITORY / "src"
    expected = {p.relative_to(source) for p in source.rglob("*.py")}
    expected |= {
        Path("speculators_vllm_compat/py.typed"),
        Path("speculators_vllm_compat/compat_matrix.yaml"),
    }
    found = {p.relative_to(site) for p in site.rglob("*") if p.is_file()}
    found -= {Path("bin/speculators-vllm-compat")}
    assert {p for p in found if ".dist-info" not in str(p) and p.suffix != ".pyc"} == expected
    [license_file] = site.glob("*.dist-info/licenses/LICENSE")
    assert license_file.read_bytes() == (REPOSITORY / "LICENSE").read_bytes()


def test_it_runs_from_there_with_its_own_matrix(site):
    script = """
        import speculators_vllm_compat, speculators_vllm_compat_plugin
        active = speculators_vllm_compat.status().active
        from speculators_vllm_compat import matrix, plan
        print(json.dumps({
            "files": [speculators_vllm_compat.__file__, speculators_vllm_compat_plugin.__file__],
            "matrix": len(matrix.load().cells),
            "active": active,
        }))
        """
    found = execute(site, script)
    assert all(Path(file).is_relative_to(site) for file in found["files"])
    assert found["matrix"] == len(speculators_vllm_compat.matrix.load().cells) > 0
    matrix_file = site / "speculators_vllm_compat/compat_matrix.yaml"
    text = matrix_file.read_text()
    try:
        matrix_file.write_text("schema: 1\nreleases: []\ncells: []\n")
        assert execute(site, script)["matrix"] == 0
    finally:
        matrix_file.write_text(text)
