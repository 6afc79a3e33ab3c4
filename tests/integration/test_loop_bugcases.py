"""What stops other people's runs (the report of each in its docstring) and must not stop ours."""

import json
import shutil

import pytest
from loop_run import (
    GROUPS_PER_STEP,
    assert_kept_its_promises,
    assert_nothing_is_left,
    assert_trained_in_order,
    assert_trainer_went_on,
)

from launcher.report import summary
from launcher.runfolder import RunFolder
from relax_actor.data.stream import PromptStream
from relax_actor.faults import Action, Fault

pytestmark = pytest.mark.timeout(180)

UNANSWERED = Fault(actor="rollout/0", point="finished", nth=7, action=Action.LOSE)


def test_a_sample_the_engine_never_answers_is_timed_out_and_sampled_again(run_loop):
    """SkyRL#1173: the buffer is stuck just below the batch size for a day, without an error."""
    run = run_loop(plan=[UNANSWERED], rollout={"replicas": 1, "lease_s": 0.6})
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    late = run.of("lease_expired")[0]
    assert late["holder"] == {"name": "rollout/0", "incarnation": 1}
    assert late["group_ids"], "it names the group"


def test_a_group_that_never_completes_is_dropped_at_its_deadline_and_replaced(run_loop):
    """SkyRL#1173 again, with a lease that is longer than the group's deadline."""
    run = run_loop(plan=[UNANSWERED], rollout={"replicas": 1}, queue={"group_deadline_s": 2.0})
    assert_kept_its_promises(run)
    dropped = run.of("group_dropped")
    assert dropped, run.log
    for each in dropped:  # more than one where the machine stands still for so long
        assert each["reason"] == "deadline"
        assert "rollout/0" in each["detail"]
        assert each["origin"].startswith(run.config.data.path)
    late = {each["group_id"] for each in dropped}
    assert run.trained == [group for group in range(99) if group not in late][: 5 * GROUPS_PER_STEP]


@pytest.mark.fault
def test_a_rollout_that_always_raises_ends_the_run_with_its_name_cause_and_log(run_loop):
    """verl#6387: the rollout failed, and the job ended with success."""
    plan = [
        Fault(actor="rollout/0", point="first_token", action=Action.RAISE, incarnation=n)
        for n in range(1, 13)
    ]
    run = run_loop(plan=plan, rollout={"replicas": 1}, queue={"max_attempts": 100})
    assert run.outcome.exit_code == 1
    for fact in ("rollout/0", "InjectedFaultError", "injected at first_token"):
        assert fact in run.outcome.reason
    assert "`rollout/0` needed 11 restarts" in run.of("escalated")[0]["reason"]
    said = summary(RunFolder(run.folder), exit_code=1, reason=run.outcome.reason).splitlines()[-1]
    assert str(run.folder / "logs" / "rollout-0-11.log") in said
    assert_nothing_is_left(run)


def test_a_prompt_the_engine_cannot_sample_is_rejected_once_and_replaced(run_loop):
    """NeMo-RL#3938: it is retried for ever."""
    plan = [Fault(actor="rollout/0", point="submitted", nth=2, action=Action.REFUSE)]
    run = run_loop(plan=plan, rollout={"replicas": 1})
    assert_kept_its_promises(run)
    assert_trainer_went_on(run)
    (dropped,) = run.of("group_dropped")
    assert (dropped["reason"], dropped["detail"]) == ("rejected", "injected at submitted")
    assert set(run.trained) == set(range(5 * GROUPS_PER_STEP + 1)) - {dropped["group_id"]}


