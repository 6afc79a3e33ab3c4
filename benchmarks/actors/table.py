"""Print a result of `actors.run` as Markdown: `python -m actors.table benchmarks/results/actors.json`."""

import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = {
    "ours": "relax-actor",
    "ray": "Ray",
    "xoscar": "xoscar",
    "monarch": "Monarch",
    "raw": "raw floor",
}

ROWS: tuple[tuple[str, str, float] | tuple[str, str, float, dict[str, str]], ...] = (
    ("spawn 1 actor → answers, first, s", "a_spawn1_first_s", 1.0),
    ("spawn 1 actor → answers, later ones, s", "a_spawn1_s", 1.0),
    ("spawn 16 → all answered, s", "a_spawn16_s", 1.0),
    ("the same, torch imported in each, s", "a_spawn16_s", 1.0, {"ours": "ours_torch"}),
    ("one actor of 16, MiB PSS", "a_actor_pss_mib", 1.0),
    ("the same, torch imported in each, MiB PSS", "a_actor_pss_mib", 1.0, {"ours": "ours_torch"}),
    ("tiny call p50, µs", "b_p50_us", 1.0),
    ("CPU-µs a call, one after another, whole tree", "b_cpu_us", 1.0),
    ("256 in flight, 1 → 1, calls/s", "c_1to1_per_s", 1.0),
    ("CPU-µs a call, 256 in flight", "c_1to1_cpu_us", 1.0),
    ("256 in flight, 1 → 8, calls/s", "c_1to8_per_s", 1.0),
    ("64 MiB argument, GiB/s", "d_arg_gibps", 1.0),
    ("64 MiB result, GiB/s", "d_ret_gibps", 1.0),
    ("256 MiB to 4 actors, s", "e_bcast_s", 1.0),
    ("SIGKILL → pending call fails, ms", "f_detect_s", 1e3),
    ("the same, Monarch's poll at 100 ms, ms", "f_detect_s", 1e3, {"monarch": "monarch_tuned"}),
    ("the same with 2 GiB touched, ms", "fbig_detect_s", 1e3),
    ("SIGKILL → next incarnation answers, s", "g_restart_s", 1.0),
    ("exec → engine up, s", "h_up_s", 1.0),
    ("the same, Ray with its dashboard, s", "h_up_s", 1.0, {"ray": "ray_default"}),
    ("own processes", "h_own_processes", 1.0),
    ("own processes idle, MiB PSS", "h_own_pss_mib", 1.0),
    ("idle CPU, % of a core", "h_idle_cpu_pct", 1.0),
    ("orderly stop of 4 actors, s", "i_stop_s", 1.0),
    ("head SIGKILLed → all gone, s", "orphan_gone_s", 1.0),
    ("processes left 20 s after that", "orphan_left", 1.0),
    ("actor SIGKILLed → its grandchild gone, ms", "k_grandchild_s", 1e3),
    ("its grandchild left after 5 s", "k_left", 1.0),
    ("hung actor: call ends after its deadline by, ms", "s_late_s", 1e3),
)
"""Title, metric, factor; and for a row of special settings which engine stands in which column."""

NOTHING = "-"
MET = {True: "met", False: "**missed**", None: "not measured"}


def main() -> None:
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))


def markdown(result: dict[str, Any]) -> str:
    """Return what was measured where, the figures of every engine, and the targets."""
    return f"{_heading(result)}\n\n{tables(result)}"


def tables(figures: dict[str, Any]) -> str:
    """Return the tables alone: figures, then targets."""
    return "\n".join([*_figures(figures["engines"]), "", *_targets(figures["targets"])])


def number(value: float) -> str:
    """Return a number in three significant digits, thousands apart."""
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


def _heading(result: dict[str, Any]) -> str:
    machine, load = result["machine"], result["load"]
    absent = "".join(f" Absent: {peer} ({reason})." for peer, reason in result["absent"].items())
    return (
        f"{result['date']}, commit {result['commit']}, {machine['cpu']}, {machine['cores']} cores, "
        f"{result['rounds']} rounds, load {load['median']:g} [{load['min']:g}..{load['max']:g}].{absent}"
    )


def _figures(engines: dict[str, Any]) -> list[str]:
    titles = [f"{title} {_short(engines.get(engine, {}))}".strip() for engine, title in COLUMNS.items()]
    return [
        f"| median [min..max] | {' | '.join(titles)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *filter(None, (_row(engines, *row) for row in ROWS)),
    ]


def _row(
    engines: dict[str, Any], title: str, metric: str, factor: float, only: dict[str, str] | None = None
) -> str:
    shown = {engine: engine for engine in COLUMNS} if only is None else only
    cells = [_cell(engines.get(shown.get(column, ""), {}), metric, factor) for column in COLUMNS]
    return "" if set(cells) == {NOTHING} else f"| {title} | {' | '.join(cells)} |"


def _short(engine: dict[str, Any]) -> str:
    version = str(engine.get("version", ""))
    return version if version[:1].isdigit() else ""


def _cell(engine: dict[str, Any], metric: str, factor: float) -> str:
    spread = engine.get("metrics", {}).get(metric)
    if spread is None:
        return "error" if metric.partition("_")[0] in engine.get("errors", {}) else NOTHING
    median, low, high = (number(spread[each] * factor) for each in ("median", "min", "max"))
    return f"{median} [{low}..{high}]"


def _targets(verdicts: list[dict[str, Any]]) -> list[str]:
    return [
        "| target | limit | measured | n | |",
        "|---|---|---|---|---|",
        *(
            f"| {each['what']} | {'≥' if each['at_least'] else '≤'} {number(each['limit'])} "
            f"| {NOTHING if each['measured'] is None else number(each['measured'])} "
            f"| {each['n']} | {MET[each['met']]} |"
            for each in verdicts
        ),
    ]


if __name__ == "__main__":
    main()
