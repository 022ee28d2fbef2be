"""Which headers cross: the same ones as of any peer, whatever it has sent before."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from interception.headers import NOT_TO_CLIENT, NOT_TO_UPSTREAM, Sending, to_client, to_upstream
from interception.session import Upstream

WAYS = [(to_upstream, NOT_TO_UPSTREAM), (to_client, NOT_TO_CLIENT)]

NAMES = ["X-One", "x-one", "x-two", "Set-Cookie", "set-cookie", "Connection", "TE", "X-Forwarded-For", "Authorization",
         "Content-Length", "Keep-Alive"]  # fmt: skip


def said(headers: Mapping[str, str]) -> dict[str, str]:
    assert len({name.lower() for name in headers}) == len(headers)  # none is there twice
    return {name.lower(): value for name, value in headers.items()}


def expected(fields: list[tuple[str, str]], dropped: frozenset[str]) -> dict[str, str]:
    """By the words of the rules, one header after the other."""
    named = {
        word.strip().lower() for name, value in fields if name.lower() == "connection" for word in value.split(",")
    }
    left = [(name.lower(), value) for name, value in fields if name.lower() not in dropped | named]
    values = {name: [value for other, value in left if other == name] for name, _ in left}
    return {
        name: found[-1] if name == "set-cookie" else ", ".join(found)
        for name, found in values.items()
        if not name.startswith("x-forwarded-")
    }


@pytest.mark.parametrize(("way", "dropped"), WAYS, ids=["to the upstream", "to the client"])
@settings(max_examples=30)
@given(fields=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(["1", "2", "keep-alive", "x-one , X-Two"]))))
def test_what_crosses_is_what_the_rules_say(
    way: Callable[[Mapping[str, str]], CIMultiDict[str]], dropped: frozenset[str], fields: list[tuple[str, str]]
) -> None:
    assert said(way(CIMultiDict(fields))) == expected(fields, dropped)


def test_what_connection_names_is_looked_at_each_time() -> None:
    def sent(connection: str) -> CIMultiDict[str]:
        return CIMultiDict({"Connection": connection, "X-One": "1", "X-Two": "2"})

    assert said(to_upstream(sent("keep-alive"))) == {"x-one": "1", "x-two": "2"}
    assert said(to_upstream(sent("X-TWO, close"))) == {"x-one": "1"}
    assert said(to_upstream(sent("x-one"))) == {"x-two": "2"}


def test_what_no_header_may_hold_is_left_out_of_a_value_alone() -> None:
    given = CIMultiDict({"x-one": "a\x00b", "x-two": "tab\t and \xa0stay", "x-three": "plain"})
    assert said(to_client(given)) == {"x-one": "ab", "x-two": "tab\t and \xa0stay", "x-three": "plain"}


def test_calls_that_are_sent_alike_have_ids_of_their_own() -> None:
    sending = Sending(Upstream(base_url="http://host/v1"), "http://host/v1/x", CIMultiDict({"x-vf-call-id": "theirs"}))
    first, second = sending.headers("one"), sending.headers("two")
    assert first.getall("X-VF-Call-Id") == ["one"]
    assert second.getall("X-VF-Call-Id") == ["two"]