def test_prompts_too_long_for_the_model_and_almost_so_do_not_stop_it(run_loop, tmp_path, tiny_model):
    """NeMo-RL#3938, sglang#3910, inspect_ai#2316: 50,000 tokens, context - 1, and odd characters."""
    odd = ["x" * 50_000, "y" * 511, "\ud83d", "a\x00b", "\u202eabc", "\U0001f600"]
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": text, "label": text[:9]} for text in odd]
    lines += [{"prompt": f"reverse {n}", "label": f"{n}"} for n in range(6)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = run_loop(
        run={"steps": 3},
        data={"path": str(rows), "on_bad_row": "skip"},
        rollout={"engine": "transformers", "max_new_tokens": 4},
    )
    assert_kept_its_promises(run)
    (read,) = run.of("dataset_read")
    assert read["rows"] == len(lines) - len(read["skipped"])
    assert any("50000 tokens" in skipped for skipped in read["skipped"])


def test_rewards_that_raise_hang_or_are_no_number_cost_the_sample_and_no_more(run_loop):
    """TRL#5281, verl#6673, TRL#3079: the run dies, hangs, or all weights become NaN."""
    run = run_loop(
        reward={"function": "user_rewards:moody", "timeout_s": 4.0, "workers": 2},
        data={"shuffle": False},
    )
    assert_kept_its_promises(run)
    failed = {event["group_id"]: event["reason"] for event in run.of("reward_failed", sample_index=1)}
    assert set(failed) == {0, 1, 2, 3, 4, 5}
    words = {
        0: "not this one",
        1: "exceeded 4.0 s",
        2: "None",
        3: "NaN",
        4: "float inf",
        5: "nothing of this group",
    }
    for group, word in words.items():
        assert word in failed[group]
        assert f"rows-60.jsonl:{group + 1}" in failed[group], "function, row and sample are named"
    (dropped,) = run.of("group_dropped")
    assert (dropped["group_id"], dropped["reason"]) == (5, "few valid samples")
    assert set(run.trained) == set(range(5 * GROUPS_PER_STEP + 1)) - {5}
    assert sum(step["samples"] for step in run.history) == 5 * 16 - 5
    assert run.of("ledger")[-1]["dropped"] == 4 + 5


def test_a_reward_that_fails_on_everything_ends_the_run_with_the_reason(run_loop):
    """verl#4417, prime-rl#1563: no batch ever comes, and nobody says so."""
    run = run_loop(reward={"function": "user_rewards:broken"})
    assert run.outcome.exit_code == 1
    for fact in ("hopeless", "groups were dropped", "no reward for anybody", "user_rewards:broken"):
        assert fact in run.outcome.reason
    assert run.of("step") == []
    assert len(run.of("child_spawned")) == len({event["child"] for event in run.of("child_spawned")})
    assert_nothing_is_left(run)


def test_equal_rewards_skip_every_step_with_a_reason_and_move_nothing(run_loop, tiny_model):
    """prime-rl#1563, TRL#5588: crash, endless retry, or a policy moved by its regularisation alone."""
    from safetensors.numpy import load_file

    run = run_loop(reward={"function": "user_rewards:equal"}, train={"kl_coef": 0.1, "weight_decay": 0.1})
    assert_kept_its_promises(run)
    assert_trained_in_order(run)
    assert all(step["skipped"] for step in run.history)
    start = load_file(tiny_model.path / "model.safetensors")
    assert run.weights == {name: value.tobytes() for name, value in start.items()}


def test_a_padding_token_that_ends_samples_changes_no_bit_of_what_is_learned(run_loop, tmp_path, tiny_model):
    """TRL#4970, torchtune#2967: the true end of a sample is masked, and the model never learns to stop."""
    twin = tmp_path / "pad-is-eos"
    shutil.copytree(tiny_model.path, twin)
    for name, key, value in (
        ("config.json", "pad_token_id", 2),
        ("tokenizer_config.json", "pad_token", "<|im_end|>"),
    ):
        content = json.loads((twin / name).read_text())
        (twin / name).write_text(json.dumps({**content, key: value}))
    quiet = {"run": {"steps": 2, "max_staleness": 0}, "rollout": {"replicas": 1}}
    ours, theirs = run_loop(**quiet), run_loop(**quiet, model={"path": str(twin)})
    for run in (ours, theirs):
        assert_kept_its_promises(run)
    assert ours.weights == theirs.weights
    assert any(not step["skipped"] for step in ours.history)


def test_a_run_resumes_at_an_epochs_border_with_the_next_epoch(run_loop, tmp_path, tiny_model):
    """verl#5725, NeMo-RL#3599, OpenRLHF#1103: no steps and success, or prompts lost and repeated."""
    folder, rows = tmp_path / "resumed", 2 * GROUPS_PER_STEP
    data = {"path": str(tiny_model.rows(rows))}
    first = run_loop(folder=folder, run={"steps": 2}, data=data)
    again = run_loop(folder=folder, run={"steps": 2}, data=data, resume=newest(folder))
    second = run_loop(folder=folder, run={"steps": 4}, data=data, resume=newest(folder))
    assert_kept_its_promises(first)
    assert (again.outcome.exit_code, again.of("step")) == (0, []), "it had finished already"
    assert [step["step"] for step in second.history] == [3, 4]
    assert (first.trained, second.trained) == (list(range(rows)), list(range(rows, 2 * rows)))
    stream = PromptStream(rows, seed=first.config.run.seed)
    epochs = [[stream.at(group).row for group in run.trained] for run in (first, second)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(rows))] * 2
    assert epochs[0] != epochs[1], "each epoch is a permutation of its own"


def newest(folder):
    from relax_actor.trainers.checkpoint import CheckpointStore

    return CheckpointStore(folder / "checkpoints", keep=1).latest().path
