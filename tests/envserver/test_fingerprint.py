"""Which runs are of one task: the rule, and that no bytes can break it."""

from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from envserver.fingerprint import LOOKED_AT, fingerprint, succeeded
from envserver.wire import failure, success

TASK = {"idx": 3, "prompt": "do it", "resources": {"cpu": 2}}


def of(**payload: Any) -> bytes:
    return fingerprint(msgpack.packb(payload))


def test_a_run_of_verifiers_is_of_the_task_in_its_task_data() -> None:
    task = of(task_data=TASK, client={"base_url": "a"}, model="m", sampling={"temperature": 1})
    assert task == of(task_data=TASK, client={"base_url": "b", "headers": {"x": "1"}}, model="n", sampling={})
    assert task == of(sampling={}, model="n", client={}, request_id="7", task_data=TASK), "in whatever order"
    assert task != of(task_data={**TASK, "idx": 4}, client={"base_url": "a"}, model="m", sampling={"temperature": 1})


def test_any_other_payload_is_a_task_but_for_what_differs_between_two_tries() -> None:
    task = of(do="this", to=[1, 2], request_id="1", client="a", model="m")
    assert task == of(model="n", to=[1, 2], do="this", client="b")
    assert task != of(do="that", to=[1, 2])
    assert task != of(do="this", to=[1, 2], more=None)
    assert of() == of(model="m") != of(do="this")
    assert of(a="b", c="d") != of(a="bc", d=""), "no value runs into the next key"


def test_equal_bytes_are_one_task_also_where_they_are_no_map() -> None:
    for data in (b"", b"\xc1", b"plain", msgpack.packb([1, 2])):
        assert fingerprint(data) == fingerprint(bytes(data))
        assert fingerprint(data) == fingerprint(zmq.Frame(data))
        assert fingerprint(data) != fingerprint(data + b"\0")


def test_of_a_large_payload_only_the_beginning_is_looked_at() -> None:
    task = {"idx": 1, "image": b"x" * LOOKED_AT}
    assert of(task_data=task, model="m") == of(task_data=task, model="n")
    assert of(task_data=task, model="m") != of(task_data={**task, "idx": 2}, model="m")


@given(st.binary(max_size=200))
def test_no_bytes_break_it(data: bytes) -> None:
    assert len(fingerprint(data)) == 16
    assert fingerprint(b"\x81" + msgpack.packb("task_data") + data)
    succeeded(data)


@given(st.integers(1, 5_000))
def test_no_depth_breaks_it(depth: int) -> None:
    nested = b"\x81" + msgpack.packb("task_data") + b"\x91" * depth + b"\xc0"
    assert len(fingerprint(nested)) == 16


@pytest.mark.parametrize(
    ("reply", "well"),
    [
        (success({"pid": 3}), True),
        (failure("no"), False),
        (msgpack.packb({"error": None, "traces": [1, {"success": True}], "success": False}), False),
        (msgpack.packb({"head": {}, "success": True}), True),
        (b"", False),
        (b"\xc1", False),
        (msgpack.packb(["success", True]), False),
    ],
)
def test_a_reply_is_a_success_if_it_says_so(reply: bytes, well: bool) -> None:
    assert succeeded(reply) is well
