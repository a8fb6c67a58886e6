"""Facts read from a package's source files, which are parsed and never imported.

Probes need to know what a function takes, which fields a class has, where a name lives.
Importing vLLM to find out takes ten seconds and may fail; parsing the few files in
question takes a fraction of one.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_NO_FIELD = re.compile(r"^(typing\.)?ClassVar\b|\bKW_ONLY$")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function, or one field of a class."""

    name: str
    required: bool
    keyword_only: bool = False


@dataclass(frozen=True)
class Signature:
    """What a function takes, without ``self``.

    Attributes:
        parameters: In the order of the source.
        any_keyword: Whether it has ``**kwargs``.
        line: Where it is defined, counted from 1.
    """

    parameters: tuple[Parameter, ...]
    any_keyword: bool
    line: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def required(self) -> frozenset[str]:
        return frozenset(p.name for p in self.parameters if p.required)

    @property
    def positional(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if not p.keyword_only)

    def accepts(self, name: str) -> bool:
        return self.any_keyword or name in self.names

    def __str__(self) -> str:
        shown = [p.name if p.required else f"{p.name}=..." for p in self.parameters]
        return f"({', '.join([*shown, '**kwargs'] if self.any_keyword else shown)})"


class SourceModule:
    """One parsed source file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise _unreadable(path, error) from error

    @cached_property
    def _tree(self) -> ast.Module:
        try:
            return ast.parse(self.text, filename=str(self.path))
        except (SyntaxError, ValueError) as error:
            if getattr(error, "filename", None):
                raise
            raise _unreadable(self.path, error) from error  # a null byte, up to Python 3.11

    @cached_property
    def bindings(self) -> Mapping[str, int]:
        """Names bound at the top level, ``if`` and ``try`` blocks included, with their lines.

        Blocks under ``if TYPE_CHECKING`` bind nothing when the module runs, so they are left out.
        """
        return dict(_bindings(self._tree.body))

    def imports(self) -> tuple[Import, ...]:
        """Every ``from … import …`` that runs when the module does."""
        return tuple(
            Import(statement.module or "", statement.level, alias.name, statement.lineno)
            for statement in _unconditional(self._tree.body)
            if isinstance(statement, ast.ImportFrom)
            for alias in statement.names
        )

    def definition(self, qualname: str) -> ast.AST | None:
        """The class or function of this dotted name, or None."""
        body: list[ast.stmt] = list(_unconditional(self._tree.body))
        found: ast.AST | None = None
        for part in qualname.split("."):
            named = [n for n in body if isinstance(n, _Function | ast.ClassDef) and n.name == part]
            if not named:
                return None
            found = named[-1]  # the last one counts: those before it are overloads
            body = named[-1].body
        return found

    def line(self, qualname: str) -> int | None:
        found = self.definition(qualname)
        return getattr(found, "lineno", None)

    def function(self, qualname: str) -> Signature | None:
        """The signature of a function or method, or None when it is not there."""
        node = self.definition(qualname)
        if not isinstance(node, _Function):
            return None
        static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
        method = "." in qualname and not static
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        first_default = len(positional) - len(arguments.defaults)
        parameters = [
            Parameter(argument.arg, required=index < first_default)
            for index, argument in enumerate(positional)
        ]
        if method and parameters:
            del parameters[0]
        parameters += [
            Parameter(argument.arg, required=default is None, keyword_only=True)
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ]
        return Signature(tuple(parameters), arguments.kwarg is not None, node.lineno)

    def returns(self, qualname: str) -> str:
        """What a function is annotated to return, without quotes; "" when it does not say."""
        node = self.definition(qualname)
        annotation = getattr(node, "returns", None)
        return "" if annotation is None else ast.unparse(annotation).strip("'\"")

    def gives_value(self, qualname: str) -> bool:
        """Whether a function has a ``return`` with a value of its own."""
        pending = list(getattr(self.definition(qualname), "body", []))
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Return) and node.value is not None:
                return True
            if not isinstance(node, _Function | ast.Lambda | ast.ClassDef):
                pending += ast.iter_child_nodes(node)
        return False

    def fields(self, class_name: str) -> Signature | None:
        """The annotated fields of a dataclass, as the signature of its constructor."""
        node = self.definition(class_name)
        if not isinstance(node, ast.ClassDef):
            return None
        parameters = tuple(
            Parameter(statement.target.id, required=_is_required(statement.value))
            for statement in node.body
            if isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and not _NO_FIELD.search(ast.unparse(statement.annotation))
            and _is_init(statement.value)
        )
        return Signature(parameters, False, node.lineno)

    def field_default(self, class_name: str, field: str) -> str | None:
        """The source text of a field's default, or None when it has none."""
        node = self.definition(class_name)
        for statement in getattr(node, "body", []):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and statement.target.id == field
                and statement.value is not None
            ):
                return ast.unparse(statement.value)
        return None

    def field_names(self, class_name: str) -> tuple[str, ...]:
        """Every annotated name of a class, those that its constructor does not take included."""
        node = self.definition(class_name)
        return tuple(
            ast.unparse(statement.target)
            for statement in getattr(node, "body", [])
            if isinstance(statement, ast.AnnAssign)
        )

    def annotation(self, class_name: str, field: str) -> str:
        """The annotation of one field of a class, or "" when there is no such field."""
        node = self.definition(class_name)
        for statement in getattr(node, "body", []):
            if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == field:
                return ast.unparse(statement.annotation)
        return ""

    def annotated_with(self, class_name: str, name: str) -> bool:
        """Whether the annotation of a class's field mentions a name."""
        node = self.definition(class_name)
        return any(
            name in ast.unparse(statement.annotation)
            for statement in getattr(node, "body", [])
            if isinstance(statement, ast.AnnAssign)
        )

    def binds(self, name: str) -> bool:
        """Whether a name is bound at the top level when the module runs."""
        return name in self.bindings

    def constant(self, name: str) -> str | None:
        """The text a top-level name is set to, or None when it is set to nothing of the kind."""
        for statement in _unconditional(self._tree.body):
            targets: list[ast.expr] = []
            if isinstance(statement, ast.Assign):
                targets = statement.targets
            elif isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                value = getattr(getattr(statement, "value", None), "value", None)
                return value if isinstance(value, str) else None
        return None

    def mentions(self, qualname: str, code: str) -> bool:
        """Whether a definition's code, as ``ast.unparse`` writes it, holds a piece of code."""
        return code in self._body(qualname)

    def matches(self, pattern: str) -> bool:
        """Whether the file's text matches a regular expression somewhere.

        For files of thousands of lines, which take long to parse.
        """
        return re.search(pattern, self.text) is not None

    def is_stub(self, qualname: str) -> bool:
        """Whether a function is there and does nothing: a docstring, or an ellipsis."""
        return self.function(qualname) is not None and not self._body(qualname)

    def _body(self, qualname: str) -> str:
        """A definition's code, without comments, docstrings and ellipses; "" when absent."""
        node = self.definition(qualname)
        if node is None or not isinstance(node, _Function | ast.ClassDef):
            return ""
        return "\n".join(ast.unparse(s) for s in node.body if not _is_docstring(s))

    def calls(self, function_name: str) -> tuple[Call, ...]:
        """Every call of ``name(...)`` or ``….name(...)`` in the file, in source order."""
        found = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Call) and _called(node.func, function_name)
        ]
        return tuple(
            Call(frozenset(k.arg for k in node.keywords if k.arg), len(node.args), node.lineno)
            for node in sorted(found, key=lambda node: (node.lineno, node.col_offset))
        )


