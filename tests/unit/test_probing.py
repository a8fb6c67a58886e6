"""What probes are built of, the environment switches, and asking a callable for its arguments."""

from __future__ import annotations

import functools

import pytest

from speculators_vllm_compat import switches
from speculators_vllm_compat.calls import accepts
from speculators_vllm_compat.errors import CompatError, ConfigurationError
from speculators_vllm_compat.patching import Verdict
from speculators_vllm_compat.probing import absent, at, needed, not_needed, unfit, unknown
from speculators_vllm_compat.source import SourceModule, SourceTree


@pytest.fixture
def signature(tmp_path):
    def signature(parameters: str):
        path = tmp_path / "module.py"
        path.write_text(f"def f({parameters}): ...\n")
        return SourceModule(path).function("f")

    return signature


@pytest.mark.parametrize(
    ("parameters", "given", "extra", "problem"),
    [
        ("", set(), set(), ""),
        ("a, b=1", {"a"}, set(), ""),
        ("a, b=1", {"a", "b"}, set(), ""),
        ("a, b", {"a"}, {"b", "c"}, ""),
        ("**kwargs", {"a"}, set(), ""),
        ("a", {"a", "c", "b"}, set(), "(a) takes no b, c"),
        ("a, b, *, c", {"a"}, set(), "(a, b, c) requires b, c"),
        ("a, b, **kwargs", {"c"}, {"a"}, "(a, b, **kwargs) requires b"),
        ("a, b=1", {"b", "c"}, set(), "(a, b=...) takes no c"),
    ],
)
def test_unfit(signature, parameters, given, extra, problem):
    assert unfit(signature(parameters), given, extra) == problem


def test_answers():
    assert (needed("f", "w").verdict, needed("f", "w").expected) == (Verdict.NEEDED, "")
    assert not_needed("f", "w").verdict is Verdict.NOT_NEEDED
    found = unknown("f", "w", "e")
    assert (found.verdict, found.found, found.where, found.expected) == (
        Verdict.UNKNOWN_FORM,
        *("f", "w", "e"),
    )


def test_absent(tmp_path):
    (tmp_path / "there.py").write_text("")
    tree = SourceTree(tmp_path)
    assert absent(tree, "there", "f") == unknown(
        "no f", f"{tmp_path}/there.py", "a definition of f"
    )
    expected = unknown("no such file", f"{tmp_path}/a/b.py", "a module that defines f")
    assert absent(tree, "a.b", "f") == expected


def test_at(tmp_path):
    (tmp_path / "m.py").write_text("")
    module = SourceModule(tmp_path / "m.py")
    assert at(module, 7) == f"{tmp_path}/m.py:7"
    assert at(module, None) == f"{tmp_path}/m.py"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, switches.Mode.ON),
        ("", switches.Mode.ON),
        (" ", switches.Mode.ON),
        ("on", switches.Mode.ON),
        ("warn", switches.Mode.WARN),
        (" WARN ", switches.Mode.WARN),
        ("Off", switches.Mode.OFF),
    ],
)
def test_mode(monkeypatch, value, expected):
    monkeypatch.delenv(switches.MODE, raising=False)
    if value is not None:
        monkeypatch.setenv(switches.MODE, value)
    assert switches.mode() is expected


@pytest.mark.parametrize("value", ["1", "true", "yes", "offf", "on,warn"])
def test_mode_that_is_none(monkeypatch, value):
    monkeypatch.setenv(switches.MODE, value)
    with pytest.raises(ConfigurationError, match="expected one of on, warn, off") as raised:
        switches.mode()
    assert repr(value) in str(raised.value)
    assert isinstance(raised.value, CompatError)


def test_forward_mode(monkeypatch):
    monkeypatch.delenv(switches.FORWARD, raising=False)
    assert switches.forward_mode() is switches.Forward.OBSERVED
    monkeypatch.setenv(switches.FORWARD, "replaced")
    assert switches.forward_mode() is switches.Forward.REPLACED
    monkeypatch.setenv(switches.FORWARD, "patched")
    with pytest.raises(ConfigurationError, match=f"{switches.FORWARD} is 'patched'"):
        switches.forward_mode()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, set()), ("", set()), (" , ", set()), ("a", {"a"}), (" a ,b,,a", {"a", "b"})],
)
def test_skipped(monkeypatch, value, expected):
    monkeypatch.delenv(switches.SKIP, raising=False)
    if value is not None:
        monkeypatch.setenv(switches.SKIP, value)
    assert switches.skipped() == expected


class _Callable:
    def __init__(self, a): ...

    def method(self, b): ...


@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        (lambda a: a, "a", True),
        (lambda a: a, "b", False),
        (lambda **kwargs: kwargs, "b", True),
        (lambda *args: args, "b", False),
        (_Callable, "a", True),
        (_Callable, "b", False),
        (_Callable.method, "b", True),
        (functools.partial(lambda a, b: (a, b), 1), "b", True),
        (dict.fromkeys, "other", False),
        (type, "anything", True),  # a builtin that does not tell
    ],
)
def test_accepts(function, name, expected):
    assert accepts(function, name) is expected
