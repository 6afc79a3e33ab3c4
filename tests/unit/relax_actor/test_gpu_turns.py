"""Turns on a GPU: one side at a time, and none that a death could keep."""

import os
import signal
import subprocess
import sys

import pytest

from relax_actor.roles.gpu_turns import RolloutTurn, TrainerTurn

HOLD = "import sys; sys.stdin.read()"


@pytest.fixture
def rollouts(tmp_path):
    return [RolloutTurn(tmp_path, f"rollout/{index}") for index in range(2)]


def test_rollouts_share_a_turn_and_the_trainer_waits_for_all_of_them(tmp_path, rollouts):
    assert all(turn.try_take() for turn in rollouts)
    trainer = TrainerTurn(tmp_path)
    assert trainer.try_take() == ("rollout-0", "rollout-1")
    assert all(turn.is_wanted() for turn in rollouts)
    rollouts[0].give_up()
    assert trainer.try_take() == ("rollout-1",)
    assert not rollouts[0].try_take()
    rollouts[1].give_up()
    assert trainer.try_take() == ()


def test_nobody_wakes_before_the_trainer_has_given_up_its_turn(tmp_path, rollouts):
    trainer = TrainerTurn(tmp_path)
    assert trainer.try_take() == ()
    assert not any(turn.try_take() for turn in rollouts)
    assert not RolloutTurn(tmp_path, "rollout/7").try_take(), "one that is new waits, too"
    trainer.give_up()
    assert not any(turn.is_wanted() for turn in rollouts)
    assert all(turn.try_take() for turn in rollouts)


def test_a_trainer_that_dies_in_its_turn_gives_it_back(tmp_path, rollouts):
    code = (
        "import sys, pathlib; from relax_actor.roles.gpu_turns import TrainerTurn\n"
        "turn = TrainerTurn(pathlib.Path(sys.argv[1])); print(turn.try_take(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout.readline() == b"()\n"
        assert not rollouts[0].try_take()
        trainer.kill()
    assert rollouts[0].try_take()


def test_a_server_that_outlives_its_rollout_keeps_the_gpu(tmp_path):
    first = RolloutTurn(tmp_path, "rollout/0")
    assert first.try_take()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, pass_fds=[first.fd]) as server:
        os.close(first.fd)  # as by a death
        trainer = TrainerTurn(tmp_path)
        assert trainer.try_take() == ("rollout-0",)
        trainer.give_up()
        assert not RolloutTurn(tmp_path, "rollout/0").try_take(), "the next incarnation waits for its memory"
        server.kill()
        server.wait()
    assert RolloutTurn(tmp_path, "rollout/0").try_take()


def test_giving_up_frees_what_a_server_has_inherited(tmp_path, rollouts):
    assert rollouts[0].try_take()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, pass_fds=[rollouts[0].fd]
    ) as server:
        rollouts[0].give_up()
        assert TrainerTurn(tmp_path).try_take() == ()
        server.kill()


def holder(folder, *, ready):
    code = (
        "import sys, pathlib; from relax_actor.roles.gpu_turns import RolloutTurn\n"
        "turn = RolloutTurn(pathlib.Path(sys.argv[1]), 'rollout/0'); assert turn.try_take()\n"
        f"{'turn.be_ready()' if ready else ''}\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_one_that_could_sleep_and_does_not_is_ended(tmp_path):
    with holder(tmp_path, ready=True) as late:
        late.stdout.readline()
        trainer = TrainerTurn(tmp_path)
        assert trainer.try_take() == ("rollout-0",)
        assert trainer.end("rollout-0") == late.pid
        assert late.wait(60) == -signal.SIGKILL
    assert trainer.try_take() == ()
    assert trainer.end("rollout-0") == 0, "it has ended"


def test_one_that_still_starts_is_left_alone(tmp_path):
    with holder(tmp_path, ready=False) as starting:
        starting.stdout.readline()
        trainer = TrainerTurn(tmp_path)
        trainer.try_take()
        assert trainer.end("rollout-0") == 0
        assert starting.poll() is None
        starting.kill()


def test_one_that_sleeps_is_not_ended_for_its_pid(tmp_path, rollouts):
    assert rollouts[0].try_take()
    rollouts[0].be_ready()
    with holder(tmp_path, ready=False) as other:  # cannot take it: the assertion ends it
        pass
    assert other.returncode
    rollouts[0].give_up()
    assert TrainerTurn(tmp_path).end("rollout-0") == 0
