"""The event log says who lived when, and what each end followed from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.causes import chain, how
from launcher.hints import hint
from launcher.lives import Life, Lives, Phase


def lives_of(happened) -> Lives:
    lives = Lives()
    for event in happened.events:
        lives.apply(event)
    return lives


def whos(lives, name, incarnation=1):
    return [link.who for link in chain(lives, lives.life(name, incarnation))]


def test_every_incarnation_is_remembered_with_its_times(happened):
    happened.start("queue", pid=71, start_ticks=5)
    happened.end("queue", "SIGKILL", "signal", signal=9, code=None)
    happened.add("child_restarting", child="queue", incarnation=1, delay_s=0.2, reason="SIGKILL", also=[])
    happened.start("queue", incarnation=2)

    lives = lives_of(happened)

    first, second = lives.actors["queue"]
    assert (first.spawned_at, first.ready_at, first.ended_at) == (1001.0, 1002.0, 1003.0)
    assert (first.phase, first.delay_s, first.signal, first.host) == (Phase.RESTARTING, 0.2, 9, "here")
    assert (second.phase, second.is_over, lives.last("queue")) == (Phase.READY, False, second)
    assert first.is_failure
    assert lives.names == ["queue", "left", "right", "rollout/0", "rollout/1"]
    assert lives.last("left") is None


def test_a_new_tree_in_the_same_folder_starts_anew(happened):
    happened.start("queue")
    happened.add("run_started")
    lives = lives_of(happened)
    assert (lives.actors, lives.names) == ({}, [])


def test_supervisors_have_phases_too(happened):
    happened.add("supervisor_ready", supervisor="pair")
    happened.add("supervisor_ready", supervisor="rollouts")
    happened.add("supervisor_stopping", supervisor="pair", reason="told to")
    happened.add("child_restarting", child="rollouts", incarnation=1, delay_s=1.0)
    lives = lives_of(happened)
    assert [each.phase for each in lives.supervisors.values()] == [Phase.STOPPING, Phase.RESTARTING]
    assert lives.actors == {}

    happened.add("child_ended", child="rollouts")
    happened.add("escalated", supervisor="pair", reason="too many restarts")
    happened.add("run_ended", exit_code=1, reason="x")
    lives = lives_of(happened)
    assert [each.phase for each in lives.supervisors.values()] == [Phase.FAILED, Phase.ENDED]
    assert lives.ended["exit_code"] == 1


def test_an_end_that_only_the_node_agent_tells_counts(happened):
    happened.start("queue")
    happened.add("process_exited", child="queue", incarnation=1, code=None, signal=9)
    life = lives_of(happened).last("queue")
    assert (life.phase, how(life), life.is_over) == (Phase.EXITED, "SIGKILL", True)

    happened.end("queue", "SIGKILL", "signal", signal=9)
    happened.add("child_ended", child="queue", incarnation=1)
    life = lives_of(happened).last("queue")
    assert (life.phase, life.ended_at, life.kind) == (Phase.ENDED, 1003.0, "signal")


KINDS = [name.removeprefix("_on_") for name in vars(Lives) if name.startswith("_on_")] + ["other"]
FIELDS = ["t", "child", "incarnation", "supervisor", "tree", "also", "code", "signal", "reason", "exit"]
VALUES = [
    None,
    1,
    -1,
    2.5,
    True,
    "a",
    "",
    ["a"],
    {},
    {"name": "a"},
    {"name": "s", "children": [{"name": "a"}, 3]},
]
ODD = st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(VALUES))


@given(st.lists(st.tuples(st.sampled_from(KINDS), ODD), max_size=12))
def test_any_event_can_be_taken_and_any_end_explained(events):
    lives = Lives()
    for kind, fields in events:
        lives.apply(fields | {"kind": kind})
    for life in [life for each in lives.actors.values() for life in each]:
        assert chain(lives, life)


def test_a_supervisor_that_is_in_no_tree_explains_nothing(happened):
    happened.events.clear()
    happened.start("left")
    happened.add("child_restarting", child="right", incarnation=1, delay_s=0.1, also=["left"])
    happened.end("left", "stopped", "stopped")
    lives = lives_of(happened)
    assert (whos(lives, "left"), lives.names) == (["left#1"], ["left", "right"])


def test_an_end_by_itself_is_its_own_first_cause(happened):
    happened.start("left", "right")
    happened.end("left", "SIGKILL", "signal", signal=9)
    assert whos(lives_of(happened), "left") == ["left#1"]


def test_a_child_that_was_restarted_together_with_another_names_that_one_first(happened):
    happened.start("left", "right")
    happened.end("right", "SIGSEGV", "signal", signal=11)
    happened.add("child_restarting", child="right", incarnation=1, delay_s=0.1, also=["left"])
    happened.end("left", "stopped", "stopped", code=0)
    assert whos(lives_of(happened), "left") == ["right#1", "left#1"]


def test_a_child_below_a_supervisor_that_gave_up_names_the_failure_and_the_supervisor(happened):
    happened.start("queue", "rollout/0", "rollout/1")
    happened.end("rollout/0", "SIGKILL", "signal", signal=9)
    happened.add("escalated", supervisor="rollouts", reason="9 restarts in 600 s")
    happened.add("escalated", supervisor="run", reason="`rollouts` is significant and failed")
    happened.end("rollout/1", "stopped", "stopped")
    happened.end("queue", "stopped", "stopped")
    lives = lives_of(happened)
    assert whos(lives, "rollout/1") == ["rollout/0#1", "rollouts", "run", "rollout/1#1"]
    assert whos(lives, "queue") == ["rollout/0#1", "run", "queue#1"]


def test_the_death_of_the_node_agent_comes_before_those_of_its_actors(happened):
    happened.start("queue")
    happened.add("host_lost", host="local", actors=1, reason="its node agent ended")
    happened.end("queue", "host lost: the node agent died", "lease")
    assert whos(lives_of(happened), "queue") == ["host local", "queue#1"]


def test_an_error_that_names_another_death_leads_to_it(happened):
    happened.start("left", "right")
    happened.end("left", "SIGKILL", "signal", signal=9)
    happened.end(
        "right", "exit code 1: ActorDied: left (incarnation 1) died: SIGKILL (executed: maybe)", "error"
    )
    assert whos(lives_of(happened), "right") == ["left#1", "right#1"]


def test_a_supervisor_that_left_the_tree_explains_nothing(happened):
    happened.start("left")
    happened.add("child_restarting", child="extra", incarnation=1, delay_s=0.1, also=["left"])
    happened.end("left", "stopped", "stopped")
    assert whos(lives_of(happened), "left") == ["left#1"]


def test_what_happened_before_it_lived_is_no_cause(happened):
    happened.start("right")
    happened.end("right", "SIGKILL", "signal", signal=9)
    happened.add("child_restarting", child="right", incarnation=1, delay_s=0.1, also=["left"])
    happened.start("left", incarnation=2)
    happened.end(
        "left",
        "exit code 1: left (incarnation 2) died: of itself; nobody (incarnation 1) died: x",
        "error",
        2,
    )
    assert whos(lives_of(happened), "left", 2) == ["left#2"]


def test_a_kill_by_the_supervisor_is_told_with_its_reason(happened):
    happened.start("left")
    happened.add("child_killed", child="left", incarnation=1, reason="not ready after 120 s")
    happened.end("left", "start timeout", "start_timeout", signal=9)
    lives = lives_of(happened)
    assert chain(lives, lives.last("left"))[0].what == "start timeout (not ready after 120 s)"


def test_what_the_node_agent_kills_when_its_head_is_gone_is_told_so(happened):
    happened.start("left", "right")
    happened.end("right", "SIGKILL", "signal", signal=9)
    happened.add("lease_ended", reason="its head is gone")
    happened.add("process_exited", child="left", incarnation=1, code=None, signal=9)
    lives = lives_of(happened)
    assert chain(lives, lives.last("left"))[0].what == "SIGKILL (by its node agent: its head is gone)"
    assert lives.last("right").killed == ""


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"kind": "signal", "signal": 9}, "most often host memory"),
        ({"kind": "signal", "signal": 11}, "native code crashed"),
        ({"kind": "signal", "signal": 64}, ""),
        ({"kind": "signal", "signal": 99}, ""),
        ({"kind": "start_timeout", "signal": 9}, "raise start_timeout_s"),
        ({"kind": "oom", "signal": 9}, "memory.txt has the numbers"),
        ({"kind": "error", "code": 3}, "left by itself with exit code 3"),
        ({"kind": "stopped", "signal": 9}, ""),
        ({"killed": "over its time"}, "it was killed on purpose: over its time"),
    ],
)
def test_a_hint_fits_the_end(facts, words):
    said = hint(Life(name="a", incarnation=1, **facts), has_traceback=False)
    assert words in said
    assert bool(said) == bool(words)


def test_a_traceback_is_the_best_hint():
    assert "what was raised" in hint(Life(name="a", incarnation=1, kind="error", code=1), has_traceback=True)


def test_an_end_is_said_with_what_is_known():
    assert how(Life(name="a", incarnation=1)) == "unknown"
    assert how(Life(name="a", incarnation=1, code=3)) == "exit code 3"


def test_an_actor_of_another_host_has_that_hosts_name_and_memory(happened):
    happened.add("host_joined", host="a", agent=1, agent_pid=5, node="faraway", shm_root="/a/memory")
    happened.add("host_joined", host="b", agent=1, agent_pid=6)
    for name, site, host in (("left", "a", "faraway"), ("right", "b", "here")):
        happened.add("child_spawned", child=name, incarnation=1, pid=7, host=host, site=site)

    lives = lives_of(happened)

    (left,), (right,) = lives.actors["left"], lives.actors["right"]
    assert (left.host, left.site, left.shm_root) == ("faraway", "a", "/a/memory")
    assert (right.host, right.site, right.shm_root) == ("here", "b", lives.shm_root)
