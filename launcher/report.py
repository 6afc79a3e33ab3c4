"""What is left of a run at its end: a picture, a timeline and a few last lines."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.runfolder import RunFolder
from launcher.runstate import RunState, number
from launcher.timeline import chrome_trace, overlap
from launcher.wording import clean
from relax_actor.files import replace_bytes, replace_text
from relax_actor.telemetry import Event, read_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_reports(folder: RunFolder) -> list[str]:
    """Write reward.png and timeline.json from the event log.

    Returns:
        What could not be written and why; a report never fails a run.
    """
    events, _ = read_events(folder.events)
    failures = []
    for path, write in ((folder.timeline, _write_timeline), (folder.picture, _write_picture)):
        try:
            write(path, events)
        except Exception as error:  # noqa: BLE001 - the run itself is already over
            failures.append(f"{path.name} was not written: {error}")
    return failures


def summary(folder: RunFolder, *, exit_code: int, reason: str, failures: Sequence[str] = ()) -> str:
    """Return the last lines of a launch; the very last names the outcome.

    Args:
        folder: of the run.
        exit_code: of the run.
        reason: why it ended.
        failures: what `write_reports` could not write.
    """
    events, _ = read_events(folder.events)
    state = RunState()
    for event in events:
        state.apply(event)
    lines = [*_speed(events, state), *_places(folder), *failures]
    lines.append(_done(state, folder) if exit_code == 0 else _failed(state, folder, exit_code, reason))
    return "\n".join(clean(line) for line in lines)


def _speed(events: Sequence[Event], state: RunState) -> list[str]:
    lines = []
    if state.step:
        wall_s = number(state.step.get("t")) - state.started_at
        lines.append(f"steps      {state.step.get('step')} in {wall_s:.1f} s, {state.restarts} restarts")
    share = overlap(events)
    if share is not None:
        lines.append(f"overlap    {share:.0%} of training time a rollout was generating")
    return lines


def _places(folder: RunFolder) -> list[str]:
    places = {"picture": folder.picture, "timeline": folder.timeline, "logs": folder.logs}
    return [f"{name:<10} {path}" for name, path in places.items() if path.exists()]


def _done(state: RunState, folder: RunFolder) -> str:
    if not state.step and state.loaded_step:
        return f"done: nothing was left, step {state.loaded_step} of {state.steps} is trained ({folder.path})"
    rewards = [reward for _, reward in state.rewards]
    reward = f", reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else ""
    return f"done: step {state.step.get('step', 0)} of {state.steps}{reward} ({folder.path})"


def _failed(state: RunState, folder: RunFolder, exit_code: int, reason: str) -> str:
    """Name actor, cause and log of the failure: of the child that is down, else of the run."""
    down = [child for child in state.children.values() if child.reason and child.name in reason]
    log = down[-1].log if down and down[-1].log else str(folder.logs)
    word = "stopped" if exit_code >= 128 else "failed"
    cause = " ".join(reason.split()).removeprefix(f"{word}: ") or "no reason was given"
    return f"{word}: {cause} (exit code {exit_code}, log: {log})"


def _write_timeline(path: Path, events: Sequence[Event]) -> None:
    replace_text(path, json.dumps(chrome_trace(events)))


def _write_picture(path: Path, events: Sequence[Event]) -> None:
    """Draw reward against wall-clock: steps, evaluations, and a line at every restart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    start = next((number(event["t"]) for event in events if event.get("kind") == "run_started"), 0.0)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="wall-clock, s", ylabel="mean reward")
    _draw(axes, events, "step", "reward_mean", start)
    _draw(axes, events, "eval", "mean_reward", start)
    _draw_restarts(axes, events, start)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")
    axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    replace_bytes(path, image.getvalue())


def _draw(axes: "Axes", events: Sequence[Event], kind: str, field: str, start: float) -> None:
    points = [
        (number(event.get("t")) - start, event[field])
        for event in events
        if event.get("kind") == kind and isinstance(event.get(field), (int, float))
    ]
    if points:
        label, style = ("training", "-") if kind == "step" else ("evaluation", "o--")
        axes.plot([t for t, _ in points], [value for _, value in points], style, label=label)


def _draw_restarts(axes: "Axes", events: Sequence[Event], start: float) -> None:
    restarts = [event for event in events if event.get("kind") == "child_restarting"]
    for index, event in enumerate(restarts):
        label = "restart" if index == 0 else None
        axes.axvline(number(event.get("t")) - start, color="crimson", alpha=0.6, linestyle=":", label=label)
        top = axes.get_xaxis_transform()
        moment = number(event.get("t")) - start
        name = clean(event.get("child")).replace("$", r"\$")  # matplotlib would read it as mathematics
        axes.text(
            moment, 0.99, name, transform=top, rotation=90, va="top", ha="right", fontsize=7, color="crimson"
        )
