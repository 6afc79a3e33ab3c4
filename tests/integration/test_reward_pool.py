"""The reward pool with real processes: whatever a reward function does, every sample has an outcome."""

import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from watching import eventually, is_dead

from relax_actor.rewards.pool import RewardPool
from relax_actor.rewards.registry import RewardFunctionError, RewardInput

ROOT = Path(__file__).parents[2]
FUNCTIONS = textwrap.dedent(r'''
    import os, re, signal, subprocess, sys, time

    def act(response, label, extra):
        """Do what the response says."""
        return globals()["do_" + response](label, **extra)

    def do_good(label): return float(label)
    def do_print(label): print("noise"); print("more", file=sys.stderr); return len(sys.stdin.read())
    def do_pid(label): return os.getpid()
    def do_raise(label): raise ValueError("boom \ud83d")
    def do_exit(label): raise SystemExit(0)
    def do_none(label): return None
    def do_nan(label): return float("nan")
    def do_spin(label):
        while True: pass
    def do_regex(label): re.match(r"(a+)+$", "a" * 50 + "b")
    def do_die(label): os.kill(os.getpid(), signal.SIGKILL)
    def do_leave(label): os._exit(3)
    def do_die_once(label, mark):
        if not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(3)
        return 5.0
    def do_stop(label): os.kill(os.getpid(), signal.SIGSTOP)
    def do_child(label, mark):
        child = subprocess.Popen(["sleep", "1000"])
        open(mark + ".new", "w").write(str(child.pid))
        os.rename(mark + ".new", mark)
        time.sleep(1000)
    def do_meet(label, folder):
        """Wait for the other one that does so."""
        open(os.path.join(folder, label), "w").close()
        while len(os.listdir(folder)) < 2: time.sleep(0.01)
        return 1.0
''')


def task(response, label="1", sample=0, **extra):
    return RewardInput(
        response=response, label=label, extra=extra, origin="rows.jsonl:3", group_id=7, sample_index=sample
    )


@pytest.fixture(scope="module")
def user_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "deeds.py").write_text(FUNCTIONS)
    return str(folder)


