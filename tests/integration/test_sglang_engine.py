"""The engine `sglang` over a server that only looks like one; tests/sglang holds the real one to the same."""

import json
import os
import signal
import time
from pathlib import Path

import fake_sglang
import psutil
import pytest
import torch

from relax_actor.engines.base import Prefix, Request, SamplingParams
from relax_actor.engines.errors import EngineNotReadyError, RequestError
from relax_actor.engines.sglang.around import Surroundings
from relax_actor.engines.sglang.engine import SglangEngine
from relax_actor.engines.sglang.errors import (
    EngineDownError,
    ServerError,
    ServerGoneError,
    ServerHungError,
    StartError,
)
from relax_actor.engines.sglang.requests import GenerationSettings
from relax_actor.engines.sglang.settings import ServerSettings
from relax_actor.engines.sglang.states import EngineState
from relax_actor.engines.sglang.weights import Deadlines, MemoryTag, Updater, UpdateSettings
from relax_actor.engines.stop_strings import StopStrings
from relax_actor.errors import PartialRolloutFormatError
from relax_actor.protocol import FinishReason

CONTEXT, VOCABULARY, DEADLINE_S = 64, 100, 60.0
WEIGHTS = [("w", torch.arange(8.0))]


class Play:
    """An engine of a test, and what it has told its actor."""

    def __init__(
        self,
        folder: Path,
        *,
        stream=0,
        mode="auto",
        health_s=30.0,
        update_s=30.0,
        memory_saver=False,
        hold=0,
        **script,
    ) -> None:
        self.events, self.woken, self.update_s = [], 0, update_s
        self.held = folder / "held"  # for as long as it is there, no sample gets more tokens than `hold`
        if hold:
            self.held.touch()
            script["hold"] = [str(self.held), hold]
        server = ServerSettings(
            model=str(folder),
            python=str(fake_sglang.stand_in(folder)),
            context_tokens=CONTEXT,
            slots=8,
            stream_tokens=stream,
            memory_saver=memory_saver,
            env={"FAKE_SGLANG": json.dumps(script)},
        )
        self.engine = SglangEngine(
            server,
            GenerationSettings(seed=3, stream=stream > 0),
            self.updater,
            vocabulary=VOCABULARY,
            names=frozenset({"w"}),
            log=folder / "server.log",
            update_mode=mode,
            health_s=health_s,
            around=Surroundings(
                wake=self.wake, emit=lambda kind, **fields: self.events.append((kind, fields))
            ),
        )

    def updater(self, client, found):
        return Updater(client, found, UpdateSettings(deadlines=Deadlines(step_s=self.update_s)))

    def wake(self) -> None:
        self.woken += 1

    def emit(self, kind, **fields) -> None:
        self.events.append((kind, fields))

    def of(self, kind):
        return [fields for name, fields in self.events if name == kind]

    def await_tokens(self, count: int) -> None:
        """Wait until the samples in flight have so many tokens, all together."""
        load = lambda: self.engine._life.client.get("/v1/loads", deadline_s=20)["loads"][0]  # noqa: E731
        wait_for(lambda: load()["num_used_tokens"] == count)


@pytest.fixture
def play(tmp_path):
    """Start engines that are closed at the end, whatever becomes of the test."""
    played = []

    def start(**how):
        folder = tmp_path / str(len(played))
        folder.mkdir()
        played.append(Play(folder, **how))
        return played[-1]

    yield start
    for each in played:
        each.engine.close()


@pytest.fixture
def engine(play):
    made = play().engine
    made.install(1, WEIGHTS)
    return made


def request(group=0, sample=0, prompt=(5, 6, 7), max_new=8, prefix=None, **params):
    kind = {} if prefix is None else {"prefix": prefix}
    return Request(
        group_id=group,
        sample_index=sample,
        prompt=tuple(prompt),
        params=SamplingParams(max_new_tokens=max_new, **params),
        **kind,
    )


