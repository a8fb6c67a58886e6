"""Facts read from source files: signatures, fields, bindings, calls."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from fakes import run

from speculators_vllm_compat.source import Parameter, Signature, SourceModule, SourceTree


@pytest.fixture
def module(tmp_path):
    """A SourceModule of a text."""

    def module(text: str) -> SourceModule:
        path = tmp_path / "module.py"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return SourceModule(path)

    return module


@pytest.fixture
def write(tmp_path):
    """Write files below the temporary folder, from their paths and texts."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def _required(*names: str) -> list[Parameter]:
    return [Parameter(name, required=True) for name in names]


def _optional(*names: str) -> list[Parameter]:
    return [Parameter(name, required=False) for name in names]


def _keyword_only(name: str, *, required: bool) -> Parameter:
    return Parameter(name, required=required, keyword_only=True)


@pytest.mark.parametrize(
    ("parameters", "expected", "any_keyword"),
    [
        ("", [], False),
        ("a", _required("a"), False),
        ("a, b=1", [*_required("a"), *_optional("b")], False),
        ("a=None, b=()", _optional("a", "b"), False),
        ("a: int, b: str = 'x'", [*_required("a"), *_optional("b")], False),
        ("a, /, b, c=1", [*_required("a", "b"), *_optional("c")], False),
        ("a, b=1, /", [*_required("a"), *_optional("b")], False),
        (
            "*, a, b=1",
            [_keyword_only("a", required=True), _keyword_only("b", required=False)],
            False,
        ),
        ("*, a=None", [_keyword_only("a", required=False)], False),
        ("a=1, *, b", [*_optional("a"), _keyword_only("b", required=True)], False),
        ("*args", [], False),
        ("a, *args, b", [*_required("a"), _keyword_only("b", required=True)], False),
        ("**kwargs", [], True),
        ("a, **options", _required("a"), True),
    ],
)
@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_function(module, keyword, parameters, expected, any_keyword):
    found = module(f"\n{keyword} f({parameters}):\n    pass\n").function("f")
    assert found == Signature(tuple(expected), any_keyword, 2)


def test_method_is_without_self(module):
    source = module(
        """\
        class A:
            def __init__(self, a, *, b=1): ...
            @classmethod
            def build(cls, c): ...
            class B:
                def f(self, d): ...
        """
    )
    assert source.function("A.__init__").names == ("a", "b")
    assert source.function("A.build").names == ("c",)
    assert source.function("A.B.f").names == ("d",)
    assert source.function("A.B.f").line == 6


def test_static_method_keeps_its_first_parameter(module):
    source = module(
        """\
        class A:
            @staticmethod
            def f(a, b=1): ...
        """
    )
    assert source.function("A.f").names == ("a", "b")


def test_overloaded_function_has_the_signature_of_its_last_definition(module):
    source = module(
        """\
        from typing import overload
        @overload
        def f(a: int) -> int: ...
        @overload
        def f(a: str) -> str: ...
        def f(a, b=None): ...
        """
    )
    assert source.function("f").names == ("a", "b")


@pytest.mark.parametrize("name", ["g", "A", "A.g", "A.a", "f.g", "g.f", "A.B.f", "variable"])
def test_missing_function(module, name):
    source = module("class A:\n    a: int\n    def f(self): ...\ndef f(): ...\nvariable = 1\n")
    assert source.function(name) is None


@pytest.mark.parametrize(
    ("parameters", "name", "accepts"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("*, a=1", "a", True),
        ("**kwargs", "b", True),
        ("*args", "args", False),
    ],
)
def test_accepts(module, parameters, name, accepts):
    assert module(f"def f({parameters}): ...").function("f").accepts(name) is accepts


