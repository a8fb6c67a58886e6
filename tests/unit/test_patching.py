"""The ledger: every change is taken back to the identical object."""

from __future__ import annotations

import types

import pytest
import wrapt

from speculators_vllm_compat.patching import Ledger, Proxy


class Owner:
    def method(self, x):
        return x


class Child(Owner):
    pass


def double(wrapped, _instance, args, kwargs):
    return wrapped(*args, **kwargs) * 2


@pytest.fixture
def module():
    made = types.ModuleType("made")
    made.function = lambda x: x
    made.kind = int
    return made


def test_wrap_and_undo(module):
    before = dict(vars(module))
    ledger = Ledger()
    ledger.wrap(module, "function", double)
    ledger.wrap(module, "kind", double)
    ledger.wrap(module, "function", double)
    assert (module.function(3), module.kind("4")) == (12, 8)
    assert isinstance(5, module.kind)  # a wrapped class still tells its instances
    assert len(ledger) == 3
    ledger.undo()
    assert all(vars(module)[name] is value for name, value in before.items())
    assert len(ledger) == 0


def test_methods_of_a_class_and_its_subclass():
    original = vars(Owner)["method"]
    ledger = Ledger()
    ledger.wrap(Owner, "method", double)
    ledger.wrap(Child, "method", double)
    assert (Owner().method(1), Child().method(1)) == (2, 4)
    ledger.undo()
    assert vars(Owner)["method"] is original
    assert "method" not in vars(Child)


def test_undo_to_a_mark(module):
    ledger = Ledger()
    ledger.wrap(module, "function", double)
    mark = ledger.mark()
    ledger.wrap(module, "function", double)
    ledger.undo(mark)
    assert module.function(1) == 2
    ledger.undo()
    assert module.function(1) == 1


def test_somebody_elses_wrapt_wrapper_on_top_stays(module):
    original = module.function
    ledger = Ledger()
    ledger.wrap(module, "function", double)
    theirs = wrapt.wrap_object(module, "function", wrapt.FunctionWrapper, (double,))
    ledger.undo()
    assert module.function is theirs
    assert module.function(1) == 2
    assert theirs.__wrapped__ is original


def test_somebody_elses_plain_wrapper_on_top_stays_and_ours_passes_through(module):
    ledger = Ledger()
    ledger.wrap(module, "function", double)
    ours = module.function

    def theirs(x):
        return ours(x) + 1

    theirs.__wrapped__ = ours
    module.function = theirs
    assert module.function(1) == 3
    ledger.undo()
    assert module.function is theirs
    assert module.function(1) == 2


def test_a_replaced_attribute_is_not_touched(module):
    ledger = Ledger()
    ledger.wrap(module, "function", double)
    module.function = replacement = str
    ledger.undo()
    assert module.function is replacement


def test_proxy(module):
    class Extra(Proxy):
        def changed(self):
            return {"extra": lambda: "extra", "from_bytes": len}

    original = module.kind
    ledger = Ledger()
    ledger.proxy(module, "kind", Extra)
    assert (module.kind.extra(), module.kind.from_bytes(b"\x07")) == ("extra", 1)
    assert module.kind.__name__ == "int"
    held = module.kind
    ledger.undo()
    assert module.kind is original
    assert held.from_bytes(b"\x07", "big") == 7  # whoever kept it has the original's behaviour


def test_add(module):
    ledger = Ledger()
    ledger.add(module, "new", 1)
    with pytest.raises(AttributeError, match="only a missing name is added"):
        ledger.add(module, "function", 1)
    mapping = {"there": 1}
    ledger.add_item(mapping, "new", value := object())
    with pytest.raises(KeyError, match="only a missing entry is added"):
        ledger.add_item(mapping, "there", 2)
    assert mapping["new"] is value
    ledger.undo()
    assert not hasattr(module, "new")
    assert mapping == {"there": 1}


def test_added_names_that_somebody_replaced_stay(module):
    ledger = Ledger()
    ledger.add(module, "new", 1)
    mapping = {}
    ledger.add_item(mapping, "new", 1)
    module.new = mapping["new"] = "theirs"
    ledger.undo()
    assert (module.new, mapping["new"]) == ("theirs", "theirs")


def test_a_missing_name_cannot_be_wrapped(module):
    ledger = Ledger()
    with pytest.raises(AttributeError):
        ledger.wrap(module, "absent", double)
    assert len(ledger) == 0
