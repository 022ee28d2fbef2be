"""How fast a model call comes through: ours beside nothing at all, a bare proxy, and what a user would pick instead."""

import argparse
from collections.abc import Callable, Sequence

from benchmarks.gateway.cases import CASES, RATES, Amount
from benchmarks.gateway.goals import outcomes
from benchmarks.gateway.rounds import Plan, run
from benchmarks.gateway.subjects import LOCAL, PEERS, Starting
from benchmarks.peers import Peer, PeerUnavailableError
from benchmarks.report import Figure, end_on_sigterm, parse, show, write

FULL = Plan(rounds=5, amount=Amount(seconds=3.0, turns=100_000, sessions=10_000, streams_seconds=15.0))
QUICK = Plan(rounds=1, amount=Amount(seconds=0.3, turns=4_000, sessions=2_000, streams_seconds=1.0))


def peers(names: Sequence[str], *, make: bool) -> tuple[list[Starting], dict[str, str]]:
    """Those whose environment is there, or could be made; and why each other one is not measured."""
    found, missing = [], {}
    for name in names:
        peer = Peer.named(name)
        if not make and not peer.is_made():
            missing[peer.subject] = "its environment is not there yet: a run without --quick makes it"
            continue
        try:
            found.append(Starting(peer.subject, PEERS[name], peer.python()))
        except PeerUnavailableError as error:
            missing[peer.subject] = str(error)
    return found, missing


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse("How fast a model call comes through", arguments, _add)
    plan = QUICK if options.quick else FULL
    found, missing = peers(options.peers, make=not options.quick)
    outcome = run([*LOCAL, *found], [case for case in CASES if case.name in options.cases], plan)
    figures = outcome.figures()
    reached = outcomes(figures)
    title = f"Model calls; median of {plan.rounds} rounds of {plan.amount.seconds:g} s (min to max)"
    rates = [figure for figure in figures if figure.measure in RATES]
    if rates:
        show(rates, "\n".join([title, *outcome.made_with]))
    if len(rates) < len(figures):
        others = f"Delays and memory; memory: RSS after {plan.amount.turns:,} turns"
        show([figure for figure in figures if figure.measure not in RATES], others)
    for name, why in {**missing, **outcome.missing}.items():
        print(f"not measured: {name}: {why}")
    for one in reached:
        print(one)
    if options.json is not None:
        goals = [Figure("goal", str(one.goal), "ours", one.value, one.goal.wanted) for one in reached]
        write([*figures, *goals], options.json)


def _add(parser: argparse.ArgumentParser) -> None:
    cases = [case.name for case in CASES]
    parser.add_argument(
        "--peers",
        type=_listed(list(PEERS)),
        default=list(PEERS),
        metavar="NAME,…",
        help=f"those to measure beside: {', '.join(PEERS)} (all), or none",
    )
    parser.add_argument(
        "--cases", type=_listed(cases), default=cases, metavar="NAME,…", help=f"only these: {', '.join(cases)}"
    )


def _listed(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parsed(text: str) -> list[str]:
        names = [] if text == "none" else text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there is {', '.join(known)}")
        return names

    return parsed


if __name__ == "__main__":
    end_on_sigterm()
    main()