def test_signature_facts_and_text(module):
    signature = module("def f(a, b=1, *, c, d=2, **rest): ...").function("f")
    assert signature.names == ("a", "b", "c", "d")
    assert signature.required == {"a", "c"}
    assert str(signature) == "(a, b=..., c, d=..., **kwargs)"
    assert str(module("def f(): ...").function("f")) == "()"


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("a: int", _required("a")),
        ("a: int = 1", _optional("a")),
        ("a: int = None", _optional("a")),
        ("a: int = field()", _required("a")),
        ("a: int = field(default=1)", _optional("a")),
        ("a: list = field(default_factory=list)", _optional("a")),
        ("a: int = field(repr=False)", _required("a")),
        ("a: int = field(init=False)", []),
        ("a: int = field(default=0, init=False)", []),
        ("a: int = field(default=0, init=True)", _optional("a")),
        ("a: int = Field(default=1, ge=1)", _optional("a")),
        ("a: int = Field(1, ge=1)", _optional("a")),
        ("a: int = Field(ge=1)", _required("a")),
        ("a: int = Field(default_factory=int, init=False)", []),
        ("a: InitVar[int]", _required("a")),
        ("a: InitVar[int] = 1", _optional("a")),
        ("a: int = other(default=1)", _optional("a")),
        ("a = 1", []),  # without an annotation it is no field
        ("def a(self): ...", []),
        ("'''a: int'''", []),
        ("a: ClassVar[int] = 1", []),
        ("a: ClassVar[int]", []),
        ("a: typing.ClassVar[int] = 1", []),
        ("_: KW_ONLY", []),
        ("a: int = dataclasses.field(init=False)", []),
        ("a: int = dataclasses.field()", _required("a")),
        ("a: int = Field(...)", _required("a")),
    ],
)
def test_fields(module, field, expected):
    found = module(f"\n@dataclass\nclass A:\n    {field}\n").fields("A")
    assert found == Signature(tuple(expected), False, 3)


def test_fields_keep_their_order(module):
    source = module("class A:\n    a: int\n    b = 2\n    c: int = 3\n    d: InitVar[int]\n")
    assert source.fields("A").names == ("a", "c", "d")
    assert source.fields("A").required == {"a", "d"}


@pytest.mark.parametrize("name", ["B", "f", "A.B"])
def test_missing_class_has_no_fields(module, name):
    assert module("class A:\n    a: int\ndef f(): ...\n").fields(name) is None


@pytest.mark.parametrize(
    ("name", "field", "expected"),
    [
        ("A", "a", None),
        ("A", "b", "True"),
        ("A", "c", "field(default=1)"),
        ("A", "d", None),  # not annotated
        ("A", "e", None),
        ("B", "a", None),
    ],
)
def test_field_default(module, name, field, expected):
    source = module("class A:\n    a: int\n    b: bool = True\n    c: int = field( default=1 )\n")
    assert source.field_default(name, field) == expected


def test_annotations(module):
    source = module("class A:\n    a: torch.dtype | None = None\n    b: 'str'\n    c = torch\n")
    assert source.annotated_with("A", "torch.dtype")
    assert source.annotated_with("A", "str")
    assert not source.annotated_with("A", "int")
    assert not source.annotated_with("B", "torch")


def test_bindings(module):
    source = module(
        """\
        import a
        import b.c
        import d.e as f
        from g import h, i as j
        k = l = 1
        m: int
        n: int = 1
        def o(): p = 1
        async def q(): ...
        class R:
            s = 1
        u.v = 1
        w[0] = 1
        """
    )
    assert source.bindings == {
        "a": 1,
        "b": 2,
        "f": 3,
        "h": 4,
        "j": 4,
        "k": 5,
        "l": 5,
        "m": 6,
        "n": 7,
        "o": 8,
        "q": 9,
        "R": 10,
    }


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("try:\n    import a\nexcept ImportError:\n    a = b = None", {"a", "b"}),
        ("try:\n    import a\nexcept A:\n    b = 1\nexcept B:\n    c = 1", {"a", "b", "c"}),
        ("if x:\n    a = 1\nelif y:\n    b = 1\nelse:\n    c = 1", {"a", "b", "c"}),
        ("if x:\n    try:\n        a = 1\n    except E:\n        pass", {"a"}),
        ("if TYPE_CHECKING:\n    import a\nb = 1", {"b"}),
        ("if typing.TYPE_CHECKING:\n    import a", set()),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    b = 1", {"b"}),
        ("if TYPE_CHECKING or x:\n    import a", set()),
        ("for a in b:\n    c = 1", set()),
        ("if not TYPE_CHECKING:\n    import a", {"a"}),
        ("try:\n    pass\nexcept E:\n    pass\nelse:\n    a = 1\nfinally:\n    b = 1", {"a", "b"}),
        ("a, b = 1, 2", {"a", "b"}),
    ],
)
def test_bindings_in_blocks(module, text, names):
    assert set(module(text).bindings) == names


@pytest.mark.parametrize(
    "text",
    [
        "if x:\n    def f(a): ...",
        "if x:\n    pass\nelse:\n    def f(a): ...",
        "try:\n    def f(a): ...\nexcept E:\n    pass",
        "try:\n    from x import f\nexcept E:\n    def f(a): ...",
    ],
)
def test_definition_in_a_block(module, text):
    assert module(text).function("f").names == ("a",)


