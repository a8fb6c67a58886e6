"""The ledger beside other people's wrappers, whatever is put on and taken off in which order."""

from __future__ import annotations

import itertools
import types

import pytest
import wrapt

from speculators_vllm_compat.patching import Ledger, Proxy


def add(amount: int):
    """A wrapper, in wrapt's convention, that adds to the result."""

    def wrapper(wrapped, _instance, args, kwargs):
        return wrapped(*args, **kwargs) + amount

    return wrapper


def original() -> int:
    return 0


@pytest.fixture
def module():
    made = types.ModuleType("made")
    made.f = original
    return made


def _wrapt_wrap(module):
    handle = wrapt.wrap_object(module, "f", wrapt.FunctionWrapper, (add(100),))
    return lambda: wrapt.unwrap_object(module, "f", handle)


def _closure_wrap(module):
    """As most libraries do it, without functools.wraps."""
    below = module.f
    module.f = lambda: below() + 100

    def unwrap():
        module.f = below

    return unwrap


# Each order of two wraps of ours, one of theirs, and their undoing; a thing is put on first.
_ORDERS = [
    order
    for order in itertools.permutations(["ours", "ours too", "theirs", "undo", "they undo"])
    if order.index("theirs") < order.index("they undo")
    and order.index("undo") > max(order.index("ours"), order.index("ours too"))
]


@pytest.mark.parametrize("wrap", [_wrapt_wrap, _closure_wrap])
@pytest.mark.parametrize("order", _ORDERS, ids=", ".join)
def test_what_is_called_after_each_step(module, order, wrap):
    ledger, amounts, their_undo = Ledger(), {"ours": 1, "ours too": 10}, None
    expected, below_theirs = 0, 0
    for step in order:
        if step in amounts:
            ledger.wrap(module, "f", add(amounts[step]))
            expected += amounts[step]
        elif step == "theirs":
            below_theirs = expected
            their_undo = wrap(module)
            expected += 100
        elif step == "undo":
            ledger.undo()
            # Ours do nothing any more, wherever they are; theirs stays.
            expected = 100 if "they undo" not in order[: order.index("undo")] else 0
            expected *= "theirs" in order[: order.index("undo")]
            below_theirs = 0
        elif wrap is _closure_wrap:
            their_undo()  # puts back what it found, with whatever came on top of it later gone
            expected = below_theirs
        else:
            their_undo()
            expected -= 100
        assert module.f() == expected, step
    if order.index("they undo") < order.index("undo") or wrap is _wrapt_wrap:
        assert module.f is original


def test_a_plain_wrapper_taken_off_last_leaves_ours_passing_through(module):
    """What it puts back is our wrapper, which does nothing; the original is below it."""
    ledger = Ledger()
    ledger.wrap(module, "f", add(1))
    unwrap = _closure_wrap(module)
    ledger.undo()
    unwrap()
    assert module.f() == 0
    assert module.f.__wrapped__ is original
    ledger.wrap(module, "f", add(1))  # and applying again works on top of it
    assert module.f() == 1
    ledger.undo()
    assert module.f() == 0


def test_a_replaced_attribute_stays_replaced(module):
    ledger = Ledger()
    ledger.wrap(module, "f", add(1))
    module.f = replacement = lambda: 7
    ledger.wrap(module, "f", add(10))
    assert module.f() == 17
    ledger.undo()
    assert module.f is replacement


def test_a_deleted_attribute_stays_deleted(module):
    ledger = Ledger()
    ledger.wrap(module, "f", add(1))
    ledger.add(module, "g", 1)
    del module.f, module.g
    ledger.undo()
    assert not hasattr(module, "f")
    assert not hasattr(module, "g")
    assert len(ledger) == 0


class Base:
    def __init__(self):
        self.made_by = ["original"]

    def method(self):
        return 0

    @classmethod
    def class_method(cls):
        return cls.__name__

    @staticmethod
    def static_method():
        return 0


class Child(Base):
    pass