@dataclass(frozen=True)
class Call:
    """One call found in a source file."""

    keywords: frozenset[str]
    positional: int
    line: int


@dataclass(frozen=True)
class Import:
    """One name of a ``from … import …``.

    Attributes:
        module: What follows ``from``, without the dots in front of it.
        level: How many dots there are.
        name: The name imported; ``*`` for all of them.
        line: Where.
    """

    module: str
    level: int
    name: str
    line: int


class SourceTree:
    """The source of one installed package.

    Args:
        root: The folder that holds the package's ``__init__.py``.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._modules: dict[str, SourceModule | None] = {}

    def module(self, name: str) -> SourceModule | None:
        """The module of this dotted name below the package, or None when there is no such file."""
        if name not in self._modules:
            path = self.find(name)
            self._modules[name] = None if path is None else SourceModule(path)
        return self._modules[name]

    def find(self, name: str) -> Path | None:
        """The file of a module, or None when there is none."""
        base = self.root.joinpath(*name.split("."))
        candidates = (base / "__init__.py", base.with_name(base.name + ".py"))
        return next((c for c in candidates if c.is_file()), None)

    def provides(self, module_name: str, name: str) -> bool:
        """Whether ``from module_name import name`` finds the name."""
        module = self.module(module_name)
        if module is None:
            return False
        # Found without parsing, which takes longer, where it is defined in so many words.
        if re.search(rf"^(?:class|def|async def) {name}\b", module.text, re.M):
            return True
        if {name, "__getattr__"} & module.bindings.keys() or self.find(f"{module_name}.{name}"):
            return True
        is_package = module.path.name == "__init__.py"
        for star in (found for found in module.imports() if found.name == "*" and found.level):
            parts = module_name.split(".")
            kept = parts[: len(parts) + is_package - star.level]
            if self.provides(".".join([*kept, *filter(None, [star.module])]), name):
                return True
        return False

    def where(self, name: str) -> str:
        """The path a module has or would have, for messages."""
        return str(self.root.joinpath(*name.split("."))) + ".py"


def _unreadable(path: Path, error: Exception) -> SyntaxError:
    """What Python says of a source file that it cannot read as text."""
    return SyntaxError(str(error), (str(path), 1, None, None))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _called(function: ast.expr, name: str) -> bool:
    if "." in name:
        return ast.unparse(function) == name
    if isinstance(function, ast.Attribute):
        return function.attr == name
    return isinstance(function, ast.Name) and function.id == name


def _field_call(value: ast.expr | None) -> ast.Call | None:
    """The ``field(...)`` or ``Field(...)`` call a default consists of."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in {"field", "Field"}:
        return value
    return None