def test_definition_under_type_checking_is_none(module):
    source = module("if TYPE_CHECKING:\n    class A:\n        a: int\n    def f(): ...\n")
    assert source.definition("A") is None
    assert source.function("f") is None


def test_line(module):
    source = module("\n\nclass A:\n\n    def f(self): ...\n")
    assert source.line("A") == 3
    assert source.line("A.f") == 5
    assert source.line("A.g") is None
    assert source.line("B") is None


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("f", "return g(1)", True),
        ("f", "What it does", False),
        ("f", "why it does", False),
        ("A", "x: int = 1\ndef f(self):\n    pass", True),
        ("A.f", "pass", True),
        ("A.x", "1", False),
        ("nothing", "g", False),
    ],
)
def test_mentions(module, name, code, expected):
    source = module(
        '''\
        def f():
            """What it does."""
            # why it does
            return g( 1 )
        class A:
            """What it is."""
            x: int = 1
            def f(self):
                pass
        '''
    )
    assert source.mentions(name, code) is expected


def test_stub(module):
    source = module('def f():\n    """What it does."""\n    ...\ndef g():\n    pass\n')
    assert source.is_stub("f")
    assert not source.is_stub("g")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("A", "a"), ("B", "b"), ("C", None), ("D", None), ("E", None), ("absent", None)],
)
def test_constant(module, name, expected):
    source = module("A = 'a'\nB: str = 'b'\nC = 1\nD = A\nE: str\n")
    assert source.constant(name) == expected


def test_calls(module):
    source = module(
        """\
        f(1, 2, a=3, **more)
        x.y.f(b=1)
        g(f)
        f.g(c=1)
        fff(d=1)
        """
    )
    assert [(call.keywords, call.positional, call.line) for call in source.calls("f")] == [
        ({"a"}, 2, 1),
        ({"b"}, 0, 2),
    ]
    assert source.calls("h") == ()


def test_calls_by_dotted_name(module):
    source = module("f(1)\nx.f(2)\nx.y.f(3)\ny.f(4)\n")
    assert [call.line for call in source.calls("x.f")] == [2]


def test_calls_are_in_source_order(module):
    source = module("def g():\n    if x:\n        return f(1)\nf(2)\n")
    assert [call.line for call in source.calls("f")] == [3, 4]


def test_tree_finds_modules_and_packages(write):
    root = write(
        {
            "package/__init__.py": "a = 1",
            "package/module.py": "b = 1",
            "package/sub/__init__.py": "c = 1",
            "package/sub/deep.py": "d = 1",
            "package/namespace/file.py": "e = 1",
        }
    )
    tree = SourceTree(root / "package")
    found = {name: tree.module(name) for name in ("module", "sub", "sub.deep", "namespace.file")}
    assert {name: list(module.bindings) for name, module in found.items()} == {
        "module": ["b"],
        "sub": ["c"],
        "sub.deep": ["d"],
        "namespace.file": ["e"],
    }
    assert found["sub"].path == root / "package/sub/__init__.py"


@pytest.mark.parametrize("name", ["nothing", "sub.nothing", "nothing.module", "namespace"])
def test_tree_without_the_module(write, name):
    root = write({"package/sub/__init__.py": "", "package/namespace/file.py": ""})
    assert SourceTree(root / "package").module(name) is None


def test_tree_reads_a_file_once(write):
    root = write({"package/module.py": "a = 1"})
    tree = SourceTree(root / "package")
    first = tree.module("module")
    write({"package/module.py": "b = 1"})
    assert tree.module("module") is first
    assert list(first.bindings) == ["a"]
    assert list(SourceTree(root / "package").module("module").bindings) == ["b"]


def test_tree_prefers_a_package_to_a_module_of_its_name(write):
    root = write({"package/name.py": "module = 1", "package/name/__init__.py": "package = 1"})
    assert list(SourceTree(root / "package").module("name").bindings) == ["package"]


def test_tree_tells_where_a_module_would_be(tmp_path):
    assert SourceTree(tmp_path).where("a.b") == f"{tmp_path}/a/b.py"


def test_reading_imports_nothing(write):
    folder = write(
        {"package/__init__.py": "raise SystemExit('imported')", "package/m.py": "1 / 0\na = 1"}
    )
    script = """
        from pathlib import Path
        from speculators_vllm_compat.source import SourceTree

        tree = SourceTree(Path("package"))
        print(dict(tree.module("m").bindings))
        """
    assert run(folder, script, prelude=False, SPECULATORS_VLLM_COMPAT="off") == "{'a': 2}\n"


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "module.py"
    path.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert list(SourceModule(path).bindings) == ["a"]
