"""Which runs are of one task: the rule, and that no bytes can break it."""

from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from envserver.fingerprint import KEYS, LOOKED_AT, fingerprint, succeeded
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


@pytest.mark.parametrize("broken", [b"\xc1", b"\x91" * 5_000, b"\xdf"], ids=["garbage", "too deep", "breaks off"])
def test_what_follows_where_a_map_cannot_be_read_any_further_is_no_less_of_the_task(broken: bytes) -> None:
    """Else an innocent would be refused for a poison that begins alike."""
    begins = b"\x84" + msgpack.packb("model") + msgpack.packb("m") + msgpack.packb("do") + msgpack.packb("it")
    one, other = (begins + msgpack.packb("to") + broken + what for what in (b"\x01", b"\x02"))
    assert fingerprint(one) == fingerprint(bytes(one)) != fingerprint(other)
    whole = msgpack.packb({"do": "it"})
    assert fingerprint(whole + b"\x01") != fingerprint(whole + b"\x02")


def test_a_map_of_millions_of_keys_costs_no_more_than_any_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looked at would hold the broker up for a minute."""
    skips = 0

    class Counted(msgpack.Unpacker):
        def skip(self) -> None:
            nonlocal skips
            skips += 1
            super().skip()

    monkeypatch.setattr(msgpack, "Unpacker", Counted)
    keys = 1_000_000
    one, other = (
        b"\xdf" + keys.to_bytes(4, "big") + b"\x01" * 2 * (keys - 1) + b"\x02" + end for end in (b"\0", b"\1")
    )
    assert fingerprint(one) != fingerprint(other)
    assert not succeeded(one)
    assert skips == 3 * 2 * KEYS
    many = {f"key {number}": number for number in range(KEYS - 3)}
    assert of(**many, model="m", request_id="1") == of(model="n", client="c", **many), "as many are told apart"


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