def _is_required(value: ast.expr | None) -> bool:
    call = _field_call(value)
    if call is None:
        return value is None
    no_default = not call.args or ast.unparse(call.args[0]) == "..."  # pydantic's Field(...)
    return no_default and not {"default", "default_factory"} & {k.arg for k in call.keywords}


def _is_init(value: ast.expr | None) -> bool:
    call = _field_call(value)
    return call is None or not any(
        k.arg == "init" and isinstance(k.value, ast.Constant) and k.value.value is False
        for k in call.keywords
    )


def _unconditional(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, looking into ``if`` and ``try`` but not ``if TYPE_CHECKING``."""
    for statement in body:
        if isinstance(statement, ast.If):
            test = ast.unparse(statement.test)
            if "TYPE_CHECKING" not in test or test.startswith("not "):
                yield from _unconditional(statement.body)
            yield from _unconditional(statement.orelse)
        elif isinstance(statement, ast.Try):
            yield from _unconditional(statement.body)
            for handler in statement.handlers:
                yield from _unconditional(handler.body)
            yield from _unconditional(statement.orelse)
            yield from _unconditional(statement.finalbody)
        else:
            yield statement


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    for statement in _unconditional(body):
        if isinstance(statement, _Function | ast.ClassDef):
            yield statement.name, statement.lineno
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield (alias.asname or alias.name.split(".")[0]), statement.lineno
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        yield name.id, statement.lineno
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement.lineno