@pytest.fixture(scope="module")
def pool(user_path):
    """Share one pool: that it survives every test is a part of each test."""
    with shared_pool(user_path, timeout_s=60.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty(user_path):
    """Share a pool for those that take too long."""
    with shared_pool(user_path, timeout_s=1.0) as pool:
        yield pool


@contextmanager
def shared_pool(user_path, *, timeout_s):
    pool = RewardPool("deeds:act", workers=1, timeout_s=timeout_s, user_path=user_path)
    yield pool
    pids = pool.pids
    pool.close()
    assert pids
    assert not any(map(psutil.pid_exists, pids))


def is_gone(pid):
    try:
        return is_dead(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def score(pool, response, label="1", **extra):
    return pool.submit(task(response, label, **extra)).result(timeout=90)


@pytest.fixture
def outcome(pool):
    """Score one sample; whatever the test did, the pool scores the next sample after it."""
    yield partial(score, pool)
    assert score(pool, "good", "0.5").reward == 0.5


@pytest.fixture
def hasty_outcome(hasty):
    """Score one sample in little time; whatever the test did, the pool scores another one after it."""
    yield partial(score, hasty)
    eventually(lambda: score(hasty, "good", "0.5").reward == 0.5)  # a busy machine may take too long


def test_a_reward_comes_back(outcome):
    result = outcome("good", "0.75")

    assert (result.reward, result.reason) == (0.75, "")
    assert 0 <= result.seconds < 60


def test_what_a_function_prints_or_reads_is_not_the_pools(outcome):
    assert outcome("print").reward == 0.0


@pytest.mark.fault
@pytest.mark.parametrize("deed", ["spin", "regex", "stop"])
def test_a_function_that_hangs_is_killed_and_named(hasty, hasty_outcome, deed):
    """BUGCASES 11: also where the interpreter cannot run a signal handler or a thread."""
    (pid,) = hasty.pids

    result = hasty_outcome(deed)

    assert result.reward is None
    assert result.reason == "reward function `deeds:act` exceeded 1.0 s on rows.jsonl:3 (group 7, sample 0)"
    assert not psutil.pid_exists(pid)


@pytest.mark.fault
def test_a_function_that_hangs_takes_its_own_processes_with_it(hasty_outcome, tmp_path):
    def is_killed_with_a_child():
        assert "exceeded" in hasty_outcome("child", mark=str(tmp_path / "pid")).reason
        return (tmp_path / "pid").exists()  # else it was too slow to have one

    eventually(is_killed_with_a_child)
    child = int((tmp_path / "pid").read_text())
    eventually(lambda: is_gone(child))


@pytest.mark.fault
def test_an_exception_is_a_reason_with_the_traceback_once(user_path):
    """BUGCASES 10: on one sample or on all, the pool goes on."""
    pool = RewardPool("deeds:act", workers=1, timeout_s=60.0, user_path=user_path)

    reasons = [pool.submit(task("raise", sample=i)).result(timeout=90).reason for i in range(3)]
    pool.close()

    start = "reward function `deeds:act` raised ValueError: boom \ud83d on rows.jsonl:3 (group 7, sample 0)\n"
    assert reasons[0].startswith(start + "Traceback (most recent call last):")
    assert "in do_raise" in reasons[0]
    assert reasons[2] == start.strip().replace("sample 0", "sample 2")
    ((kind, count),) = pool.failures.items()
    assert (kind.split(" at ")[0], count) == ("ValueError", 3)


def test_leaving_the_interpreter_is_an_exception_like_any_other(pool, outcome):
    before = pool.pids

    assert "raised SystemExit: 0" in outcome("exit").reason
    assert pool.pids == before


@pytest.mark.parametrize(("deed", "fact"), [("none", "returned None"), ("nan", "returned NaN")])
def test_what_is_no_reward_is_rejected_at_the_boundary(outcome, deed, fact):
    """BUGCASES 12."""
    result = outcome(deed)

    assert result.reward is None
    assert f"{fact}, where a finite number is wanted on rows.jsonl:3" in result.reason


@pytest.mark.fault
def test_a_sample_whose_process_dies_is_tried_once_more(outcome, tmp_path):
    assert outcome("die_once", mark=str(tmp_path / "mark")).reward == 5.0


@pytest.mark.fault
@pytest.mark.parametrize(("deed", "how"), [("die", "SIGKILL"), ("leave", "exit code 3")])
def test_a_sample_that_kills_its_process_twice_is_rejected(outcome, deed, how):
    assert outcome(deed).reason == (
        f"reward function `deeds:act` lost its process 2 times, at last by {how}, "
        "on rows.jsonl:3 (group 7, sample 0)"
    )


@pytest.mark.fault
def test_an_idle_worker_that_is_killed_costs_no_sample_an_attempt(pool, outcome):
    for _ in range(3):
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: pid not in pool.pids)
        assert outcome("good").reward == 1.0


@pytest.mark.parametrize("extra", [{"x": {1, 2}}, {"x": b"bytes"}])
def test_a_sample_that_cannot_be_sent_is_rejected(outcome, extra):
    assert "could not be asked: Object of type" in outcome("good", **extra).reason


def test_large_and_odd_text_reaches_the_function(outcome):
    assert outcome("good", "0." + "3" * 2**20).reward == pytest.approx(1 / 3)
    assert "could not convert string to float: '\\ud83d\\n\\x00'" in outcome("good", "\ud83d\n\0").reason


def test_several_workers_score_at_the_same_time(user_path, tmp_path):
    pool = RewardPool("deeds:act", workers=2, timeout_s=30.0, user_path=user_path)

    first, second = [pool.submit(task("meet", label, folder=str(tmp_path))) for label in "12"]

    assert (first.result(timeout=60).reward, second.result(timeout=60).reward) == (1.0, 1.0)
    pool.close()


def test_closing_ends_what_is_running_and_leaves_no_process(user_path):
    pool = RewardPool("deeds:act", workers=1, timeout_s=60.0, user_path=user_path)
    futures = [pool.submit(task("spin")) for _ in range(3)]
    eventually(futures[0].running)
    pids = pool.pids

    pool.close()
    pool.close()

    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=20)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(task("good"))


@pytest.mark.parametrize(
    ("function", "fact"),
    [("deeds:missing", "has no `missing`"), ("no_such_deeds:act", "is not found"), ("deed", "must be")],
)
def test_a_function_that_cannot_be_used_is_told_at_the_start(user_path, function, fact):
    with pytest.raises(RewardFunctionError, match=fact) as caught:
        RewardPool(function, workers=2, timeout_s=1.0, user_path=user_path)
    assert str(caught.value).count("reward.function") == 1


@pytest.mark.fault
def test_workers_die_with_a_pool_that_is_killed(user_path, tmp_path):
    """Even where the function holds the interpreter's lock, and the user's script has no main guard."""
    script = tmp_path / "script.py"
    script.write_text(
        "from relax_actor.rewards.pool import RewardPool\n"
        "from relax_actor.rewards.registry import RewardInput\n"
        f"pool = RewardPool('deeds:act', 1, 60.0, {user_path!r})\n"
        "task = dict(label='', extra={}, origin='', group_id=0, sample_index=0)\n"
        "pool.submit(RewardInput(response='regex', **task))\n"
        "print(pool.pids[0], flush=True)\n"
        "import time; time.sleep(1000)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as process:
        worker = int(process.stdout.readline())
        process.kill()

    eventually(lambda: is_gone(worker))


@pytest.mark.fault
def test_arithmetic_that_never_ends_is_stopped_in_the_shipped_function():
    pool = RewardPool("math", workers=1, timeout_s=3.0)

    tower = pool.submit(task(r"\boxed{9^{9^{9}}}", "7")).result(timeout=60)
    eventually(lambda: pool.submit(task("so 7", "7")).result(timeout=60).reward == 1.0)
    pool.close()

    assert "exceeded 3.0 s" in tower.reason
