"""The whole loop, undisturbed: in turns and overlapping, short, stopped from outside, twice at once."""

import threading
import time

import pytest
from loop_run import (
    GROUPS_PER_STEP,
    assert_kept_its_promises,
    assert_nothing_is_left,
    assert_trained_in_order,
)

from relax_actor import Supervisor, cast, zygote_imports
from relax_actor.app import RunControl
from relax_actor.telemetry import read_events
from relax_actor.transfer_queue.events import (
    BatchAcked,
    BatchExtended,
    BatchLeased,
    PromptLeased,
    SamplesPut,
)
from transport.shm import ShmSpace, parse_name

pytestmark = pytest.mark.timeout(180)


def spans(run, name):
    """Return (start, end) of the spans of that name in unix seconds, by start."""
    found = [(event["start"], event["start"] + event["dur_s"]) for event in run.of("span", name=name)]
    return sorted(found)


def overlap_s(some, others):
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def test_without_staleness_sampling_and_training_take_turns(run_loop):
    """Bug case 16: 0 is synchronous, and makes progress."""
    run = run_loop(
        run={"max_staleness": 0, "mode": "async_on_policy", "steps": 4}, rollout={"scripted_token_s": 0.03}
    )
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert all(step["staleness"] == {"0": 4 * GROUPS_PER_STEP} for step in run.history)
    assert [step["groups"] for step in run.history] == [
        list(range(first, first + GROUPS_PER_STEP))
        for first in range(0, 4 * GROUPS_PER_STEP, GROUPS_PER_STEP)
    ]
    assert len(spans(run, "train")) == 4
    trained, is_training = 0, False
    for event in run.journal:
        if isinstance(event, BatchLeased | BatchExtended):
            is_training = event.is_whole
        elif isinstance(event, BatchAcked):
            trained, is_training = trained + 1, False
        elif isinstance(event, PromptLeased):
            assert event.version == trained
        assert not (is_training and isinstance(event, PromptLeased | SamplesPut)), "sampled meanwhile"
    assert trained == 4


def test_with_staleness_sampling_and_training_overlap(run_loop):
    run = run_loop(run={"steps": 6}, rollout={"scripted_token_s": 0.02, "max_in_flight": 4})
    assert_kept_its_promises(run)
    assert overlap_s(spans(run, "generate"), spans(run, "train")) > 0
    assert {age for step in run.history for age in step["staleness"]} == {"0", "1"}


@pytest.mark.parametrize(("steps", "staleness"), [(1, 0), (1, 4), (3, 4)])
def test_a_run_shorter_than_its_staleness_ends(run_loop, steps, staleness):
    """Bug case 16."""
    run = run_loop(run={"steps": steps, "max_staleness": staleness}, rollout={"replicas": 1})
    assert_kept_its_promises(run)
    assert_trained_in_order(run)


def test_two_runs_on_one_host_do_not_disturb_one_another(run_loop):
    runs = []

    def start(seed):
        runs.append(run_loop(run={"seed": seed, "steps": 3, "max_staleness": 0}))

    threads = [threading.Thread(target=start, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 2
    for run in runs:
        assert_kept_its_promises(run)
        assert_trained_in_order(run)
    assert runs[0].weights != runs[1].weights


class StopAt:
    """Ends the run when an event of that kind is there."""

    def __init__(self, kind, how):
        self.control, self._kind, self._how, self.stopped = RunControl(), kind, how, False

    def __call__(self, folder):
        events, _ = read_events(folder / "events.jsonl")
        if not self.stopped and any(event["kind"] == self._kind for event in events):
            self.stopped = True
            getattr(self.control, self._how)("SIGINT")


@pytest.mark.parametrize(
    ("kind", "how"),
    [("run_started", "stop"), ("child_spawned", "stop"), ("step", "stop"), ("step", "kill")],
)
def test_a_run_that_is_stopped_ends_in_time_and_leaves_nothing(run_loop, kind, how):
    """I8: while the zygotes import, while actors come up, and in mid-step."""
    stop = StopAt(kind, how)
    run = run_loop(
        run={"steps": 1000, "grace_s": 10.0},
        rollout={"scripted_token_s": 0.02},
        on_tick=stop,
        control=stop.control,
    )
    assert stop.stopped
    assert run.outcome.exit_code == 130, run.log
    assert "SIGINT" in run.outcome.reason
    assert stop.control.killing == (how == "kill"), "the deadline of the test had to end it"
    assert_nothing_is_left(run)


def test_everything_lies_where_the_shared_memory_of_the_host_is(run_loop, tmp_path):
    """That is for each host to say; `app.run` says `queue.storage_path` for its own."""
    memory, samples, folder = (tmp_path / name for name in ("memory", "samples", "run"))
    for each in (memory, samples, folder):
        each.mkdir()
    config = run_loop.config(run={"steps": 2}, queue={"storage_path": str(samples)})
    owners = {memory: set(), samples: set()}

    with Supervisor(
        cast.tree(config), run_dir=folder, zygotes=zygote_imports.zygotes(config), shm_root=str(memory)
    ) as tree:
        ends_s = time.monotonic() + 120
        while (finished := tree.wait(0.02)) is None:
            assert time.monotonic() < ends_s
            for root, seen in owners.items():
                seen |= {parse_name(name).owner for name in ShmSpace(tree.run_id, root).names()}

    assert finished.outcome == "ok"
    assert {"dcs", "dcs-latest", "dcs-turns"} <= owners[memory]
    assert {"rollout/0", "rollout/1"} & owners[memory]
    assert not owners[samples]
