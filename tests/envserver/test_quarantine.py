"""What the quarantine costs the broker: with the real dispatcher, and no process."""

import time

import msgpack
import pytest

from envserver.dispatch import Dispatcher
from envserver.limits import PoolPolicy
from envserver.poison import Death, Suspects
from envserver.quarantine import Quarantine
from envserver.slots import Slots
from envserver.worker import Request

POLICY = PoolPolicy()


class Broker:
    """All tasks of `payloads` were there at two deaths. `woken`: how often the pool was asked to look."""

    def __init__(self, payloads: list[bytes]) -> None:
        self.woken = 0
        self.dispatcher = Dispatcher(
            on_missed=lambda: "nobody is ready",
            on_load=lambda: None,
            on_health=lambda worker, data: None,
            on_idle=lambda worker: None,
            on_withdrawn=lambda run: self.quarantine.withdrawn(run),
        )
        self.slots = Slots(POLICY, max_workers=4, elastic=False, multiplex=16)
        self.quarantine = Quarantine(
            POLICY,
            self.slots,
            self.dispatcher,
            now=lambda: 0.0,
            lone=list,
            retire=lambda worker: None,
            wake=self._wake,
        )
        tasks = {Request(b"client", b"", payload).task for payload in payloads}
        for pid in range(POLICY.suspect_after):
            self.quarantine._records.died(tasks, Death(pid, "was killed by SIGKILL", time.time()), 0.0, alone=False)
        self.quarantine.look()

    def run(self, client: bytes, request_id: int, payload: bytes) -> None:
        self.dispatcher.on_request([client, b"%d" % request_id, b"run", payload])

    def _wake(self) -> None:
        self.woken += 1


def test_a_client_that_leaves_with_all_that_wait_is_one_look_and_not_one_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,024 looks at 1,024 tasks would hold the broker up for a second."""
    payloads = [msgpack.packb({"task": number}) for number in range(POLICY.suspects_waiting)]
    broker = Broker(payloads)
    for number, payload in enumerate(payloads):
        broker.run(b"client", number, payload)
    assert broker.quarantine.waiting == POLICY.suspects_waiting
    broker.quarantine.look()
    assert broker.slots.lone_wanted == 1

    looks = 0
    released = Suspects.released

    def counted(suspects: "Suspects[Request]", now: float) -> object:
        nonlocal looks
        looks += 1
        return released(suspects, now)

    monkeypatch.setattr(Suspects, "released", counted)
    before = broker.woken
    broker.dispatcher.abandon(b"client")
    assert broker.quarantine.waiting == 0
    assert looks == 0
    assert broker.woken > before
    broker.quarantine.look()
    assert broker.slots.lone_wanted == 0, "nobody waits for a lone worker any more"
