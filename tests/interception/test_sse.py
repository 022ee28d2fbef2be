"""Reading server-sent events: the same events out, however the bytes are chunked."""

import itertools
import json
import math
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from interception.sse import SseEvent, SseParser, dumps, loads, sse

Fields = tuple[str | None, str | None, str | None]


def parse(*chunks: bytes) -> list[SseEvent]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.end()


def fields(events: list[SseEvent]) -> list[Fields]:
    return [(event.event, event.data, event.id) for event in events]


TABLE: dict[str, tuple[bytes, list[Fields]]] = {
    "LF": (b"event: a\ndata: 1\n\ndata: 2\n\n", [("a", "1", None), (None, "2", None)]),
    "CRLF": (b"event: a\r\ndata: 1\r\n\r\ndata: 2\r\n\r\n", [("a", "1", None), (None, "2", None)]),
    "CR": (b"event: a\rdata: 1\r\rdata: 2\r\r", [("a", "1", None), (None, "2", None)]),
    "mixed": (b"event: a\r\ndata: 1\r\ndata: 2\n\r\n", [("a", "1\n2", None)]),
    "LF then CR": (b"data: 1\n\rdata: 2\n\r", [(None, "1", None), (None, "2", None)]),
    "CR, then CRLF": (b"data: 1\r\r\ndata: 2\r\r\n", [(None, "1", None), (None, "2", None), (None, None, None)]),
    "no space": (b"event:a\ndata:1\nid:7\n\n", [("a", "1", "7")]),
    "two spaces": (b"data:  1 \n\n", [(None, " 1 ", None)]),
    "several lines": (b"data: a\ndata:\ndata\ndata: b\n\n", [(None, "a\n\n\nb", None)]),
    "empty data": (b"data:\n\ndata\n\n", [(None, "", None), (None, "", None)]),
    "a colon in the value": (b"data: a: b\n\n", [(None, "a: b", None)]),
    "comment alone": (b": ping\n\ndata: 1\n\n", [(None, None, None), (None, "1", None)]),
    "comment inside": (b"data: 1\n: k\ndata: 2\n\n", [(None, "1\n2", None)]),
    "comment before": (b": k\n: k\ndata: 1\n\n", [(None, "1", None)]),
    "event without data": (b"event: a\n\ndata: 1\n\n", [("a", None, None), (None, "1", None)]),
    "id without data": (b"id: 1\n\n", [(None, None, "1")]),
    "an id with a NUL": (b"id: 1\0\ndata: 1\n\n", [(None, "1", None)]),
    "unknown fields": (b"retry: 5\nDATA: 1\n data: 2\nfoo\ndata: 3\n\n", [(None, "3", None)]),
    "more blank lines": (b"\n\ndata: 1\n\n\n", [(None, None, None)] * 2 + [(None, "1", None), (None, None, None)]),
    "BOM": (b"\xef\xbb\xbfdata: 1\n\n", [(None, "1", None)]),
    "BOM on a blank line": (b"\xef\xbb\xbf\ndata: 1\n\n", [(None, None, None), (None, "1", None)]),
    "BOM and CRs": (b"\xef\xbb\xbf\rdata: 1\r\r", [(None, None, None), (None, "1", None)]),
    "BOM later": (b"data: 1\n\n\xef\xbb\xbfdata: 2\n\n", [(None, "1", None), (None, None, None)]),
    "BOM after a blank line": (b"\n\xef\xbb\xbfdata: 2\n\n", [(None, None, None), (None, None, None)]),
    "half a BOM": (b"\xef\xbb", [(None, None, None)]),
    "not UTF-8": (b"data: a\xffb\xc3\n\n", [(None, "a\ufffdb\ufffd", None)]),
    "other separators": ("data: a\u2028b\x0bc\x0cd\x85e\n\n".encode(), [(None, "a\u2028b\x0bc\x0cd\x85e", None)]),
    "no blank line": (b"data: 1\n\ndata: 2\n", [(None, "1", None), (None, "2", None)]),
    "no line end": (b'data: 1\n\ndata: {"a', [(None, "1", None), (None, '{"a', None)]),
    "CR at the end": (b"data: 1\n\r", [(None, "1", None)]),
    "nothing": (b"", []),
}

