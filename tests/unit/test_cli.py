"""The command as a whole: usage, help, and that it leaves the process unpatched."""

from __future__ import annotations

import pytest
from commands import command, installed
from fakes import run, write

from speculators_vllm_compat.cli import COMMANDS


def test_every_command_is_told_with_examples(tmp_path):
    overview = command(tmp_path, "--help").stdout
    for name in COMMANDS:
        assert f"\n    {name} " in overview
        told = command(tmp_path, name, "--help")
        assert told.returncode == 0
        assert "examples:" in told.stdout
        assert f"speculators-vllm-compat {name} " in told.stdout
        assert max(map(len, told.stdout.splitlines())) <= 80


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["check", "--odd"], ["check", "more"]])
def test_wrong_usage(tmp_path, arguments):
    ended = command(tmp_path, *arguments)
    assert ended.returncode == 2
    assert "usage: speculators-vllm-compat" in ended.stderr


def test_version(tmp_path):
    import speculators_vllm_compat

    expected = f"speculators-vllm-compat {speculators_vllm_compat.__version__}\n"
    assert command(tmp_path, "--version").stdout == expected


def test_checking_leaves_nothing_switched_on(tmp_path):
    code = """
        import contextlib, io, os, sys
        from speculators_vllm_compat import activation
        from speculators_vllm_compat.cli import main
        with contextlib.redirect_stdout(io.StringIO()):
            main(["check"])
        print(activation._activation._hooks in sys.meta_path)
        print("_SPECULATORS_VLLM_COMPAT_DRIVER" in os.environ)
        print(sorted({"vllm", "torch", "transformers", "speculators"} & set(sys.modules)))
        """
    assert run(installed(tmp_path), code, prelude=False) == "False\nFalse\n[]\n"


def test_an_odd_switch_is_told(tmp_path):
    ended = command(write(tmp_path), "check", SPECULATORS_VLLM_COMPAT="maybe")
    assert ended.returncode == 1
    assert "is 'maybe'; expected one of on, warn, off. Set one, or unset it." in ended.stderr
