"""What goes over the wire, and what does not get in."""

import math
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from envserver import wire
from envserver.wire import DELTA, MAX_ID, REPLY, Request, parse_answer, parse_request

PAYLOADS = st.dictionaries(
    st.text(),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(-(2**63), 2**63), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=3,
)


@given(PAYLOADS)
def test_what_is_encoded_is_decoded_here_and_by_plain_msgpack(payload: dict[str, Any]) -> None:
    data = wire.encode(payload)
    assert wire.decode(data) == payload
    assert wire.decode(zmq.Frame(data)) == payload
    assert msgpack.unpackb(data, raw=False, strict_map_key=False) == payload


@given(st.binary())
def test_any_bytes_are_a_map_or_a_value_error(data: bytes) -> None:
    try:
        decoded = wire.decode(data)
    except ValueError:
        return
    assert isinstance(decoded, dict)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\x81\xa1\xff\x01", "utf-8"),
        (b"\x81\x90\x01", "unhashable"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),  # a list of 4 billion
        (b"\x91" * 100_000, "not msgpack"),
        (b"\x80\x80", "not msgpack"),
        (b"\x93\x01\x02\x03", "not a msgpack map but a list"),
    ],
)
def test_a_bad_payload_is_told_what_is_bad_about_it(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        wire.decode(data)


class Model(BaseModel):
    name: str
    sizes: tuple[int, ...]


class Array:
    """Like one of numpy's."""

    def tolist(self) -> list[int]:
        return [1, 2]


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (Model(name="a", sizes=(1, 2)), {"name": "a", "sizes": [1, 2]}),
        (PurePosixPath("/tmp/x"), "/tmp/x"),
        (Array(), [1, 2]),
        ({1, 2}, [1, 2]),
        (datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)),
        (math.inf, math.inf),
    ],
)
def test_what_envs_return_beside_plain_values_arrives(value: object, arrives: object) -> None:
    assert wire.decode(wire.encode({"it": value})) == {"it": arrives}


class Hostile:
    def model_dump(self) -> dict[str, Any]:
        raise ZeroDivisionError("in a hook")


LOOP: dict[str, Any] = {}
LOOP["loop"] = LOOP


@pytest.mark.parametrize("value", [object(), 2**64, "\udc80", Hostile(), LOOP, {(1, 2): object}])
def test_what_cannot_be_encoded_is_a_value_error(value: object) -> None:
    with pytest.raises(ValueError, match="not serialisable"):
        wire.encode({"it": value})


def test_a_failure_can_say_anything() -> None:
    assert wire.decode(wire.failure("no \udc80 text")) == {"success": False, "error": "no \\udc80 text"}


def test_a_success_has_no_error_beside_it() -> None:
    assert wire.decode(wire.success({"reward": 1.0})) == {"success": True, "error": None, "reward": 1.0}


def test_a_request_is_four_frames() -> None:
    big = zmq.Frame(b"x" * 100_000)
    assert parse_request([b"c", b"id", b"run", b"p"]) == Request(b"c", b"id", b"run", b"p")
    assert parse_request([b"c", b"\xff\x00", b"run", big]) == Request(b"c", b"\xff\x00", b"run", big)
    assert parse_request([b"c", b"", b"run", b"p"]) is not None
    assert parse_request([b"c", b"i" * MAX_ID, b"run", b"p"]) is not None


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"c"],
        [b"c", b"id", b"run"],
        [b"c", b"", b"id", b"run", b"p"],
        [b"c", b"i" * (MAX_ID + 1), b"run", b"p"],
        [b"c", zmq.Frame(b"i" * 100_000), b"run", b"p"],
        [b"c", b"id", b"m" * 65, b"p"],
        [b"c", b"id", zmq.Frame(b"m" * 100_000), b"p"],
    ],
)
def test_what_is_no_request_cannot_be_answered(parts: list[Any]) -> None:
    assert parse_request(parts) is None


def test_an_answer_is_a_delta_or_a_reply() -> None:
    assert parse_answer([b"id", b"delta", b"d"]) == (b"id", DELTA, b"d")
    assert parse_answer([b"id", b"reply", b"d"]) == (b"id", REPLY, b"d")
    for parts in ([b"id", b"reply"], [b"id", b"other", b"d"], [b"i" * 129, b"reply", b"d"], [b"id", b"d", b"d", b"d"]):
        assert parse_answer(parts) is None


@pytest.mark.parametrize("request_id", [b"4f", b"\xff\xfe", b"", "über".encode()])
def test_a_cancel_names_its_run_whatever_its_id(request_id: bytes) -> None:
    assert wire.cancel_target(wire.cancel_payload(request_id)) == request_id


def test_ids_that_are_text_are_named_as_text_for_the_peers_look_for_text() -> None:
    assert msgpack.unpackb(wire.cancel_payload(b"4f")) == {"request_id": "4f"}


@pytest.mark.parametrize("payload", [b"", b"\xc1", wire.encode({}), wire.encode({"request_id": 4})])
def test_a_cancel_of_nothing_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"not msgpack|names its run"):
        wire.cancel_target(payload)
