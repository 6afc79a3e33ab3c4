"""A rollout's long samples go on elsewhere from their last chunk, wherever it dies."""

import pytest
from loop_faults import Rendezvous, standstill
from loop_run import assert_kept_its_promises, assert_trained_in_order, assert_trainer_went_on, kills

from relax_actor.protocol import FinishReason
from relax_actor.transfer_queue.events import (
    ChunkPut,
    PartialsEnded,
    PromptLeased,
    RewardLeased,
    Rewound,
    SamplesPut,
)

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

CHUNKS = {"chunk_tokens": 2, "max_new_tokens": 12}
SLOW = {**CHUNKS, "scripted_token_s": 0.01}


def continued_tokens(run):
    """Return how many tokens each sample got from an earlier lease; all that was accepted, or it fails."""
    there, at_lease, continued = {}, {}, []
    for event in run.journal:
        match event:
            case ChunkPut(chunk=chunk):
                there[chunk.group_id, chunk.sample_index] = chunk.length
            case PromptLeased():
                rows = {(event.lease_id, i): there.get((event.group_id, i), 0) for i in event.rows}
                at_lease.update(rows)
            case Rewound():
                there.clear()
            case SamplesPut(samples=samples):
                continued += [sample.continued_tokens for sample in samples]
                expected = [at_lease[sample.lease_id, sample.sample_index] for sample in samples]
                assert continued[-len(samples) :] == expected
    return continued


def test_a_sample_goes_on_from_its_last_chunk_wherever_its_rollout_dies(run_loop):
    """I2, I3, I4, I5, I8: and no token that the queue has accepted is sampled again."""
    plan = [
        *kills("rollout/0", "chunk_written", "chunk_sent", ("chunk_written", 3), ("chunk_sent", 4)),
        *kills("rollout/1", ("chunk_sent", 2), ("chunk_written", 4), ("first_token", 7), ("ready_sent", 2)),
    ]
    run = run_loop.until_killed(plan, rollout=SLOW)

    assert sorted(run.killed) == sorted(fault.actor for fault in plan), run.log
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    assert sum(count > 0 for count in continued_tokens(run)) >= len(plan) // 2
    told = sum(event["tokens"] for event in run.of("samples_continued"))
    assert told >= sum(continued_tokens(run)) > 0, "a lease may be lost on its way, or its rollout die again"


def test_chunks_survive_the_queue_wherever_it_dies(run_loop):
    """I2, I5, I8: a chunk sent again is recognised, and memory of superseded chunks is freed."""
    plan = [
        *kills("queue", ("queue_decided", 9), ("queue_committed", 14), ("queue_answered", 9)),
        *kills("rollout/0", ("chunk_sent", 5)),
    ]
    run = run_loop.until_killed(plan, rollout=SLOW)

    assert sorted(run.killed) == sorted(fault.actor for fault in plan), run.log
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert_trainer_went_on(run)
    continued_tokens(run)


@pytest.mark.parametrize(
    "rollout", [SLOW, {**CHUNKS, "engine": "transformers", "deterministic": True}], ids=["scripted", "real"]
)
def test_going_on_elsewhere_leaves_no_trace_in_the_weights(run_loop, rollout):
    """I6: the same bits as in a run without deaths and without chunks."""
    synchronous = {"run": {"max_staleness": 0, "mode": "async_on_policy", "steps": 6}}
    quiet = run_loop(**synchronous, rollout=rollout | {"chunk_tokens": 0})
    plan = [*kills("rollout/0", ("chunk_sent", 4)), *kills("rollout/1", ("chunk_sent", 3), ("chunk_sent", 2))]
    stops = [standstill(steps) for steps in range(1, 6)]  # or one may do it all while the other one starts
    run = run_loop(plan=plan + stops, on_tick=Rendezvous(), **synchronous, rollout=rollout)

    assert sorted(run.killed) == sorted(fault.actor for fault in plan), run.log
    assert_kept_its_promises(run)
    assert any(continued_tokens(run))
    assert not any(continued_tokens(quiet))
    assert run.weights == quiet.weights


def test_over_the_deadline_samples_are_trained_with_the_tokens_they_have(run_loop):
    """Their finish reason says so to the reward function, and their rollout stops sampling them."""
    run = run_loop(
        run={"steps": 3},
        rollout={"chunk_tokens": 2, "max_new_tokens": 400, "scripted_token_s": 0.01},
        queue={"partial_rollout_timeout_s": 1.0, "on_partial_timeout": "finish"},
    )
    assert_kept_its_promises(run)
    ended = [event for event in run.journal if isinstance(event, PartialsEnded) and event.rows]
    assert ended
    scored = {key for event in run.journal if isinstance(event, RewardLeased) for key in event.rows}
    assert {(event.group_id, index) for event in ended for index in event.rows} <= scored
    assert run.of("put_refused", what="chunks"), "or the rollouts would have gone on"
    assert all(sample.finish_reason is not FinishReason.ABORT for sample in run.samples_put)
