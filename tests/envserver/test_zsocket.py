"""A zmq socket on its file descriptor: nothing is lost, nothing blocks, nobody is starved."""

import asyncio
import select
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from envserver import EnvServerError
from envserver.wire import Part
from envserver.zsocket import CONNECTED, DISCONNECTED, LARGE, TURN, ConnectionWatch, ZSocket, check_address, listen
from tests.helpers import until

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def dealer(context: Context) -> Iterator[zmq.Socket[bytes]]:
    with context.socket(zmq.DEALER) as dealer:
        yield dealer


@pytest.fixture
async def pair(
    context: Context, dealer: zmq.Socket[bytes]
) -> AsyncIterator[tuple[zmq.Socket[bytes], ZSocket, list[list[Part]]]]:
    """A plain DEALER, and a ROUTER in the loop with what it has received."""
    router, address = listen(context, "tcp://127.0.0.1:0")
    received: list[list[Part]] = []
    zsocket = ZSocket(router, received.append)
    dealer.connect(address)
    yield dealer, zsocket, received
    zsocket.close()


async def test_every_message_arrives_once_and_in_order(
    pair: tuple[zmq.Socket[bytes], ZSocket, list[list[Part]]],
) -> None:
    dealer, _, received = pair
    dealer.setsockopt(zmq.SNDHWM, 0)
    for number in range(5000):
        dealer.send_multipart([b"%d" % number, b"x"])
    await until(lambda: len(received) == 5000)
    assert [parts[1] for parts in received] == [b"%d" % number for number in range(5000)]


async def test_sends_that_swallow_the_wake_up_lose_nothing(
    pair: tuple[zmq.Socket[bytes], ZSocket, list[list[Part]]],
) -> None:
    """Each send reads zmq's own commands, and with them the only sign that something has arrived."""
    dealer, zsocket, received = pair
    dealer.send(b"hello")
    await until(lambda: received)
    client = received[0][0]
    for number in range(3000):
        dealer.send(b"ping")
        assert zsocket.send([client, b"noise"])
        if number % 7 == 0:
            await until(lambda number=number: len(received) >= number + 2)  # type: ignore[misc]
        dealer.recv()
    await until(lambda: len(received) == 3001)


async def test_nor_do_sends_in_the_turn_of_another_socket(
    context: Context, pair: tuple[zmq.Socket[bytes], ZSocket, list[list[Part]]]
) -> None:
    dealer, zsocket, received = pair
    dealer.send(b"hello")
    await until(lambda: received)
    client = received[0][0]

    def swallow(parts: list[Part]) -> None:
        dealer.send(b"ping")
        # It has arrived, and not just now: zmq does not look for commands twice in a millisecond.
        assert select.select([zsocket.socket.getsockopt(zmq.FD)], [], [], 30)[0]
        time.sleep(0.005)
        assert zsocket.send([client, b"noise"])

    router, address = listen(context, "tcp://127.0.0.1:0")
    other = ZSocket(router, swallow)
    with context.socket(zmq.DEALER) as caller:
        caller.connect(address)
        for number in range(20):
            caller.send(b"go")
            await until(lambda number=number: len(received) == number + 2)  # type: ignore[misc]
    other.close()


async def test_others_have_their_turn_while_messages_pour_in(context: Context, dealer: zmq.Socket[bytes]) -> None:
    turns: list[int] = []

    def count(parts: list[Part]) -> None:
        turns[-1] += 1

    router, address = listen(context, "tcp://127.0.0.1:0")
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.connect(address)
    for _ in range(20 * TURN):
        dealer.send(b"x")
    zsocket = ZSocket(router, count)
    while sum(turns) < 20 * TURN:
        turns.append(0)
        await asyncio.sleep(0)
    assert max(turns) <= TURN
    zsocket.close()


