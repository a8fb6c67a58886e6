"""Facts of a release's source, recorded so that every probe can be run without the source.

A snapshot holds what the probes ask: signatures, fields, where a name lives, and what each
probe concluded. It holds no source text. It is recorded by listening to the probes while they
read the published source; when a probe asks something new, record again:

    python dev.py snapshots            every release of the matrix
    python dev.py snapshots 0.34.0     one more
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import releases
from speculators_vllm_compat.detect import Distribution, Package
from speculators_vllm_compat.patches import PATCHES
from speculators_vllm_compat.patching import Finding, Patch, Sources, Verdict
from speculators_vllm_compat.plan import Plan, make_plan, run_probe
from speculators_vllm_compat.source import Call, Import, Parameter, Signature, SourceTree

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / "snapshots"
SPECULATORS = ("0.3.0", "0.4.0", "0.4.0.1")

Facts = dict[str, Any]


class Listener:
    """A source tree, or a snapshot, that writes down what it is asked and what it answers.

    Args:
        tree: Answers.
        package: The package's name, with which the paths written down begin.
        facts: Where it is written: by module, then by question.
    """

    def __init__(self, tree: Any, package: str, facts: dict[str, Facts | None]) -> None:
        self._tree = tree
        self._package = package
        self.facts = facts
        self.root = Path(package)
        self._modules: dict[str, Any] = {}  # probes ask whether two are the same

    def module(self, name: str) -> Any:
        if name not in self._modules:
            self._modules[name] = self._listen(name)
        return self._modules[name]

    def _listen(self, name: str) -> Any:
        found = self._tree.module(name)
        if found is None:
            self.facts[name] = None
            return None
        if self.facts.get(name) is None:
            path = Path(found.path)
            if path.is_absolute():
                path = path.relative_to(self._tree.root.parent)
            self.facts[name] = {"path": path.as_posix()}
        return _HeardModule(found, self.facts[name])

    def find(self, name: str) -> Any:
        return self._tree_asked("find", name, bool(self._tree.find(name)))

    def provides(self, module: str, name: str) -> bool:
        answer = self._tree.provides(module, name)
        return self._tree_asked("provides", f"{module} {name}", answer)

    def _tree_asked(self, query: str, what: str, answer: bool) -> bool:
        self.facts.setdefault("", {})[f"{query} {what}"] = answer
        return answer

    def where(self, name: str) -> str:
        return f"{self._package}/{name.replace('.', '/')}.py"


class _HeardModule:
    def __init__(self, module: Any, facts: Facts) -> None:
        self._module = module
        self._facts = facts
        self.path = facts["path"]

    def __getattr__(self, query: str) -> Any:
        def ask(*arguments: str) -> Any:
            answer = getattr(self._module, query)(*arguments)
            self._facts[_question(query, arguments)] = _encode(answer)
            return answer

        return ask


class Snapshot:
    """A release's recorded facts, with the questions of a source tree."""

    def __init__(self, project: str, version: str) -> None:
        self.path = FOLDER / project / f"{version}.json"
        if not self.path.is_file():
            raise LookupError(f"no {self.path}; record it: python dev.py snapshots {version}")
        self.content = json.loads(self.path.read_text())
        self._name = f"{project} {version}"
        self._package = project
        self.root = Path(project)
        self._modules: dict[str, Any] = {}

    def module(self, name: str) -> Any:
        if name not in self.content["modules"]:
            raise self._unheard(name)
        facts = self.content["modules"][name]
        if name not in self._modules:
            self._modules[name] = facts and _RecordedModule(facts, name, self)
        return self._modules[name]

    def find(self, name: str) -> bool:
        return self._tree_answer(f"find {name}")

    def provides(self, module: str, name: str) -> bool:
        return self._tree_answer(f"provides {module} {name}")

    def _tree_answer(self, question: str) -> bool:
        facts = self.content["modules"].get("", {})
        if question not in facts:
            raise self._unheard(question)
        return bool(facts[question])

    def where(self, name: str) -> str:
        return f"{self._package}/{name.replace('.', '/')}.py"

    def _unheard(self, what: str) -> LookupError:
        return LookupError(
            f"the snapshot of {self._name} has no {what}: a probe asks more than when it was "
            "recorded. Record again: python dev.py snapshots"
        )


