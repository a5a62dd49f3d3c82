"""JSON with the slips that people make: the same values as strict JSON, every slip listed with its place."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.reading.texts.lenient_json import MAX_DEPTH, Place, parse_lenient

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_standard_json_is_read_as_the_library_reads_it(value: object, indent: int | str | None, plain: bool) -> None:
    """Same value, no departure, whatever the layout."""
    text = json.dumps(value, indent=indent, ensure_ascii=plain)
    document = parse_lenient(text, where="x.json")
    # json.dumps writes infinities, which are no JSON: those are listed, and nothing else.
    assert {departure.kind for departure in document.departures} == ({"not-a-number"} if _infinite(value) else set())


def _infinite(value: object) -> bool:
    if isinstance(value, float):
        return math.isinf(value)
    if isinstance(value, dict):
        return any(_infinite(inner) for inner in value.values())
    return isinstance(value, list) and any(_infinite(inner) for inner in value)


@given(st.text(alphabet="{}[]\",:/*#'\\\n\t ae01.-+NTrue\ufeff", max_size=80) | st.text(max_size=40))
def test_any_text_is_a_value_or_an_error_with_its_place(text: str) -> None:
    """Nothing but InputError comes out, and it names a line of the text."""
    raised: InputError | None = None
    try:
        parse_lenient(text, where="x.json")
    except InputError as error:
        raised = error
    if raised is not None:
        assert raised.where is not None
        assert 1 <= int(raised.where.split(":")[1]) <= text.count("\n") + 1


SLIPS = {
    "comment": ('{"a": 1 /* one\n line */}', {"a": 1}, Place(1, 9)),
    "trailing-comma": ('{"a": [1,\n 2,],\n}', {"a": [1, 2]}, Place(2, 3)),
    "missing-comma": ('{"a": 1\n "b": 2}', {"a": 1, "b": 2}, Place(2, 2)),
    "single-quotes": ("{'a': 'it\\'s \"x\"'}", {"a": 'it\'s "x"'}, Place(1, 2)),
    "bare-key": ("{a: 1}", {"a": 1}, Place(1, 2)),
    "python-literal": ('{"a": None, "b": True}', {"a": None, "b": True}, Place(1, 7)),
    "repeated-key": ('{"a": 1,\n "a": 2}', {"a": 2}, Place(2, 2)),
    "byte-order-mark": ('\ufeff{"a": 1}', {"a": 1}, Place(1, 1)),
    "not-a-number": ('{"a": -Infinity}', {"a": -math.inf}, Place(1, 7)),
}


@pytest.mark.parametrize("kind", SLIPS)
def test_each_slip_is_read_and_placed(kind: str) -> None:
    """The value is what was meant; the first departure is of that kind and stands where it was made."""
    text, value, place = SLIPS[kind]
    document = parse_lenient(text, where="x.json")
    assert document.value == value
    assert (document.departures[0].kind, document.departures[0].place) == (kind, place)


def test_places_of_keys_and_elements() -> None:
    """Every key and element has its line and column; an absent one has that of its nearest parent."""
    document = parse_lenient('{\n  "a": {"b": [10,\n 20]}\n}', where="x.json")
    assert document.place(("a", "b")) == Place(2, 9)
    assert document.place(("a", "b", 1)) == Place(3, 2)
    assert document.place(("a", "c")) == Place(2, 3)
    assert document.place(()) == Place(1, 1)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1 "b": 2}', "1:9"),
        ('{"a" 1}', "1:6"),
        ('{"a": 01}', "1:7"),
        ('{"a": .5}', "1:7"),
        ('{"a": "x\n"}', "1:7"),
        ('{"a": 1}\n}', "2:1"),
        ('{"a": [1, 2}', "1:12"),
        ("", "1:1"),
        ('{"a": ' + "[" * (MAX_DEPTH + 5), f"1:{MAX_DEPTH + 7}"),
        ("1" * 5000, "1:1"),
        (r'{"a": "\x"}', "1:7"),
    ],
)
def test_what_cannot_be_read_is_placed(text: str, place: str) -> None:
    """Line and column of the trouble, and what is allowed."""
    with pytest.raises(InputError) as caught:
        parse_lenient(text, where="x.json")
    assert caught.value.where == f"x.json:{place}"
    assert caught.value.hint


def test_huge_exponents_are_no_finite_numbers() -> None:
    """1e999 is legal JSON and infinite in Python; it is listed."""
    assert parse_lenient("1e999", where="x").departures[0].kind == "not-a-number"
