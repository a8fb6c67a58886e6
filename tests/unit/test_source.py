"""Facts read from source files."""

from __future__ import annotations

import textwrap

import pytest

from speculators_vllm_compat.source import SourceTree

SOURCE = '''
from typing import TYPE_CHECKING
import os.path, json as j

if TYPE_CHECKING:
    import torch
else:
    import numpy

try:
    import fast
except ImportError:
    fast = None

NAME: int
VALUE = 3

def plain(a, b=1, *rest, c, d=2, **more):
    """A docstring."""
    return call(a, key=1) or other.call(a, b, word=2)

class Base:
    def method(self, x, /, y=None): ...

    @staticmethod
    def nothing(): ...

@dataclass
class Fields:
    a: int
    b: str = "x"
    c: list = field(default_factory=list)
    d: int = Field(gt=0)
    e: int = Field(default=1, gt=0)
    f: int = field(default=0, init=False)
    g: InitVar[bool]
    h: torch.Tensor = Field(2)

    def method(self): ...
'''


@pytest.fixture
def module(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("here = 1\n")
    (tmp_path / "pack" / "inner.py").write_text(textwrap.dedent(SOURCE))
    return SourceTree(tmp_path).module("pack.inner")


def test_modules_and_packages(tmp_path, module):
    tree = SourceTree(tmp_path)
    assert tree.module("pack").bindings == {"here": 1}
    assert tree.module("pack.inner") is tree.module("pack.inner")
    assert tree.module("pack.absent") is None
    assert tree.where("pack.absent") == str(tmp_path / "pack" / "absent.py")


def test_function(module):
    found = module.function("plain")
    assert found.names == ("a", "b", "c", "d")
    assert found.required == {"a", "c"}
    assert [p.name for p in found.parameters if p.keyword_only] == ["c", "d"]
    assert found.any_keyword
    assert found.accepts("whatever")
    assert str(found) == "(a, b=..., c, d=..., **kwargs)"
    assert module.text.splitlines()[found.line - 1].startswith("def plain")


def test_method(module):
    found = module.function("Base.method")
    assert (found.names, found.required) == (("x", "y"), {"x"})
    assert not found.accepts("z")


@pytest.mark.parametrize("name", ["absent", "Base.absent", "Absent.method", "Base", "plain.a"])
def test_what_is_no_function(module, name):
    assert module.function(name) is None


def test_fields(module):
    found = module.fields("Fields")
    assert found.names == ("a", "b", "c", "d", "e", "g", "h")  # f is not for the constructor
    assert found.required == {"a", "d", "g"}
    assert module.fields("plain") is None
    assert module.field_default("Fields", "b") == "'x'"
    assert module.field_default("Fields", "a") is None
    assert module.field_default("Fields", "absent") is None
    assert module.annotated_with("Fields", "torch.Tensor")
    assert not module.annotated_with("Fields", "jax")
    assert not module.annotated_with("absent", "torch")


def test_bindings(module):
    assert set(module.bindings) == {
        *("TYPE_CHECKING", "os", "j", "numpy", "fast", "NAME", "VALUE", "plain", "Base", "Fields")
    }


def test_calls(module):
    first, second = module.calls("call")
    assert (first.keywords, first.positional) == ({"key"}, 1)
    assert (second.keywords, second.positional) == ({"word"}, 2)
    assert len(module.calls("other.call")) == 1
    assert module.calls("absent") == ()


def test_mentions(module):
    assert module.mentions("plain", "call(a, key=1) or other.call(a, b, word=2)")
    assert not module.mentions("plain", "call(b")
    assert not module.mentions("absent", "call")


def test_is_stub(module):
    assert module.is_stub("Base.method")  # an ellipsis, like a docstring, does nothing
    assert not module.is_stub("plain")
    assert not module.is_stub("absent")


def test_lines(module):
    assert module.line("Fields") > module.line("Base") > module.line("plain") > 1
    assert module.line("absent") is None
