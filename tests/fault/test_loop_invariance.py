"""Chaos invariance: without staleness, deaths leave no trace in the weights, not even in the last bit."""

import dataclasses
import secrets
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import pytest
from loop_run import (
    LoopRunner,
    assert_kept_its_promises,
    assert_trained_in_order,
    kills,
    leftovers,
)
from watching import ended_after, eventually

from relax_actor.telemetry import read_events
from relax_actor.transfer_queue.events import BatchExtended

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

SYNCHRONOUS = {"run": {"max_staleness": 0, "mode": "async_on_policy", "steps": 10}}
REAL_ENGINE = {"engine": "transformers", "deterministic": True}

HEAD = """
    import json, sys
    from pathlib import Path

    import msgspec

    from relax_actor import app
    from relax_actor.config import Config

    if __name__ == "__main__":
        config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
        app.run(config, Path(sys.argv[2]), run_id=sys.argv[3], env={"OMP_NUM_THREADS": "1"})
"""


def sections(engine):
    rollout = REAL_ENGINE if engine == "transformers" else {"scripted_token_s": 0.02}
    return {**SYNCHRONOUS, "rollout": rollout, "train": {"checkpoint_every": 5}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_model):
    """A run in which nothing happens, once an engine."""
    runner, runs = LoopRunner(tmp_path_factory.mktemp("undisturbed"), tiny_model), {}

    def run(engine):
        if engine not in runs:
            runs[engine] = runner(**sections(engine))
        return runs[engine]

    return run


@pytest.mark.parametrize("engine", ["scripted", "transformers"])
def test_three_deaths_leave_no_trace_in_the_weights(run_loop, undisturbed, engine):
    """I6: two rollouts and the reward actor are killed; the weights are those of a quiet run, bit for bit."""
    plan = [
        *kills("rollout/0", ("first_token", 5)),
        *kills("rollout/1", ("ready_sent", 2)),
        *kills("reward", ("reward_sent", 3)),
    ]
    run = run_loop(plan=plan, **sections(engine))
    assert sorted(run.killed) == sorted(fault.actor for fault in plan), run.log
    assert_kept_its_promises(run)
    assert [step["groups"] for step in run.history] == [
        step["groups"] for step in undisturbed(engine).history
    ]
    assert run.weights == undisturbed(engine).weights
    assert any(not step["skipped"] for step in run.history), (
        "nothing was trained, so this would prove nothing"
    )


def test_a_killed_trainer_arrives_at_the_same_weights(run_loop, undisturbed):
    """I6 beyond its letter: the steps it lost are done again from the same prompts and random numbers."""
    run = run_loop(plan=kills("trainer", ("trained", 7)), **sections("scripted"))
    assert run.killed == ["trainer"]
    assert_kept_its_promises(run)
    assert run.weights == undisturbed("scripted").weights


def test_a_run_whose_head_was_killed_resumes_to_the_same_weights(run_loop, undisturbed, tmp_path):
    """I6, I8: 5 steps, kill -9, 5 more: nothing stays, each prompt is trained once, every bit is the same."""
    folder, config = tmp_path / "killed", run_loop.config(**sections("scripted"))
    kill_head_after_checkpoint(folder, config, secrets.token_hex(4))
    past, _ = read_events(folder / "events.jsonl")
    checkpoint = next(Path(event["path"]) for event in past if event["kind"] == "checkpoint_saved")

    resumed = run_loop(config=config, folder=folder, resume=checkpoint)

    assert resumed.history[0]["step"] == 6
    whole = dataclasses.replace(resumed, events=[*past, *resumed.events])
    assert_kept_its_promises(whole)
    assert_trained_in_order(whole)
    assert whole.weights == undisturbed("scripted").weights


def kill_head_after_checkpoint(folder, config, run_id):
    """Run in a process of its own, SIGKILL that a step after the checkpoint, wait until all is gone."""
    folder.mkdir()
    (folder / "head.py").write_text(textwrap.dedent(HEAD))
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    words = [sys.executable, str(folder / "head.py"), str(folder / "config.json"), str(folder), run_id]
    with ended_after(subprocess.Popen(words)) as head:
        eventually(lambda: is_step_done(folder, 6), 90.0, poll_s=0.005)
        head.kill()
    eventually(lambda: leftovers(folder, run_id) == [], 60.0)


def is_step_done(folder, step):
    events, _ = read_events(folder / "events.jsonl")
    return any(event["kind"] == "step" and event["step"] == step for event in events)


def test_a_batch_trained_on_in_parts_has_the_same_weights_whoever_dies(run_loop):
    """I6 while streaming: parts come in the order of the groups, so gradients are summed in one order."""
    streamed = {**sections("scripted"), "train": {"checkpoint_every": 5, "stream_micro_batches": True}}
    plan = [
        *kills("rollout/0", ("first_token", 5)),
        *kills("rollout/1", ("ready_sent", 2)),
        *kills("trainer", ("batch_leased", 7)),
        *kills("queue", ("queue_committed", 40)),
    ]
    quiet, stormy = run_loop(**streamed), run_loop(plan=plan, **streamed)
    assert sorted(stormy.killed) == sorted(fault.actor for fault in plan), stormy.log
    for run in (quiet, stormy):
        assert_kept_its_promises(run)
        assert_trained_in_order(run)
        assert any(isinstance(event, BatchExtended) for event in run.journal)
    assert stormy.weights == quiet.weights


def test_training_in_parts_changes_nothing_but_the_last_bits(run_loop, undisturbed):
    whole = undisturbed("scripted")
    parts = run_loop(
        **{**sections("scripted"), "train": {"checkpoint_every": 5, "stream_micro_batches": True}}
    )
    for name, tensor in whole.tensors.items():
        np.testing.assert_allclose(parts.tensors[name], tensor, rtol=1e-3, atol=1e-4)
    losses = [[step["loss"] for step in run.history] for run in (whole, parts)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3, atol=1e-4)
