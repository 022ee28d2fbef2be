"""Which request goes to which worker, and which answer to which client.

The hot path of the broker: frames are forwarded as they are, nothing is decoded but a cancel, and there is no task.
"""

import itertools
import logging
import math
from collections.abc import Callable

from envserver.metrics import CLIENT_GONE, ENV, NO_WORKER, SHUTTING_DOWN, WORKER_DIED, Metrics
from envserver.outbox import Outbox
from envserver.wire import (
    CANCEL,
    DELTA,
    HEALTH,
    REPLY,
    RUN,
    Part,
    cancel_payload,
    cancel_target,
    failure,
    parse_answer,
    parse_request,
    success,
    tells_failure,
)
from envserver.worker import PROBE_ID, Request, Worker

logger = logging.getLogger("envserver")

CANCELLED, NOT_CANCELLED = success({"cancelled": True}), success({"cancelled": False})


class Dispatcher:
    """Between the clients, behind `outbox`, and the workers that are ready.

    `on_missed` is called when a run found no worker and says why for its error; `on_load` when `load` has reached
    `load_limit`; `on_health` when a worker has answered a probe; `on_idle` when a worker has answered all it had;
    `on_withdrawn` when nobody wants a run any more that is held.
    """

    def __init__(
        self,
        *,
        on_missed: Callable[[], str],
        on_load: Callable[[], None],
        on_health: Callable[[Worker, Part], None],
        on_idle: Callable[[Worker], None],
        on_withdrawn: Callable[[Request], None],
    ) -> None:
        self.outbox: Outbox | None = None
        """Where answers go. Set when the pool is up."""
        self.ready: list[Worker] = []
        """Who may get runs; the pool keeps it."""
        self.suspect: list[Worker] = []
        """Who gets runs that no other can take; the pool keeps it."""
        self.health = b""
        """The answer to health requests; the pool keeps it."""
        self.load_limit = math.inf
        self.refusal: str | None = None
        """Why no run is taken any more, or None."""
        self.detain: Callable[[Request], bool] | None = None
        """Asked about each run that comes: whether another sees to it. None: nobody is to be asked."""
        self.on_answered: Callable[[Request, Part], None] | None = None
        """Told the reply of each run. None: nobody is to be told."""
        self.dropped = 0
        """Messages that were none, or nobody's."""
        self.metrics = Metrics()
        """What became of the runs is counted here; of the workers, by the slots."""
        self._on_missed = on_missed
        self._on_load = on_load
        self._on_health = on_health
        self._on_idle = on_idle
        self._on_withdrawn = on_withdrawn
        self._clients: dict[bytes, dict[bytes, Request]] = {}
        self._ids = itertools.count(1)

    # From clients

    def on_request(self, parts: list[Part]) -> None:
        request = parse_request(parts)
        if request is None:
            self._drop("it is no request")
            return
        client, request_id, method, payload = request
        mine = self._clients.get(client)
        if mine is not None and request_id in mine:
            self._drop("a request with its id is under way")  # an answer would be taken for that one's
        elif method == RUN:
            self._run(client, request_id, payload)
        elif method == HEALTH:
            self._reply(client, request_id, self.health)
        elif method == CANCEL:
            self._cancel(client, request_id, payload)
        else:
            self._reply(client, request_id, failure(f"unknown method {method!r}: it is health, run or cancel"))

    def _run(self, client: bytes, request_id: bytes, payload: Part) -> None:
        self.metrics.requests += 1
        if self.refusal is not None:
            self.metrics.failed[SHUTTING_DOWN] += 1
            self._reply(client, request_id, failure(self.refusal))
            return
        entry = Request(client, request_id, payload)
        if self.detain is None or not self.detain(entry):
            self.dispatch(entry)

    def dispatch(self, entry: Request) -> None:
        """A run goes to whoever has the least to do; it fails if there is nobody."""
        worker = self._choose()
        if worker is None:
            self.metrics.failed[NO_WORKER] += 1
            self.answer(entry, failure(self._on_missed()))
            return
        self.send(entry, worker)
        if self.load_limit != math.inf and self.load >= self.load_limit:
            self._on_load()

    def send(self, entry: Request, worker: Worker) -> None:
        """A run goes to this worker."""
        payload = entry.payload
        self._enter(entry, worker)
        worker.send([entry.wire_id, RUN, payload])

    def hold(self, entry: Request) -> None:
        """A run waits; until it is sent or answered it may be withdrawn."""
        self._register(entry)

    def answer(self, entry: Request, data: Part) -> None:
        """Reply to a run that no worker has."""
        client = entry.client
        if client is not None:
            if self._clients.get(client, {}).get(entry.id) is entry:
                self._forget(client, entry.id)
            self._reply(client, entry.id, data)

    def _cancel(self, client: bytes, request_id: bytes, payload: Part) -> None:
        try:
            target = self._clients.get(client, {}).get(cancel_target(payload))
        except ValueError as error:
            self._reply(client, request_id, failure(f"a bad request: {error}"))
            return
        if target is not None and target.worker is None:
            self._on_withdrawn(target)
            self._reply(client, request_id, CANCELLED)
            self.metrics.cancelled += 1
            self.answer(target, failure("cancelled"))
            return
        # A worker that is going answers nothing any more; its runs are about to be answered by us.
        if target is None or target.target is not None or target.worker is None or not target.worker.reachable:
            self._reply(client, request_id, NOT_CANCELLED)
            return
        entry = Request(client, request_id, target=target)
        self._enter(entry, target.worker)
        target.cancelled = True
        # On the way that the run took, after it.
        target.worker.send([entry.wire_id, CANCEL, cancel_payload(target.wire_id)])

    @property
    def load(self) -> int:
        """Requests that workers have and have not answered."""
        return sum(len(worker.requests) for workers in (self.ready, self.suspect) for worker in workers)

    def _choose(self) -> Worker | None:
        return self._least_loaded(self.ready) or self._least_loaded(self.suspect)

    @staticmethod
    def _least_loaded(workers: list[Worker]) -> Worker | None:
        best = None
        least = math.inf
        for worker in workers:
            load = len(worker.requests)
            if load < least and not worker.in_arrears:
                best, least = worker, load
        return best

    def _enter(self, entry: Request, worker: Worker) -> None:
        entry.sent_to(worker, b"%x" % next(self._ids))
        worker.requests[entry.wire_id] = entry
        self._register(entry)

    def _register(self, entry: Request) -> None:
        if entry.client is not None:
            self._clients.setdefault(entry.client, {})[entry.id] = entry

    # From workers

    def on_answer(self, worker: Worker, parts: list[Part]) -> None:
        answer = parse_answer(parts)
        if answer is None:
            self._drop(f"{worker} sent what is no answer")
            return
        wire_id, kind, data = answer
        entry = worker.requests.get(wire_id)
        if entry is None:
            if wire_id == PROBE_ID and kind == REPLY:
                self._on_health(worker, data)
            else:
                self._drop(f"{worker} answered what it had not been asked")
            return
        client = entry.client
        if kind == DELTA:
            if client is not None and not self._send(client, entry.id, DELTA, data):
                self.abandon(client)
            return
        del worker.requests[wire_id]
        if client is not None:
            if entry.target is None and tells_failure(data):
                self._count_failure(entry, ENV)
            self._forget(client, entry.id)
            self._reply(client, entry.id, data)
        if self.on_answered is not None and entry.target is None:
            self.on_answered(entry, data)
        if not worker.requests:
            self._on_idle(worker)

    # Ends

    def fail(self, worker: Worker, text: str) -> None:
        """Answer what `worker` will not answer any more."""
        failed = failure(text)
        for entry in [*worker.requests.values()]:
            if entry.client is not None:
                if entry.target is None:
                    self._count_failure(entry, WORKER_DIED if self.refusal is None else SHUTTING_DOWN)
                self._forget(entry.client, entry.id)
                self._reply(entry.client, entry.id, failed if entry.target is None else NOT_CANCELLED)
        worker.requests.clear()

    def cut_off(self, client: bytes) -> None:
        """A client does not read: it is told the end of all that it has under way, should it ever read again."""
        text = failure("cut off: this client left too many answers unread, so its run was cancelled")
        under_way = [*self._clients.get(client, {})]
        self.abandon(client)  # first: so many answers may be too many themselves, and lead here again
        for request_id in under_way:
            self._reply(client, request_id, text)

    def abandon(self, client: bytes) -> None:
        """Nobody waits for what `client` has asked for: its runs are cancelled, what they still send is dropped."""
        for entry in self._clients.pop(client, {}).values():
            entry.client = None
            worker = entry.worker
            if entry.target is None:
                self._count_failure(entry, CLIENT_GONE)
            if worker is None:
                self._on_withdrawn(entry)
            elif entry.target is None and worker.reachable:
                cancel = Request(None, b"", target=entry)
                self._enter(cancel, worker)
                worker.send([cancel.wire_id, CANCEL, cancel_payload(entry.wire_id)])

    def _count_failure(self, run: Request, reason: str) -> None:
        if run.cancelled:
            self.metrics.cancelled += 1
        else:
            self.metrics.failed[reason] += 1

    def _forget(self, client: bytes, request_id: bytes) -> None:
        mine = self._clients[client]
        del mine[request_id]
        if not mine:
            del self._clients[client]

    # Answers

    def _reply(self, client: bytes, request_id: bytes, data: Part) -> None:
        if not self._send(client, request_id, REPLY, data) and client in self._clients:
            self.abandon(client)

    def _send(self, client: bytes, request_id: bytes, kind: bytes, data: Part) -> bool:
        return self.outbox is not None and self.outbox.send([client, request_id, kind, data])

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th …
            logger.warning("a message was dropped: %s (%d so far)", why, self.dropped)