CORPUS = b"".join(
    [
        b'\xef\xbb\xbf: hi\r\n\r\nevent: message_start\r\ndata: {"type": "message_start"}\r\n\r\n',
        'data: {"text": "über ☃"}\n\n: k\nid: 1\ndata: a\r\ndata:b\rdata: c\n\n'.encode(),
        b"data: cr\r\rdata: cr again\r\r\ndata: \xe2\x98\n\n\n\r\n\r\rdata: [DONE]\n\ndata: rest",
    ]
)


@pytest.mark.parametrize("case", TABLE)
def test_table_at_once_and_bytewise(case: str) -> None:
    stream, expected = TABLE[case]
    assert fields(parse(stream)) == expected
    bytewise = parse(*(stream[at : at + 1] for at in range(len(stream))))
    assert bytewise == parse(stream)
    assert b"".join(event.raw for event in bytewise) == stream


def test_every_byte_boundary() -> None:
    whole = parse(CORPUS)
    assert b"".join(event.raw for event in whole) == CORPUS
    assert [event.data for event in whole if event.data is not None] == [
        '{"type": "message_start"}',
        '{"text": "über ☃"}',
        "a\nb\nc",
        "cr",
        "cr again",
        "\ufffd",
        "[DONE]",
        "rest",
    ]
    for one in range(len(CORPUS) + 1):
        assert parse(CORPUS[:one], CORPUS[one:]) == whole
        for two in range(one, min(one + 4, len(CORPUS))):
            assert parse(CORPUS[:one], b"", CORPUS[one:two], CORPUS[two:]) == whole


BYTES = st.lists(
    st.sampled_from(
        [b"\r", b"\n", b"\r\n", b"data", b":", b" ", b"x", b"\xef", b"\xbb", b"\xbf", b"event: e", b"id: 1"]
    )
    | st.binary(max_size=3),
    max_size=30,
).map(b"".join)


@given(BYTES, st.data())
@example(b"a\r\r\n\n", None)
def test_any_chunking_gives_the_same_events(stream: bytes, data: st.DataObject | None) -> None:
    cuts = list(range(len(stream) + 1))
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    edges = [0, *cuts, len(stream)]
    events = parse(*(stream[start:end] for start, end in itertools.pairwise(edges)))
    assert events == parse(stream)
    assert b"".join(event.raw for event in events) == stream


@given(BYTES)
def test_line_ends_make_no_difference(stream: bytes) -> None:
    plain = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    with_data = [found for found in fields(parse(plain)) if found[1] is not None]
    for line_end in (b"\r\n", b"\r"):
        other = parse(plain.replace(b"\n", line_end))
        assert [found for found in fields(other) if found[1] is not None] == with_data


@pytest.mark.parametrize("line_end", [b"\n", b"\r"])
def test_an_event_is_out_as_soon_as_its_blank_line_is_there(line_end: bytes) -> None:
    [event] = SseParser().feed(b"data: 1" + 2 * line_end)
    assert event.data == "1"


def test_a_crlf_event_waits_for_the_lf_that_belongs_to_it() -> None:
    parser = SseParser()
    assert parser.feed(b"data: 1\r\n\r") == []
    [event] = parser.feed(b"\n")
    assert event.raw == b"data: 1\r\n\r\n"
    assert parser.end() == []


OBJECTS: list[tuple[bytes, str | None, object]] = [
    (b'data: {"a":1}\n\n', None, {"a": 1}),
    (b'event: e\ndata: {"a":1}\n\n', "e", {"a": 1}),
    (b'event: e\r\ndata: {"a":1}\r\n\r\n', "e", {"a": 1}),
    (b'data: {"a":1}\nevent: e\n\n', "e", {"a": 1}),
    (b'data: {"a":1}\n: k\n\n', None, {"a": 1}),
    (b'data: {"a":\ndata: 1}\n\n', None, {"a": 1}),
    (b'data: {"a":\n1}\n\n', None, None),
    (b'data: {"a":\r1}\n\n', None, None),
    (b'event: e\ndata: {"a":\n1}\n\n', "e", None),
    (b'event: e\nevent: f\ndata: {"a":1}\n\n', "f", {"a": 1}),
    (b'event: \ndata: {"a":1}\n\n', "", {"a": 1}),
    (b'event: e\xff\ndata: {"a":"\xff"}\n\n', "e\ufffd", {"a": "\ufffd"}),
    (b'data:  {"a":1} \n\n', None, {"a": 1}),
    (b'data:{"a":1}\n\n', None, {"a": 1}),
    (b'data: {"a":18446744073709551616}\n\n', None, {"a": 18446744073709551616}),
    (b'data: {"a":Infinity,"a":-Infinity}\n\n', None, {"a": -math.inf}),
    (b'data: {"a":"\\ud83d"}\n\n', None, {"a": "\ud83d"}),
    (b'data: {"a":1}}\n\n', None, None),
    (b"data: [1]\n\n", None, None),
    (b"data: [DONE]\n\n", None, None),
    (b"\n", None, None),
]


