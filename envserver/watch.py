"""Who of a pool's workers is hung: around `hung.Vigil`, which decides, with probes, a timer and looks at processes."""

import asyncio
import logging
from collections.abc import Callable

from envserver.hung import Action, Back, Kill, Kind, Look, Probe, Report, Seen, Suspect, Vigil
from envserver.limits import PoolPolicy
from envserver.proc import look
from envserver.stacks import SWITCH, read_stacks
from envserver.worker import Worker

logger = logging.getLogger("envserver")

REASONS = {
    Kind.STOPPED: "it had been stopped by a signal for {:.0f} s",
    Kind.BLOCKED: "kill_blocked_after: it had been silent for {:.0f} s while its processes used no CPU",
}


class Watch:
    """Probes workers from when they are ready until they have exited, and tells of those that do not answer.

    `on_suspect` and `on_back` when runs should go to others, and when not any more; `on_hung` when a worker is to be
    killed, and why. `on_failure` is told what went wrong in here.
    """

    def __init__(
        self,
        policy: PoolPolicy,
        *,
        on_suspect: Callable[[Worker], None],
        on_back: Callable[[Worker], None],
        on_hung: Callable[[Worker, str], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._policy = policy
        self._vigil = Vigil(policy)
        self._on_suspect = on_suspect
        self._on_back = on_back
        self._on_hung = on_hung
        self._on_failure = on_failure
        self._workers: dict[int, Worker] = {}
        """By the generation of their slot when they were made."""
        self._to_look_at: set[int] = set()
        self._stacks: dict[int, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks: asyncio.Future[dict[int, tuple[Seen | None, str]]] | None = None

    def add(self, worker: Worker) -> None:
        """Watch a worker that is ready. Needs a running loop."""
        self._loop = asyncio.get_running_loop()
        self._workers[worker.generation] = worker
        self._vigil.add(worker.generation, self._loop.time())
        if self._timer is None:
            self._timer = self._loop.call_later(self._policy.watch_interval, self._tick)

    def drop(self, worker: Worker) -> None:
        """Watch it no more."""
        self._workers.pop(worker.generation, None)
        self._vigil.drop(worker.generation)
        if not self._workers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def answered(self, worker: Worker) -> None:
        """It has answered a probe."""
        if worker.generation in self._workers:
            self._carry_out(self._vigil.answered(worker.generation, self._loop.time()))

    def close(self) -> None:
        for worker in [*self._workers.values()]:
            self.drop(worker)
        if self._looks is not None:
            self._looks.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._policy.watch_interval, self._tick)
        try:
            heard = {generation for generation, worker in self._workers.items() if worker.take_heard()}
            self._carry_out(self._vigil.tick(self._loop.time(), heard))
            self._look()
        except Exception as error:  # noqa: BLE001
            self._on_failure(error)

    def _look(self) -> None:
        if self._looks is not None or not self._to_look_at:
            return
        workers = [self._workers[generation] for generation in self._to_look_at if generation in self._workers]
        self._to_look_at.clear()
        asked = [(worker.generation, worker.pid, worker.stacks_path) for worker in workers]
        # In a thread: to read about each process of a large machine takes longer than requests should wait.
        self._looks = self._loop.run_in_executor(None, _evidence, asked)
        self._looks.add_done_callback(self._looked)

    def _looked(self, looks: "asyncio.Future[dict[int, tuple[Seen | None, str]]]") -> None:
        self._looks = None
        if looks.cancelled():
            return
        try:
            for generation, (seen, stacks) in looks.result().items():
                worker = self._workers.get(generation)
                if worker is None:
                    continue
                if worker.take_heard():
                    self._carry_out(self._vigil.heard(generation))
                self._stacks[generation] = stacks
                known = bool(stacks) or worker.stacks_path is None
                self._carry_out(self._vigil.seen(generation, self._loop.time(), seen, stacks=known))
        except Exception as error:  # noqa: BLE001
            self._on_failure(error)
        finally:
            self._stacks.clear()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            worker = self._workers.get(action.worker)
            if worker is None:
                continue
            match action:
                case Probe():
                    worker.probe()
                case Look(generation):
                    self._to_look_at.add(generation)
                case Report(_, seconds, kind):
                    self._report(worker, seconds, kind)
                case Suspect():
                    self._on_suspect(worker)
                case Back(_, seconds):
                    logger.info("%s answers again, after %.0f s", worker, seconds)
                    self._on_back(worker)
                case Kill(_, seconds, kind):
                    self._on_hung(worker, REASONS[kind].format(seconds))

    def _report(self, worker: Worker, seconds: float, kind: Kind) -> None:
        runs = f"{len(worker.requests)} requests are on it"
        text = f"{worker} has not answered for {seconds:.0f} s: it is {kind.value}; {runs}"
        if kind is Kind.STOPPED:
            text += f"; it is killed after {self._policy.kill_stopped_after:g} s"
        elif stacks := self._stacks.get(worker.generation):
            text += f"; it was here:\n{stacks}"
        elif worker.stacks_path is None:
            text += f" ({SWITCH}=0: no stacks)"
        logger.warning("%s", text)


def _evidence(asked: list[tuple[int, int, str | None]]) -> dict[int, tuple[Seen | None, str]]:
    """Of each worker, by its generation, pid and the file of its stacks: its processes, and the stacks."""
    found = look([pid for _, pid, _ in asked])
    return {generation: (found[pid], "" if path is None else read_stacks(path)) for generation, pid, path in asked}
