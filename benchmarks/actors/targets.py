"""What is promised, and whether a run kept it. Pure: rows of results in, verdicts out."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]
"""One unit: engine, round and what it measured (`facts`)."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One promise.

    Args:
        what: the promise in words.
        metric: which fact of a unit.
        limit: in the metric's unit; with `against`, a ratio to the other engine's.
        at_least: more is better.
        engine: whose fact.
        statistic: over all rounds: median, p99 or max.
        against: the other engine, whose median of the same round is divided by.
    """

    what: str
    metric: str
    limit: float
    at_least: bool = False
    engine: str = "ours"
    statistic: str = "median"
    against: str = ""


TARGETS = (
    Target(what="tiny call p50, times the raw floor", metric="b_p50_us", limit=1.3, against="raw"),
    Target(what="tiny call p50, times Ray's", metric="b_p50_us", limit=0.25, against="ray"),
    Target(what="256 in flight, one to one, calls/s", metric="c_1to1_per_s", limit=20_000, at_least=True),
    Target(what="the same, CPU-µs a call, whole tree", metric="c_1to1_cpu_us", limit=45),
    Target(
        what="16 actors spawned and answering, torch in, s",
        metric="a_spawn16_s",
        limit=0.6,
        engine="ours_torch",
    ),
    Target(what="engine's share of an actor, MiB PSS", metric="a_actor_pss_mib", limit=12),
    Target(
        what="64 MiB argument, times warm memory",
        metric="d_arg_gibps",
        limit=0.8,
        at_least=True,
        against="raw",
    ),
    Target(
        what="64 MiB result, times warm memory", metric="d_ret_gibps", limit=0.8, at_least=True, against="raw"
    ),
    # One memcpy at 0.8 of the floor's speed takes 1.25 times as long.
    Target(what="256 MiB to 4 actors, times one memcpy", metric="e_bcast_s", limit=1.25, against="raw"),
    Target(what="pending call fails after SIGKILL, p50, s", metric="f_detect_s", limit=0.003),
    Target(what="the same, p99", metric="f_detect_s", limit=0.05, statistic="p99"),
    Target(what="the same with 2 GiB touched, p50, s", metric="fbig_detect_s", limit=0.003),
    Target(what="the same with 2 GiB touched, p99", metric="fbig_detect_s", limit=0.05, statistic="p99"),
    Target(what="restarted actor answers, s", metric="g_restart_s", limit=0.05),
    Target(what="engine up from exec, s", metric="h_up_s", limit=0.6),
    Target(what="own processes idle, MiB PSS", metric="h_own_pss_mib", limit=50),
    Target(what="own processes idle, % of a core", metric="h_idle_cpu_pct", limit=0.3),
    Target(what="head SIGKILLed, all gone, s", metric="orphan_gone_s", limit=0.1, statistic="max"),
    Target(what="actor SIGKILLed, its grandchild gone, s", metric="k_grandchild_s", limit=0.05),
    Target(what="hung actor: call ends after its deadline by, s", metric="s_late_s", limit=0.05),
    Target(what="orderly stop of 4 idle actors, s", metric="i_stop_s", limit=0.3),
)


def judge(rows: Sequence[Row], targets: Sequence[Target] = TARGETS) -> list[dict[str, Any]]:
    """Return every target with what was measured, how it stands to the limit, and whether it is met.

    `ratio` is measured / limit; `met` is None where there is nothing to judge by.
    """
    return [_judge(target, rows) for target in targets]


def samples(rows: Sequence[Row], engine: str, metric: str) -> list[float]:
    """Return all an engine's samples of a metric, over all rounds."""
    return [value for values in by_round(rows, engine, metric).values() for value in values]


def by_round(rows: Sequence[Row], engine: str, metric: str) -> dict[int, list[float]]:
    """Return an engine's samples of a metric, by round."""
    found: dict[int, list[float]] = {}
    for row in rows:
        value = row["facts"].get(metric) if row["engine"] == engine else None
        if isinstance(value, list):
            found.setdefault(row["round"], []).extend(value)
        elif isinstance(value, int | float):
            found.setdefault(row["round"], []).append(float(value))
    return {number: values for number, values in found.items() if values}


def p99(values: Sequence[float]) -> float:
    """Return the value that 99 % do not exceed; of fewer than a hundred, the largest."""
    ordered = sorted(values)
    return ordered[-(len(ordered) // 100) - 1]


def _judge(target: Target, rows: Sequence[Row]) -> dict[str, Any]:
    values = _ratios(target, rows) if target.against else samples(rows, target.engine, target.metric)
    record = {**asdict(target), "n": len(values), "measured": None, "ratio": None, "met": None}
    if values:
        measured = _statistic(target.statistic, values)
        met = measured >= target.limit if target.at_least else measured <= target.limit
        record |= {"measured": round(measured, 5), "ratio": round(measured / target.limit, 3), "met": met}
    elif any(row["engine"] == target.engine and row["facts"].get("errors") for row in rows):
        record["met"] = _failed(target, rows)
    return record


def _failed(target: Target, rows: Sequence[Row]) -> bool | None:
    """Return False where the engine's test ended in an error: that misses the target."""
    test = target.metric.partition("_")[0]
    ran = [row for row in rows if row["engine"] == target.engine and test in row["facts"].get("errors", {})]
    return False if ran else None


def _ratios(target: Target, rows: Sequence[Row]) -> list[float]:
    """Return for each round the engine's median over the other's."""
    own = by_round(rows, target.engine, target.metric)
    other = by_round(rows, target.against, target.metric)
    return [
        statistics.median(own[number]) / statistics.median(other[number])
        for number in sorted(own.keys() & other.keys())
    ]


def _statistic(name: str, values: Sequence[float]) -> float:
    if name == "max":
        return max(values)
    return p99(values) if name == "p99" else statistics.median(values)