@pytest.mark.parametrize(("raw", "name", "value"), OBJECTS)
def test_an_event_is_the_same_whatever_is_asked_first(raw: bytes, name: str | None, value: object) -> None:
    for asked in itertools.permutations(["event", "json", "data"]):
        [event] = parse(raw)
        told = {attribute: getattr(event, attribute) for attribute in asked}
        assert (told["event"], told["json"]) == (name, value)
        assert told["data"] == SseEvent(raw).data


def test_end_tells_what_lacks_its_blank_line() -> None:
    complete, rest = parse(b"data: 1\n\ndata: 2\n")
    assert complete.complete
    assert not rest.complete
    assert [event.complete for event in parse(b"data: 1\n\r")] == [True]
    assert [event.complete for event in parse(b"data: 1\r")] == [False]
    parser = SseParser()
    parser.feed(b"data: 1")
    assert len(parser.end()) == 1
    assert parser.end() == []


@pytest.mark.parametrize("size", [256, 64 * 1024])
def test_a_large_event_takes_linear_time(size: int) -> None:
    stream = b'data: "' + 20 * 1024 * 1024 * b"x" + b'"\n\n'
    parser = SseParser()
    view = memoryview(stream)
    started = time.process_time()
    events = [event for at in range(0, len(stream), size) for event in parser.feed(bytes(view[at : at + size]))]
    # Less than 1 s; the square of it would be minutes.
    assert time.process_time() - started < 30
    assert [len(event.raw) for event in events] == [len(stream)]


class TestJson:
    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b'{"a": 1}', {"a": 1}),
            (b"{}", {}),
            (b"[1]", None),
            (b"1", None),
            (b"null", None),
            (b"[DONE]", None),
            (b'{"a', None),
            (b"", None),
            (b'{"a": "\\ud800"}', {"a": "\ud800"}),
            (b'{"a": ' + 100_000 * b"[" + 100_000 * b"]" + b"}", None),
            (b'{"a": ' + 5000 * b"9" + b"}", None),
        ],
    )
    def test_an_object_or_none(self, data: bytes, expected: object) -> None:
        [event] = parse(b"data: " + data + b"\n\n")
        if data.endswith(b"9}"):  # a float to orjson, too long for an int: either is fine, raising is not
            assert event.json is None or math.isinf(event.json["a"])
        else:
            assert event.json == expected

    def test_none_without_data(self) -> None:
        [event] = parse(b": k\n\n")
        assert event.json is None

    def test_nan_and_infinity(self) -> None:
        [event] = parse(b'data: {"a": NaN, "b": [Infinity, -Infinity]}\n\n')
        assert event.json is not None
        assert math.isnan(event.json["a"])
        assert event.json["b"] == [math.inf, -math.inf]

    def test_it_is_parsed_once(self) -> None:
        [event] = parse(b'data: {"a": 1}\n\n')
        assert event.json is event.json

    def test_loads_and_dumps_of_what_orjson_refuses(self) -> None:
        assert loads('{"a": [NaN]}')["a"][0] != 0
        assert json.loads(dumps({"a": 2**80, "b": "\ud800"})) == {"a": 2**80, "b": "\ud800"}
        assert dumps({"a": math.nan}) == b'{"a":null}'
        with pytest.raises(ValueError, match="cannot be written"):
            dumps({"a": object()})

    def test_sse_is_read_back(self) -> None:
        [event] = parse(sse({"type": "a.b", "text": "one\ntwo\r\n"}, named=True))
        assert (event.event, event.json) == ("a.b", {"type": "a.b", "text": "one\ntwo\r\n"})
        assert sse({"a": 1}) == b'data: {"a":1}\n\n'
