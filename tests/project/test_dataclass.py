"""Dataclasses of the package behave as the standard library's, and are what its modules use."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import vajra_py
from vajra_py.dataclass import dataclass


def _body(decorate: Any) -> Any:
    class Order:
        """One that has all kinds of fields."""

        name: str
        price: float = 1.5
        tags: list[str] = dataclasses.field(default_factory=list, compare=False)
        note: str = dataclasses.field(default="none", repr=False, kw_only=True)
        total: float = dataclasses.field(init=False, default=0.0)

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", 2 * self.price)

    return decorate(Order)


def _both(**options: bool) -> tuple[Any, Any]:
    return _body(dataclass(**options)), _body(dataclasses.dataclass(**options))


OPTIONS = [{"frozen": True, "slots": True}, {"frozen": True}, {"slots": True}, {}, {"eq": False, "slots": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_dataclass_is_made_shown_and_compared_as_the_standard_one(options: dict[str, bool]) -> None:
    ours, standard = _both(**options)
    for given in (("a",), ("a", 2.0, ["x"])):
        one, other = ours(*given, note="hidden"), standard(*given, note="hidden")
        assert repr(one) == repr(other)
        assert dataclasses.asdict(one) == dataclasses.asdict(other)
        assert ours.__match_args__ == standard.__match_args__
        same = ours(given[0], *given[1:2], tags=["y"], note="hidden")
        assert (one == same) == (other == standard(given[0], *given[1:2], tags=["y"], note="hidden"))
        assert one != ours("b")
        assert one != other
    assert ours("a").tags is not ours("a").tags
    assert dataclasses.replace(ours("a"), price=4.0).total == 8.0
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(standard).parameters)
    assert ours.__init__.__annotations__ == standard.__init__.__annotations__
    assert hasattr(ours("a"), "__dict__") == hasattr(standard("a"), "__dict__")


@pytest.mark.parametrize("options", OPTIONS)
def test_a_hash_is_there_where_the_standard_one_has_it(options: dict[str, bool]) -> None:
    ours, standard = _both(**options)
    try:
        hash(standard("a"))
    except TypeError:
        with pytest.raises(TypeError, match="unhashable"):
            hash(ours("a"))
    else:
        first, second = ours("a", tags=["x"]), ours("a", tags=["y"])
        assert (hash(first) == hash(second)) == options.get("eq", True)


@pytest.mark.parametrize("slots", [True, False])
def test_a_frozen_one_refuses_changes(slots: bool) -> None:
    ours, _ = _both(frozen=True, slots=slots)
    one = ours("a")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'price'"):
        one.price = 3.0
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'price'"):
        del one.price
    assert one.price == 1.5


def test_missing_and_unknown_arguments_are_named() -> None:
    ours, _ = _both(frozen=True, slots=True)
    with pytest.raises(TypeError, match=r"Order\.__init__\(\) missing 1 required positional argument: 'name'"):
        ours()
    with pytest.raises(TypeError, match="unexpected keyword argument 'weight'"):
        ours("a", weight=1)


@dataclass(frozen=True, slots=True)
class Point:
    """A point."""

    x: int
    y: int = 0


@dataclass(frozen=True, slots=True)
class Named(Point):
    """A point with a name."""

    name: str = ""


class Moved(Point):
    """A point that has more to it than fields."""

    def __init__(self, x: int) -> None:
        super().__init__(x, 7)


@dataclass(frozen=True, slots=True)
class Nothing:
    """Without fields."""


def test_frozen_ones_are_pickled_and_copied() -> None:
    for one in (Point(1, 2), Named(1, 2, "c"), Moved(3), Nothing()):
        assert pickle.loads(pickle.dumps(one)) == one
        assert copy.deepcopy(one) == one
    assert hash(Nothing()) == hash(Nothing())


def test_classes_derive_from_one_another_and_from_plain_plug_ins() -> None:
    standard = dataclasses.dataclass(frozen=True)(type("Own", (Point,), {"__annotations__": {"z": "int"}, "z": 5}))
    assert [repr(one) for one in (Named(1, name="c"), standard(1))] == [
        "Named(x=1, y=0, name='c')",
        "Own(x=1, y=0, z=5)",
    ]
    assert Moved(3).y == 7
    assert Moved(3) == Moved(3) != Point(3, 7)
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclasses.dataclass(type("Loose", (Point,), {}))


def test_modules_of_the_package_use_it() -> None:
    package = Path(vajra_py.__file__).parent
    standard = re.compile(r"^from dataclasses import .*\bdataclass\b|\bdataclasses\.dataclass\b", re.MULTILINE)
    users = {str(path.relative_to(package)) for path in package.rglob("*.py") if standard.search(path.read_text())}
    assert users == {"dataclass.py"}, "from vajra_py.dataclass import dataclass"
