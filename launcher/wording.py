"""The words in which a run is told: lines of text about events and state, without colour."""

from collections.abc import Callable

from launcher.runstate import RunState, number
from relax_actor.telemetry import Event

_BARS = "▁▂▃▄▅▆▇█"


def clean(text: object) -> str:
    """Return text that any terminal can show: no control characters, no lone surrogates."""
    kept = str(text).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in kept)


def sparkline(values: list[float], width: int = 40) -> str:
    """Draw the newest `width` values with eight heights; the lowest of them is the ground."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(_BARS[min(7, int(8 * (value - low) / span))] for value in shown)


def plain_line(event: Event) -> str:
    """Return the line that tells of an event where nothing is redrawn; empty where none is worth it."""
    writer = _LINES.get(str(event.get("kind")))
    return clean(writer(event)) if writer else ""


def summary_lines(state: RunState) -> list[str]:
    """Return the loop's numbers, one fact a line, without colour."""
    step = state.step
    lines = [
        f"step       {step.get('step', 0)}/{state.steps or '?'}   policy version {or_dash(state.published)}"
    ]
    if step:
        rewards = [reward for _, reward in state.rewards]
        lines.append(f"reward     {_float(step.get('reward_mean'))}   {sparkline(rewards)}")
        lines.append(_speed(step))
        lines.append(f"staleness  {histogram(step.get('staleness'))}")
    if "mismatch_abs" in step:
        lines.append(f"log-probs  {_mismatch(step)}")
    lines += [f"eval       {_eval(event)}" for event in state.evals.values()]
    if state.ledger:
        lines.append(f"samples    {_ledger(state.ledger)}")
    if state.dropped:
        lines.append(f"dropped    {clean(_counts(state.dropped))}")
    if state.waiting:
        lines.append(f"waiting    {clean(state.waiting)}")
    return lines


def histogram(staleness: object) -> str:
    """Return how many samples of a step had which staleness: `0: 96  1: 32`."""
    if not isinstance(staleness, dict) or not staleness:
        return "-"
    ordered = sorted(staleness.items(), key=lambda item: (len(item[0]), item[0]))
    return "  ".join(f"{versions}: {samples}" for versions, samples in ordered)


def _speed(step: Event) -> str:
    speed = f"{number(step.get('tokens_per_s')):,.0f} tokens/s"
    times = f"train {number(step.get('train_s')):.2f} s, wait {number(step.get('wait_s')):.2f} s"
    return f"speed      {speed}   {times}   loss {_float(step.get('loss'))}"


def _mismatch(event: Event) -> str:
    values = [_float(event.get(name)) for name in ("mismatch_abs", "mismatch_k3", "max_ratio")]
    return "trainer and rollout differ by {} (mean), KL {}, ratio up to {}".format(*values)


def _eval(event: Event) -> str:
    where = f"step {event.get('step')}, policy version {event.get('policy_version')}"
    name = event.get("eval_set") or "eval"
    return clean(f"{name}: {_float(event.get('mean_reward'))} over {event.get('samples')} samples at {where}")


def _ledger(event: Event) -> str:
    names = ("submitted", "trained", "dropped", "running", "queued")
    text = "  ".join(f"{name} {event.get(name)}" for name in names)
    return text if event.get("balances", True) else f"{text}  DOES NOT BALANCE"


def _counts(counts: dict[str, int]) -> str:
    return "  ".join(f"{count}x {reason}" for reason, count in counts.items())


def _float(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str("-" if value is None else value)


def or_dash(value: int | None) -> str:
    """Return a number, or a dash where there is none yet."""
    return "-" if value is None else str(value)


def _step_line(event: Event) -> str:
    parts = [
        f"reward {_float(event.get('reward_mean'))}",
        f"loss {_float(event.get('loss'))}",
        f"{number(event.get('tokens_per_s')):,.0f} tokens/s",
        f"staleness {histogram(event.get('staleness'))}",
    ]
    if event.get("skipped"):
        parts.append(f"skipped: {event['skipped']}")
    return f"step {event.get('step')}: {', '.join(parts)}"


def _host_lost_line(event: Event) -> str:
    return f"host {event.get('host')} is lost with {event.get('actors')} actors: {event.get('reason')}"


def _exit_line(event: Event) -> str:
    return f"{event.get('child')} (incarnation {event.get('incarnation')}) exited: {event.get('reason')}"


def _restart_line(event: Event) -> str:
    return f"{event.get('child')} restarts in {number(event.get('delay_s')):.1f} s: {event.get('reason')}"


def _start_line(event: Event) -> str:
    return (
        f"run {event.get('run_id')} started: {event.get('mode')}, max_staleness {event.get('max_staleness')}"
    )


_LINES: dict[str, Callable[[Event], str]] = {
    "run_started": _start_line,
    "step": _step_line,
    "eval": lambda event: f"eval {_eval(event)}",
    "child_exited": _exit_line,
    "child_restarting": _restart_line,
    "child_killed": lambda event: f"{event.get('child')} is killed: {event.get('reason')}",
    "host_lost": _host_lost_line,
    "zygote_unfit": lambda event: (
        f"zygote {event.get('zygote')} is not used, its actors start slowly: {event.get('reason')}"
    ),
    "escalated": lambda event: f"{event.get('supervisor')} gave up: {event.get('reason')}",
    "sample_dropped": lambda event: (
        f"sample {event.get('group_id')}.{event.get('sample_index')} dropped "
        f"({event.get('origin')}): {event.get('reason')}"
    ),
    "group_dropped": lambda event: (
        f"group {event.get('group_id')} dropped ({event.get('origin')}): {event.get('reason')}"
    ),
    "checkpoint_loaded": lambda event: f"checkpoint of step {event.get('step')} loaded: {event.get('path')}",
    "checkpoint_saved": lambda event: f"checkpoint of step {event.get('step')} saved: {event.get('path')}",
    "logprob_mismatch": lambda event: f"step {event.get('step')}: log-probs of {_mismatch(event)}",
    "trainer_waits": lambda event: f"the trainer waits: {event.get('reason')}",
}
