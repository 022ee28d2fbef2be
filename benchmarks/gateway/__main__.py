"""How fast a model call comes through: ours beside nothing at all, a bare proxy, and what a user would pick instead."""

from collections.abc import Sequence

from benchmarks.gateway.cases import CASES
from benchmarks.gateway.rounds import Plan, run
from benchmarks.gateway.subjects import LOCAL
from benchmarks.report import end_on_sigterm, parse, show, write

FULL = Plan(rounds=5, seconds=3.0)
QUICK = Plan(rounds=1, seconds=0.7)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse("How fast a model call comes through", arguments)
    plan = QUICK if options.quick else FULL
    outcome = run(LOCAL, CASES, plan)
    title = f"Model calls; median of {plan.rounds} rounds of {plan.seconds:g} s (min to max)"
    show(outcome.figures, "\n".join([title, *outcome.notes]))
    if options.json is not None:
        write(outcome.figures, options.json)


if __name__ == "__main__":
    end_on_sigterm()
    main()