class _RecordedModule:
    def __init__(self, facts: Facts, name: str, snapshot: Snapshot) -> None:
        self._facts = facts
        self._name = name
        self._snapshot = snapshot
        self.path = facts["path"]

    def __getattr__(self, query: str) -> Any:
        def answer(*arguments: str) -> Any:
            question = _question(query, arguments)
            if question not in self._facts:
                raise self._snapshot._unheard(f"{self._name}: {question}")
            return _decode(self._facts[question])

        return answer


def _question(query: str, arguments: Iterable[str]) -> str:
    return " ".join((query, *arguments))


def _encode(answer: Any) -> Any:
    if isinstance(answer, Signature):
        takes = [
            ("*" if p.keyword_only else "") + p.name + ("" if p.required else "=")
            for p in answer.parameters
        ]
        return {"takes": [*takes, *(["**"] if answer.any_keyword else [])], "line": answer.line}
    if isinstance(answer, tuple) and all(isinstance(item, str) for item in answer):
        return list(answer)
    if isinstance(answer, tuple) and isinstance(answer[0], Import):
        return [{"from": "." * i.level + i.module, "name": i.name, "line": i.line} for i in answer]
    if isinstance(answer, tuple):
        return [
            {"call": sorted(c.keywords), "positional": c.positional, "line": c.line} for c in answer
        ]
    assert answer is None or isinstance(answer, bool | int | str), answer
    return answer


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        parameters = tuple(
            Parameter(text.strip("*="), not text.endswith("="), text.startswith("*"))
            for text in value["takes"]
            if text != "**"
        )
        return Signature(parameters, "**" in value["takes"], value["line"])
    if isinstance(value, list) and value and "from" in value[0]:
        return tuple(_import(item) for item in value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if isinstance(value, list):
        return tuple(Call(frozenset(c["call"]), c["positional"], c["line"]) for c in value)
    return value


def _import(item: dict[str, Any]) -> Import:
    module = item["from"].lstrip(".")
    return Import(module, len(item["from"]) - len(module), item["name"], item["line"])


def without_lines(value: Any) -> Any:
    """Facts without line numbers, which differ between builds and mean nothing."""
    if isinstance(value, dict):
        return {
            k: None if k.startswith("line ") and v is not None else without_lines(v)
            for k, v in value.items()
            if k != "line" and not (k.startswith("line ") and v is None)
        }
    return [without_lines(item) for item in value] if isinstance(value, list) else value


def plan_over(speculators: Any, vllm: Any, speculators_version: str, vllm_version: str) -> Plan:
    """The plan for a pair, whatever answers the probes: source, snapshot or listener."""
    given = {
        "vllm": _package("vllm", vllm_version, vllm),
        "speculators": _package("speculators", speculators_version, speculators),
        "transformers": Package("transformers", None, ()),
    }
    return make_plan(given)


def _package(name: str, version: str, tree: Any) -> Package:
    package = Package(name, Path(name), (Distribution(name, version, Path()),))
    vars(package)["source"] = tree  # in place of its files
    return package


@functools.cache
def snapshot(project: str, version: str) -> Snapshot:
    return Snapshot(project, version)


def plan(speculators_version: str, vllm_version: str) -> Plan:
    """The plan for a pair of snapshots."""
    return plan_over(
        snapshot("speculators", speculators_version),
        snapshot("vllm", vllm_version),
        speculators_version,
        vllm_version,
    )


def verdicts(plan: Plan) -> dict[str, str]:
    """What each probe that the pair alone decides concluded."""
    return {
        d.patch.id: d.finding.verdict.value for d in plan.decisions if d.patch.depends_on == "pair"
    }


def record(vllm_versions: Iterable[str]) -> None:
    """Write the snapshots of these releases, and of every speculators release."""
    ours = {
        v: Listener(SourceTree(releases.package("speculators", v)), "speculators", _recorded(v))
        for v in SPECULATORS
    }
    for version in vllm_versions:
        content = listen(version, SourceTree(releases.package("vllm", version)), ours)
        _write(FOLDER / "vllm" / f"{version}.json", {"release": version, **content})
    for version, listener in ours.items():
        content = {"release": version, "modules": listener.facts}
        _write(FOLDER / "speculators" / f"{version}.json", content)


def listen(version: str, tree: Any, speculators: dict[str, Any]) -> dict[str, Any]:
    """The facts every probe asks of a vLLM release, and the verdicts for each speculators."""
    listener = Listener(tree, "vllm", {})
    found = {
        name: verdicts(plan_over(ours, listener, name, version))
        for name, ours in speculators.items()
    }
    return {"modules": listener.facts, "verdicts": found}


def unknown_forms(plan: Plan) -> list[str]:
    """What the probes do not know, a line each."""
    return [
        unknown_form(d.patch.id, d.finding)
        for d in plan.decisions
        if d.finding.verdict is Verdict.UNKNOWN_FORM
    ]


def compare(base: str, version: str) -> tuple[list[str], list[str]]:
    """Hold a release's published source against a snapshot.

    Returns:
        What differs, by boundary, with the file; and the unknown forms, with file and line.
    """
    changes: list[str] = []
    unknown: list[str] = []
    then, now = snapshot("vllm", base), SourceTree(releases.package("vllm", version))
    for name in SPECULATORS:
        ours = SourceTree(releases.package("speculators", name))
        for patch in PATCHES:
            if patch.depends_on != "pair":
                continue
            (old, before), (new, after) = (
                _sound(patch, tree, ours, release)
                for tree, release in ((then, base), (now, version))
            )
            changes += [f"{patch.id}: {line}" for line in _differences(old, new)]
            if before.verdict is not after.verdict:
                changes.append(
                    f"{patch.id}: for speculators {name} {before.verdict.value} in {base}, "
                    f"{after.verdict.value} in {version}: {after.where}: {after.found}"
                )
            if after.verdict is Verdict.UNKNOWN_FORM:
                unknown.append(unknown_form(patch.id, after))
    return list(dict.fromkeys(changes)), list(dict.fromkeys(unknown))


def _sound(patch: Patch, vllm: Any, ours: Any, version: str) -> tuple[dict[str, Any], Finding]:
    """What one probe asks and is answered, and what it concludes."""
    listener = Listener(vllm, "vllm", {})
    package = _package("vllm", version, vllm)
    finding = run_probe(patch, Sources(listener, ours, None, package))
    return listener.facts, finding


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    old, new = without_lines(old), without_lines(new)
    for module in sorted(old.keys() | new.keys()):
        before, after = old.get(module) or {}, new.get(module) or {}
        if bool(before) != bool(after) and module in old and module in new:
            yield f"vllm.{module} is {'there' if after else 'gone'} now"
            continue
        for question in sorted(before.keys() & after.keys()):
            if before[question] != after[question]:
                change = _change(before[question], after[question])
                yield f"{after.get('path', 'vllm')}: {question}: {change}"


def _change(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        lost = [p for p in before["takes"] if p not in after["takes"]]
        gained = [p for p in after["takes"] if p not in before["takes"]]
        parts = [f"lost {', '.join(lost)}"] * bool(lost) + [f"gained {', '.join(gained)}"] * bool(
            gained
        )
        return "; ".join(parts) or "takes its parameters in another order"
    return f"was {_short(before)}, is {_short(after)}"


def _short(answer: Any) -> str:
    return f"({', '.join(answer['takes'])})" if isinstance(answer, dict) else repr(answer)


def unknown_form(boundary: str, finding: Finding) -> str:
    return f"{boundary}: {finding.where}: found {finding.found}; expected {finding.expected}"


def _recorded(version: str) -> dict[str, Facts | None]:
    """What is known of a speculators release; some is asked with some vLLM releases only."""
    try:
        return Snapshot("speculators", version).content["modules"]
    except LookupError:
        return {}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(content))


def dumps(content: dict[str, Any]) -> str:
    """JSON with a fact a line, in a fixed order."""
    lines = []
    for name, facts in sorted(content["modules"].items()):
        body = ",\n".join(
            f"      {json.dumps(q)}: {json.dumps(a)}" for q, a in sorted((facts or {}).items())
        )
        lines.append(f"    {json.dumps(name)}: " + (f"{{\n{body}\n    }}" if facts else "null"))
    parts = [f'  "release": {json.dumps(content["release"])}']
    parts.append('  "modules": {\n' + ",\n".join(lines) + "\n  }")
    if "verdicts" in content:
        rows = ",\n".join(
            f"    {json.dumps(v)}: {json.dumps(found)}" for v, found in content["verdicts"].items()
        )
        parts.append('  "verdicts": {\n' + rows + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"