async def test_large_frames_are_not_copied_and_can_be_sent_on(
    pair: tuple[zmq.Socket[bytes], ZSocket, list[list[Part]]],
) -> None:
    dealer, zsocket, received = pair
    big = bytes(range(256)) * (LARGE // 256)
    dealer.send_multipart([big[1:], big])
    await until(lambda: received)
    client, small, large = received[0]
    assert small == big[1:]
    assert isinstance(large, zmq.Frame)
    assert zsocket.send([client, large])
    dealer.setsockopt(zmq.RCVTIMEO, 30_000)
    assert dealer.recv() == big


async def test_a_send_without_room_says_so_and_sends_nothing_of_it(context: Context, dealer: zmq.Socket[bytes]) -> None:
    router, address = listen(context, "inproc://full")
    router.setsockopt(zmq.SNDHWM, 1)
    router.unbind(address)
    router.bind("inproc://full2")
    spaces: list[None] = []
    received: list[list[Part]] = []
    zsocket = ZSocket(router, received.append, lambda: spaces.append(None))
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect("inproc://full2")
    dealer.send(b"hello")
    await until(lambda: received)
    client = received[0][0]
    sent = 0
    while zsocket.send([client, b"%d" % sent, b"rest"]):
        sent += 1
    assert sent < 10
    del spaces[:]
    assert [dealer.recv_multipart() for _ in range(sent)] == [[b"%d" % number, b"rest"] for number in range(sent)]
    await until(lambda: spaces)  # told that there is room again
    assert zsocket.send([client, b"again", b"rest"])
    assert dealer.recv_multipart() == [b"again", b"rest"]
    zsocket.close()


async def test_nobody_there_is_an_error(pair: tuple[zmq.Socket[bytes], ZSocket, list[list[Part]]]) -> None:
    _, zsocket, _ = pair
    with pytest.raises(zmq.ZMQError) as caught:
        zsocket.send([b"stranger", b"x"])
    assert caught.value.errno == zmq.EHOSTUNREACH


async def test_a_message_that_cannot_be_handled_does_not_end_the_reading(
    context: Context, dealer: zmq.Socket[bytes]
) -> None:
    errors: list[Exception] = []
    received: list[Part] = []

    def handle(parts: list[Part]) -> None:
        if parts[1] == b"bad":
            raise RuntimeError("bad")
        received.append(parts[1])

    router, address = listen(context, "tcp://127.0.0.1:0")
    zsocket = ZSocket(router, handle, on_error=errors.append)
    dealer.connect(address)
    for word in (b"good", b"bad", b"good"):
        dealer.send(word)
    await until(lambda: received == [b"good", b"good"])
    assert [str(error) for error in errors] == ["bad"]
    zsocket.close()


async def test_a_connection_is_told_as_it_comes_and_goes_and_what_came_before_can_be_read(
    context: Context, dealer: zmq.Socket[bytes]
) -> None:
    router, address = listen(context, "tcp://127.0.0.1:0")
    events: list[int] = []
    received: list[list[Part]] = []
    watch = ConnectionWatch(dealer, events.append)
    zsocket = ZSocket(dealer, received.append)
    dealer.connect(address)
    await until(lambda: events == [CONNECTED])
    zsocket.send([b"hello"])
    client = router.recv_multipart()[0]
    router.send_multipart([client, b"last words"])
    router.close(linger=1000)
    await until(lambda: events == [CONNECTED, DISCONNECTED])
    while zsocket.receive_now():
        pass
    assert received == [[b"last words"]]
    watch.close()
    zsocket.close()


async def test_closing_twice_and_sending_afterwards_do_no_harm(
    pair: tuple[zmq.Socket[bytes], ZSocket, list[list[Part]]],
) -> None:
    _, zsocket, _ = pair
    zsocket.close()
    zsocket.close()
    assert zsocket.send([b"x"]) is False


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nonsense", ".*"),
        ("http://127.0.0.1:1", "Protocol not supported"),
        ("ipc:///no/such/folder/socket", "No such file or directory"),
    ],
)
async def test_an_address_that_cannot_be_had_is_told(context: Context, address: str, why: str) -> None:
    with pytest.raises(EnvServerError, match=f"^cannot listen on {address}: {why}$"):
        listen(context, address)


@pytest.mark.parametrize(("letters", "size"), [("x", 1), ("ö", 2)])
def test_a_path_too_long_for_a_socket_is_told_with_both_lengths(letters: str, size: int) -> None:
    check_address("ipc:///" + letters * (106 // size), "cannot listen on")
    with pytest.raises(EnvServerError, match="a socket's path has at most 107 bytes, and this has 109"):
        check_address("ipc:///" + letters * (108 // size), "cannot listen on")


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:99999", "inproc://nobody-else-sees-it", "ipc://", "tcp://\udcff:1", 5, None]
)
def test_what_zmq_would_take_for_another_address_is_told(address: Any) -> None:
    with pytest.raises(EnvServerError, match="cannot connect to"):
        check_address(address, "cannot connect to")


async def test_a_context_can_be_closed_after_what_is_no_address_at_all(context: Context) -> None:
    with pytest.raises(UnicodeEncodeError):
        listen(context, "tcp://\udcff:1")
    await asyncio.wait_for(asyncio.to_thread(context.term), 30)


async def test_a_file_is_not_replaced_by_a_socket(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with pytest.raises(EnvServerError, match=r"cannot listen on .*: there is a file, which is no socket"):
        listen(context, f"ipc://{path}")
    assert path.read_text() == "precious"


async def test_who_listens_on_a_path_keeps_it_and_what_a_killed_one_has_left_is_taken_over(
    context: Context, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/socket"
    router, _ = listen(context, address)
    with pytest.raises(EnvServerError, match="Address already in use"):
        listen(context, address)
    router.close(0)
    assert (tmp_path / "socket").exists()  # as zmq leaves it
    await until(lambda: _free(context, address))


def _free(context: Context, address: str) -> bool:
    try:
        listen(context, address)[0].close(0)
    except EnvServerError:
        return False  # zmq closes in a thread of its own
    return True