@pytest.mark.parametrize("owner", [Base, Child])
@pytest.mark.parametrize("name", ["__init__", "method", "class_method", "static_method"])
def test_methods(owner, name):
    before = {cls: dict(vars(cls)) for cls in (Base, Child)}
    calls = []

    def wrapper(wrapped, instance, args, kwargs):
        calls.append(instance)
        return wrapped(*args, **kwargs)

    ledger = Ledger()
    ledger.wrap(owner, name, wrapper)
    ledger.wrap(owner, name, wrapper)
    if name == "__init__":
        made = owner()
        assert made.made_by == ["original"]
    else:
        made = owner.__new__(owner)
        expected = {"class_method": owner.__name__}.get(name, 0)
        assert getattr(made, name)() == expected
    assert len(calls) == 2
    expected_instance = {"class_method": owner, "static_method": None}.get(name, made)
    assert calls == [expected_instance] * 2
    assert isinstance(made, Base)
    ledger.undo()
    for cls, names in before.items():
        assert vars(cls).keys() == names.keys()
        assert all(vars(cls)[key] is value for key, value in names.items())


def test_a_bound_method_taken_before_the_undo_passes_through():
    ledger = Ledger()
    ledger.wrap(Base, "method", add(1))
    bound = Base().method
    assert bound() == 1
    ledger.undo()
    assert bound() == 0


def test_undo_is_in_reverse_order(module):
    ledger = Ledger()
    done = []
    for number in range(3):
        ledger.add(module, f"name_{number}", number)
        ledger._undo.insert(len(ledger) - 1, lambda number=number: done.append(number))
    ledger.undo()
    assert done == [2, 1, 0]
    ledger.undo()  # nothing is left to be taken back twice
    assert done == [2, 1, 0]


def test_marks(module):
    ledger = Ledger()
    assert ledger.mark() == len(ledger) == 0
    ledger.add(module, "a", 1)
    first = ledger.mark()
    ledger.add(module, "b", 1)
    ledger.add_item(mapping := {}, "c", 1)
    assert (first, len(ledger)) == (1, 3)
    ledger.undo(first)
    assert (hasattr(module, "a"), hasattr(module, "b"), mapping) == (True, False, {})
    ledger.undo(first)
    assert hasattr(module, "a")
    ledger.undo()
    assert not hasattr(module, "a")


def test_add_to_a_subclass_does_not_touch_its_base():
    ledger = Ledger()
    ledger.add(Child, "method", replacement := object())
    assert (Child.method, vars(Base)["method"].__name__) == (replacement, "method")
    with pytest.raises(AttributeError, match="has 'method' already"):
        ledger.add(Child, "method", 1)
    assert len(ledger) == 1
    ledger.undo()
    assert "method" not in vars(Child)
    assert Child().method() == 0


@pytest.mark.parametrize("change", ["wrap", "proxy"])
@pytest.mark.parametrize("name", ["absent", "absent.inner"])
def test_a_missing_name_is_an_error_and_changes_nothing(module, change, name):
    before = dict(vars(module))
    ledger = Ledger()
    with pytest.raises(AttributeError):
        getattr(ledger, change)(module, name, wrapt.ObjectProxy)
    assert vars(module) == before
    assert len(ledger) == 0


def test_undo_goes_on_after_a_change_that_cannot_be_taken_back(module):
    class Stubborn(type):
        def __delattr__(cls, name):
            raise RuntimeError("no deletion")

    class Owner(metaclass=Stubborn):
        pass

    ledger = Ledger()
    ledger.wrap(module, "f", add(1))
    ledger.add(Owner, "name", 1)
    with pytest.raises(RuntimeError, match="no deletion"):
        ledger.undo()
    assert module.f is original


class Extra(Proxy):
    def changed(self):
        return {"extra": lambda: "extra"}


def test_proxy_under_a_wrapt_wrapper_of_somebody_else(module):
    ledger = Ledger()
    ledger.proxy(module, "f", Extra)
    theirs = wrapt.wrap_object(module, "f", wrapt.FunctionWrapper, (add(100),))
    ledger.undo()
    assert module.f is theirs
    assert theirs.__wrapped__ is original
    assert module.f() == 100


def test_proxy_under_a_plain_wrapper_of_somebody_else_passes_through(module):
    ledger = Ledger()
    ledger.proxy(module, "f", Extra)
    held = module.f
    _closure_wrap(module)
    ledger.undo()
    assert held.__wrapped__() == 0
    assert not hasattr(held, "extra")
