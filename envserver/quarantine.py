"""Keeping tasks that kill workers apart from all others: between the dispatcher, the slots and `poison`, which decides.

As long as no worker has died by itself it costs nothing: the dispatcher asks only while there is something on record.
"""

import logging
import time
from collections.abc import Callable, Iterable

from envserver.dispatch import Dispatcher
from envserver.fingerprint import succeeded
from envserver.limits import PoolPolicy
from envserver.metrics import NO_WORKER, REFUSED, SHUTTING_DOWN
from envserver.poison import Death, Records, Suspects, Verdict
from envserver.slot import State
from envserver.slots import Slots
from envserver.wire import Part, failure
from envserver.worker import Request, Worker

logger = logging.getLogger("envserver")


class Quarantine:
    """`lone`: which workers are lone ones; `retire` ends one; `wake` makes the pool look here and at its slots."""

    def __init__(
        self,
        policy: PoolPolicy,
        slots: Slots,
        dispatcher: Dispatcher,
        *,
        now: Callable[[], float],
        lone: Callable[[], Iterable[Worker]],
        retire: Callable[[Worker], None],
        wake: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._slots = slots
        self._dispatcher = dispatcher
        self._now = now
        self._lone = lone
        self._retire = retire
        self._wake = wake
        self._records = Records(policy)
        self._suspects: Suspects[Request] = Suspects(policy, self._records)
        self._bytes = 0
        """Of the payloads that wait."""
        self._alone: dict[Worker, bytes] = {}
        """What runs on each lone worker, or ran there."""

    @property
    def waiting(self) -> int:
        """Runs that wait for a lone worker."""
        return self._suspects.waiting

    def due_at(self) -> float:
        """When `look` must be called at the latest; infinity if never."""
        return self._suspects.due_at()

    # What happens

    def buried(self, worker: Worker, runs: list[Request]) -> None:
        """A worker has ended, with `runs` on it. Whatever we ended ourselves counts nothing, but for one whose
        connection was lost before."""
        lone = self._alone.pop(worker, None)
        if runs and not worker.slot.put_down:
            death = Death(worker.pid, worker.end, time.time())
            tasks = {run.task for run in runs}
            self._records.died(tasks, death, self._now(), alone=worker.slot.lone)
            for task in tasks:
                if self._records.verdict(task, self._now()) is Verdict.REFUSED:
                    logger.error("task %s is %s", task.hex()[:8], self._records.refusal(task))
        if lone is not None:
            self._suspects.ended(lone)
        self.look()

    def idle(self, worker: Worker) -> None:
        """A worker has answered all it had: a lone one is of no more use, for what runs next must not be blamed for
        what ran before."""
        if (task := self._alone.pop(worker, None)) is not None:
            self._suspects.ended(task)
            self._retire(worker)
            self.look()

    def failed(self, why: str) -> None:
        """A lone worker could not be started, perhaps once more."""
        if self._slots.lone_failures >= self._policy.start_tries:
            text = f"this task is to run alone, and no worker can be started for it: {why}"
            self._answer_all(text, NO_WORKER)
        self.look()

    def close(self, why: str) -> None:
        """No run is taken any more, and none that waits is sent."""
        self._answer_all(why, SHUTTING_DOWN)
        self._slots.lone_wanted = 0

    def withdrawn(self, run: Request) -> None:
        """Nobody wants it any more that waits here."""
        if self._suspects.withdraw(run.task, run):
            self._bytes -= len(run.payload)
            self._wake()  # once for all that a client takes with it

    def look(self) -> None:
        """Send who may go, to where it may go, and say how many lone workers there are to be."""
        for task, verdict, run in self._suspects.released(self._now()):
            self._bytes -= len(run.payload)
            if run.client is None:  # it left while others were answered
                continue
            if verdict is Verdict.REFUSED:
                self._refuse(run, self._records.refusal(task))
            else:
                self._dispatcher.dispatch(run)
        for worker in [*self._lone()]:
            if worker in self._alone or worker.slot.state is not State.READY or not worker.dispatchable:
                continue
            if (taken := self._suspects.take()) is None:
                self._retire(worker)
                continue
            task, run = taken
            self._bytes -= len(run.payload)
            self._alone[worker] = task
            self._dispatcher.send(run, worker)
        if self._slots.lone_wanted != self._suspects.wanted:
            self._slots.lone_wanted = self._suspects.wanted
            self._wake()
        watching = len(self._records) > 0
        self._dispatcher.detain = self._detain if watching else None
        self._dispatcher.on_answered = self._answered if watching else None

    # Whom the dispatcher asks

    def _detain(self, run: Request) -> bool:
        match self._records.verdict(run.task, self._now()):
            case Verdict.FREE:
                return False
            case Verdict.REFUSED:
                self._refuse(run, self._records.refusal(run.task))
            case Verdict.ALONE:
                size = len(run.payload)
                if self._suspects.full or self._bytes + size > self._policy.worker_budget:
                    text = f"this task is to run alone, and {self.waiting} runs wait for that already: try later"
                    self._dispatcher.metrics.failed[NO_WORKER] += 1
                    self._dispatcher.answer(run, failure(text))
                else:
                    self._suspects.wait(run.task, run)
                    self._bytes += size
                    self._dispatcher.hold(run)
                    self._wake()  # once for all that come together
        return True

    def _answered(self, run: Request, reply: Part) -> None:
        if run.task in self._records and succeeded(reply) and self._records.succeeded(run.task):
            self.look()

    def _refuse(self, run: Request, text: str) -> None:
        self._dispatcher.metrics.failed[REFUSED] += 1
        self._dispatcher.answer(run, failure(text))

    def _answer_all(self, text: str, reason: str) -> None:
        data = failure(text)
        runs = self._suspects.clear()
        self._bytes = 0
        for run in runs:
            self._dispatcher.metrics.failed[reason] += run.client is not None
            self._dispatcher.answer(run, data)