def expected(prompt, tokens):
    """Return what the fake samples: every token is a function of all before."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(sum(text) % 97 + 3)
    return text[len(prompt) :]


def drain(engine):
    done, end = {}, time.monotonic() + DEADLINE_S
    while engine.in_flight:
        done.update({each.request.key: each for each in engine.step()})
        assert time.monotonic() < end, "the engine does not finish"
        time.sleep(0.002)
    return done


def wait_for(what):
    end = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_weight_that_the_model_does_not_have_is_named_and_never_passed_over(play):
    """SGLang itself says nothing of it."""
    engine = play().engine
    with pytest.raises(KeyError, match=r"experts\.fused"):
        engine.install(1, [("w", torch.arange(8.0)), ("experts.fused", torch.zeros(2))])
    assert engine.version is None


def test_an_engine_that_has_started_serves_and_has_no_version(play):
    engine = play().engine
    assert (engine.state, engine.version) == (EngineState.UNSYNCED, None)
    with pytest.raises(EngineNotReadyError):
        engine.submit([request()])
    with pytest.raises(EngineNotReadyError):
        engine.step()


def test_the_start_is_told_with_its_parts_and_the_server(play):
    (started,) = (played := play()).of("engine_started")
    assert started["sglang"] == "0.5.23"
    assert started["phases"]["first_token"] >= 0
    assert psutil.pid_exists(started["server_pid"])
    assert played.engine.capabilities.version_spans


@pytest.mark.parametrize("stream", [0, 3])
def test_samples_are_returned_with_their_tokens_versions_and_reasons(play, stream):
    engine = play(stream=stream).engine
    engine.install(4, WEIGHTS)
    stop = expected((5, 6, 9), 5)[-1]
    requests = [request(sample=i, prompt=(5, 6, 7 + i), stop_token_ids=(stop,)) for i in range(4)]
    engine.submit(requests)
    done = drain(engine)

    assert len(done) == 4
    for key, completion in done.items():
        tokens = expected(completion.request.prompt, 8)
        wanted = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert completion.tokens.tolist() == wanted, key
        assert completion.versions.tolist() == [4] * len(wanted)
        assert completion.logprobs.tolist() == [-0.5] * len(wanted)
        reason = FinishReason.STOP if stop in tokens else FinishReason.LENGTH
        assert completion.finish_reason is reason


def said(engine, path):
    """Return how often the server was asked something."""
    return engine._life.client.get("/asked", deadline_s=20).count(path)


@pytest.mark.parametrize("stream", [0, 3])
def test_a_stop_string_ends_a_sample_with_the_token_that_makes_it_whole(play, stream):
    engine = play(stream=stream).engine
    engine.install(4, WEIGHTS)
    tokens = expected((5, 6, 7), 40)
    strings = StopStrings([f"{tokens[9]}><{tokens[10]}"], fake_sglang.text_of)
    engine.submit([request(max_new=40, stop_strings=strings), request(sample=1, max_new=40)])
    done = drain(engine)

    assert done[0, 0].tokens.tolist() == tokens[:11]
    assert done[0, 0].logprobs.tolist() == [-0.5] * 11
    assert done[0, 0].finish_reason is FinishReason.STOP
    assert done[0, 1].tokens.tolist() == tokens
    assert said(engine, "/abort_request") == 0


@pytest.mark.parametrize("stream", [0, 2])
def test_a_stop_string_that_begins_in_a_prefix_is_found_though_the_server_does_not(play, stream):
    """Where it is heard of before its end, the server is told; otherwise what is too much is cut off."""
    played = play(stream=stream, hold=10 if stream else 0)
    engine = played.engine
    engine.install(4, WEIGHTS)
    tokens = expected((5, 6, 7), 50)
    strings = StopStrings([f"{tokens[2]}><{tokens[3]}"], fake_sglang.text_of)
    prefix = Prefix(tokens=tuple(tokens[:3]), logprobs=(-1.0,) * 3, versions=(2, 2, 3))
    engine.submit([request(max_new=50, stop_strings=strings, prefix=prefix)])
    (completion,) = drain(engine).values()

    assert completion.tokens.tolist() == tokens[:4]
    assert completion.logprobs.tolist() == [-1.0] * 3 + [-0.5]
    assert completion.versions.tolist() == [2, 2, 3, 4]
    assert completion.finish_reason is FinishReason.STOP
    assert said(engine, "/abort_request") == (1 if stream else 0)


def test_a_sample_that_finishes_while_it_is_stopped_has_finished(play):
    engine = play(late_abort=True, hold=2).engine
    engine.install(4, WEIGHTS)
    engine.submit([request()])
    (done,) = engine.abort([(0, 0)])
    assert done.finish_reason is FinishReason.LENGTH
    assert done.tokens.tolist() == expected((5, 6, 7), 8)
    assert engine.in_flight == 0


def test_a_sample_that_is_over_is_no_partial_one(play):
    """Whoever went on from it would find that it has come to its end."""
    played = play(stream=1, hold=5)
    engine = played.engine
    engine.install(4, WEIGHTS)
    tokens = expected((5, 6, 7), 50)
    strings = StopStrings([f"{tokens[2]}><{tokens[3]}"], fake_sglang.text_of)
    prefix = Prefix(tokens=tuple(tokens[:3]), logprobs=(-1.0,) * 3, versions=(2, 2, 3))
    engine.submit([request(max_new=50, stop_strings=strings, prefix=prefix), request(sample=1, max_new=50)])
    wait_for(lambda: min(engine.lengths().values()) >= 5)

    assert [each.request.key for each in engine.peek([(0, 0), (0, 1)])] == [(0, 1)]
    (given_back,) = engine.abort([(0, 0)])
    assert given_back.finish_reason is FinishReason.STOP
    assert given_back.tokens.tolist() == tokens[:4]


def test_the_actor_is_woken_when_a_sample_has_finished(play):
    played = play(hold=1)
    played.engine.install(1, WEIGHTS)
    played.engine.submit([request(max_new=2)])
    played.await_tokens(1)
    before = played.woken
    played.held.unlink()
    wait_for(lambda: played.woken > before)
    wait_for(played.engine.step)


def test_a_prefix_is_gone_on_from_and_counts(engine):
    tokens = expected((5, 6, 7), 8)
    prefix = Prefix(tokens=tuple(tokens[:3]), logprobs=(-1.0,) * 3, versions=(0, 0, 0))
    engine.submit([request(prefix=prefix)])
    (completion,) = drain(engine).values()

    assert completion.tokens.tolist() == tokens
    assert completion.versions.tolist() == [0] * 3 + [1] * 5
    assert completion.logprobs.tolist() == [-1.0] * 3 + [-0.5] * 5


@pytest.mark.parametrize("stream", [0, 2])
@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_samples_in_flight_go_on_over_an_update_and_say_which_version_sampled_each_token(play, stream, mode):
    played = play(stream=stream, mode=mode, hold=6)
    engine = played.engine
    engine.install(1, WEIGHTS)
    engine.submit([request(sample=i, prompt=(5, 6, 7 + i), max_new=40) for i in range(4)])
    played.await_tokens(4 * 6)
    engine.install(2, WEIGHTS)
    played.held.unlink()
    done = drain(engine)

    for completion in done.values():
        versions = completion.versions.tolist()
        assert completion.tokens.tolist() == expected(completion.request.prompt, 40)
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}
    updated = played.of("engine_updated")[-1]
    assert updated["mode"] == mode
    assert (updated["aborted"], updated["replayed_tokens"] > 0) == (
        (4, True) if mode == "abort" else (0, False)
    )


def test_a_server_that_cannot_say_versions_is_updated_by_cutting_off(play):
    played = play(version="0.5.17", spans=False, hold=6)
    engine = played.engine
    engine.install(1, WEIGHTS)
    engine.submit([request(max_new=30)])
    played.await_tokens(6)
    engine.install(2, WEIGHTS)
    played.held.unlink()
    (completion,) = drain(engine).values()

    assert played.of("engine_updated")[-1]["mode"] == "abort"
    assert completion.tokens.tolist() == expected((5, 6, 7), 30)
    assert set(completion.versions.tolist()) == {1, 2}


def test_in_place_of_a_server_that_cannot_say_versions_is_refused(play):
    with pytest.raises(EngineDownError, match=r"0\.5\.17 does not say"):
        play(version="0.5.17", mode="in_place")


def test_partial_tokens_are_known_where_requests_are_streamed(play):
    engine = play(stream=2, hold=8).engine
    engine.install(1, WEIGHTS)
    engine.submit([request(max_new=60)])
    wait_for(lambda: engine.lengths()[0, 0] >= 4)
    (partial,) = engine.peek([(0, 0), (9, 9)])

    assert partial.tokens.tolist() == expected((5, 6, 7), len(partial.tokens))
    assert set(partial.versions.tolist()) == {1}
    assert partial.finish_reason is FinishReason.ABORT
    assert engine.in_flight == 1


def test_abort_returns_the_tokens_so_far_and_disturbs_no_other(play):
    played = play(hold=6)
    engine = played.engine
    engine.install(1, WEIGHTS)
    engine.submit([request(sample=i, max_new=40) for i in range(3)])
    played.await_tokens(3 * 6)
    aborted = engine.abort([(0, 0), (0, 2), (7, 7)])

    assert sorted(each.request.key for each in aborted) == [(0, 0), (0, 2)]
    for each in aborted:
        assert each.finish_reason is FinishReason.ABORT
        assert each.tokens.tolist() == expected((5, 6, 7), 6)
    played.held.unlink()
    assert list(drain(engine)) == [(0, 1)]


def test_what_the_server_cuts_off_unasked_goes_on(play):
    engine = play(cut_off=3).engine
    engine.install(1, WEIGHTS)
    engine.submit([request(sample=i) for i in range(4)])
    for completion in drain(engine).values():
        assert completion.tokens.tolist() == expected((5, 6, 7), 8)


def test_a_server_that_cuts_off_again_and_again_is_given_up(play):
    engine = play(cut_off=99).engine
    engine.install(1, WEIGHTS)
    engine.submit([request(max_new=20)])
    with pytest.raises(EngineDownError, match="no memory"):
        drain(engine)
    assert engine.state is EngineState.DOWN


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (request(group=9, prompt=()), "empty"),
        (request(group=9, prompt=[5] * CONTEXT), "leaves no room"),
        (request(group=9, prompt=[VOCABULARY]), "the model has"),
        (request(group=9, max_new=0), "max_new_tokens is 0"),
    ],
)
def test_what_can_never_be_sampled_does_not_reach_the_server(engine, bad, says):
    asked = engine._life.client.get("/asked", deadline_s=5).count("/generate")
    with pytest.raises(RequestError, match=says):
        engine.submit([request(), bad])
    assert engine.in_flight == 0
    assert engine._life.client.get("/asked", deadline_s=5).count("/generate") == asked


def test_what_the_cache_cannot_hold_does_not_reach_the_server(play):
    engine = play(kv_tokens=30).engine
    engine.install(1, WEIGHTS)
    with pytest.raises(RequestError, match="context of 22 tokens"):
        engine.submit([request(prompt=[5] * 22)])


def test_what_the_server_refuses_is_given_up_and_nothing_else(play):
    engine = play(fail={"/generate#3": 400}).engine  # the first one asked whether it lives
    engine.install(1, WEIGHTS)
    engine.submit([request(sample=i) for i in range(3)])
    done = drain(engine)
    (refused,) = engine.refused()

    assert len(done) == 2
    assert refused.key not in done
    assert "told to answer 400" in str(refused)
    assert engine.refused() == []
    assert engine.version == 1


@pytest.mark.parametrize(
    ("how", "error"), [(500, ServerError), ("close", ServerGoneError), ("die", ServerGoneError)]
)
def test_a_broken_server_ends_the_engine(play, how, error):
    played = play(fail={"/generate#3": how})
    engine = played.engine
    engine.install(1, WEIGHTS)
    pid = played.of("engine_started")[0]["server_pid"]
    engine.submit([request(sample=i) for i in range(3)])
    with pytest.raises(error):
        drain(engine)

    assert engine.state is EngineState.DOWN
    assert not psutil.pid_exists(pid)
    for refused in (engine.step, engine.check, lambda: engine.install(2, WEIGHTS)):
        with pytest.raises(EngineDownError):
            refused()


def test_the_death_of_the_server_is_named_at_once_also_where_nothing_is_in_flight(play):
    played = play()
    engine, pid = played.engine, played.of("engine_started")[0]["server_pid"]
    engine.install(1, WEIGHTS)
    before = played.woken
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: played.woken > before)
    with pytest.raises(
        ServerGoneError, match=rf"main process \(pid {pid}\) has ended; its log ends: The server"
    ):
        engine.check()


def test_a_hung_server_is_found_by_a_token_that_does_not_come(play):
    played = play(health_s=0.3, token_s=0.1)
    engine, pid = played.engine, played.of("engine_started")[0]["server_pid"]
    engine.install(1, WEIGHTS)
    engine.submit([request(max_new=50)])
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ServerHungError):
        drain(engine)
    assert not psutil.pid_exists(pid)


def test_a_server_that_answers_but_generates_nothing_is_hung(play):
    """Its own health page would say that it is well."""
    engine = play(health_s=0.3, fail={f"/generate#{call}": "hang" for call in range(2, 9)}).engine
    engine.install(1, WEIGHTS)
    with pytest.raises(ServerHungError):
        wait_for(engine.check)


def test_a_slow_server_is_not_taken_for_hung(play):
    """No sample finishes within the deadline, but its load changes."""
    engine = play(health_s=3.0, token_s=0.4).engine
    engine.install(1, WEIGHTS)
    engine.submit([request(max_new=12)])
    (completion,) = drain(engine).values()
    assert len(completion.tokens) == 12


@pytest.mark.parametrize(
    "bad",
    [
        {"meta.finish_reason": None},
        {"meta.finish_reason": {"type": "strange"}},
        {"meta.output_token_logprobs": []},
        {"meta.weight_versions": [{"version": "1", "start": 0, "end": 3}]},
        {"meta.weight_versions": [{"version": "uninit", "start": 0, "end": 8}]},
        {"meta_info": 7},
    ],
)
def test_an_answer_that_makes_no_sample_is_named_and_ends_the_engine(play, bad):
    engine = play(bad=bad).engine
    engine.install(1, WEIGHTS)
    engine.submit([request()])
    with pytest.raises(PartialRolloutFormatError):
        drain(engine)
    assert engine.state is EngineState.DOWN


@pytest.mark.parametrize(
    "script",
    [
        {"fail": {"/update_weights_from_tensor#2": 500}},
        {"fail": {"/update_weights_from_tensor#2": "close"}},
        {"fail": {"/end_weight_update#2": 400}},
        {"fail": {"/continue_generation#2": "hang"}, "update_s": 3.0},
        {"lie_version": "1"},
    ],
    ids=str,
)
def test_weights_in_doubt_are_never_sampled_from(play, script):
    played = play(**script)
    engine = played.engine
    engine.install(1, WEIGHTS)
    engine.submit([request(max_new=30)])
    with pytest.raises(Exception, match=r"policy version 2|SGLang"):
        engine.install(2, WEIGHTS)

    assert (engine.state, engine.version) == (EngineState.DOWN, None)
    assert not psutil.pid_exists(played.of("engine_started")[0]["server_pid"])


def test_a_source_that_fails_before_anything_was_sent_costs_no_server(engine):
    def half():
        yield from WEIGHTS
        raise ConnectionError("the source is lost")

    with pytest.raises(ConnectionError):
        engine.install(2, half())
    assert (engine.state, engine.version) == (EngineState.UNSYNCED, None)
    engine.install(2, WEIGHTS)
    assert engine.version == 2


def test_a_lower_version_is_refused_and_nothing_changes(engine):
    with pytest.raises(ValueError, match="0 is lower than 1"):
        engine.install(0, WEIGHTS)
    assert engine.version == 1


def test_invalid_weights_are_no_version(engine):
    engine.invalidate()
    assert engine.version is None
    with pytest.raises(EngineNotReadyError):
        engine.step()
    with pytest.raises(EngineNotReadyError):
        engine.weights([])


@pytest.mark.parametrize("script", [{"die_at_start": True}, {"fail": {"/server_info": 500}}], ids=str)
def test_a_server_that_does_not_come_up_leaves_nothing(play, script, tmp_path):
    with pytest.raises((StartError, ServerError)) as caught:
        play(**script)
    if "die_at_start" in script:
        assert "exit code 3; its last word: ValueError: no such model" in str(caught.value)
    assert not [
        each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(each.info["cmdline"])
    ]


def test_a_closed_engine_has_no_server(play):
    played = play()
    played.engine.close()
    played.engine.close()
    assert not psutil.pid_exists(played.of("engine_started")[0]["server_pid"])
    with pytest.raises(EngineDownError, match="closed"):
        played.engine.step()


def test_slots_are_counted(engine):
    engine.submit([request(sample=i) for i in range(8)])
    assert (engine.free_slots, engine.in_flight) == (0, 8)
    with pytest.raises(ValueError, match="1 requests do not fit"):
        engine.submit([request(group=1)])
    drain(engine)
    assert engine.free_slots == 8
    assert 0 <= engine.nap_s <= 30.0


def test_an_engine_that_sleeps_has_no_version_until_it_is_awake_and_has_weights(play):
    engine = play(memory_saver=True, health_s=0.1).engine
    engine.install(1, WEIGHTS)
    engine.sleep()
    assert (engine.state, engine.version) == (EngineState.ASLEEP, None)
    time.sleep(0.2)  # longer than it may be silent
    engine.check()
    engine.sleep()  # again: nothing is asked twice
    engine._health._every_s = 30.0  # a server on a busy machine may be silent for a while

    engine.wake([MemoryTag.WEIGHTS])
    assert engine.state is EngineState.ASLEEP
    engine.wake()
    assert (engine.state, engine.version) == (EngineState.UNSYNCED, None)
    engine.install(2, WEIGHTS)
    engine.submit([request()])
    assert drain(engine)[0, 0].versions.tolist() == [2] * 8


def test_without_a_memory_saver_an_engine_on_a_cpu_rests_and_says_so(engine):
    engine.install(1, WEIGHTS)
    assert not engine.sleep()
    assert (engine.state, engine.version) == (EngineState.ASLEEP, None)
    engine.wake()
    engine.install(1, WEIGHTS)
    engine.submit([request()])
    assert drain(engine)[0, 0].versions.tolist() == [1] * 8


def test_an_engine_with_samples_does_not_sleep(play):
    busy = play(memory_saver=True).engine
    busy.install(1, WEIGHTS)
    busy.submit([request(max_new=50)])
    with pytest.raises(ValueError, match="1 requests in flight"):
        busy.sleep()
    assert busy.version == 1
    drain(busy)
