"""A real SGLang started quickly: the same samples as ever, and nothing left of it whichever process dies."""

import os
import signal
import time

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from relax_actor.engines.base import Request, SamplingParams
from relax_actor.engines.sglang.engine import SglangEngine
from relax_actor.engines.sglang.errors import ServerGoneError

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

CONTEXT, DEADLINE_S = 512, 60.0
MAIN, TWIN, SCHEDULER, DETOKENIZER = "python", "sglang::twin", "sglang::scheduler", "sglang::detokenizer"


@pytest.fixture(scope="module")
def quick(make_bench):
    return make_bench()


def engine_of(bench, model) -> SglangEngine:
    engine = bench.engine(model.path, vocabulary=model.vocab_size, context=CONTEXT)
    weights = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).state_dict()
    engine.install(1, weights.items())
    return engine


def greedy(engine: SglangEngine) -> dict[int, tuple[list[int], np.ndarray]]:
    """Sample the most probable tokens after some prompts; return them with their log-probs."""
    params = SamplingParams(max_new_tokens=12, top_k=1)
    engine.submit(
        [
            Request(group_id=group, sample_index=0, prompt=tuple(range(20 + group, 60)), params=params)
            for group in range(4)
        ]
    )
    done, until = [], time.monotonic() + DEADLINE_S
    while engine.in_flight and time.monotonic() < until:
        done += engine.step()
        time.sleep(0.005)
    return {each.request.group_id: (each.tokens.tolist(), each.logprobs) for each in done}


def processes(engine: SglangEngine) -> dict[str, psutil.Process]:
    main = psutil.Process(engine._life._server.pid)
    return {MAIN: main} | {each.cmdline()[0]: each for each in main.children(recursive=True)}


def step_until_it_fails(engine: SglangEngine) -> None:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        engine.step()
        time.sleep(0.005)


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_quick_start_serves_the_samples_of_a_plain_one(quick, make_bench, tiny_model):
    plain = greedy(engine_of(make_bench(quick_start=False), tiny_model))
    fast = greedy(engine_of(quick, tiny_model))
    assert len(fast) == 4
    for group, (tokens, logprobs) in fast.items():
        assert tokens == plain[group][0]
        assert np.abs(logprobs - plain[group][1]).max() < 1e-5


def test_scheduler_and_detokenizer_are_forked_from_one_import(quick, tiny_model):
    found = processes(engine_of(quick, tiny_model))
    twin = found[TWIN]
    assert {found[SCHEDULER].ppid(), found[DETOKENIZER].ppid()} == {twin.pid}
    assert {os.getpgid(each.pid) for each in found.values()} == {found[MAIN].pid}
    own = sum(each.cpu_times().user for name, each in found.items() if name != MAIN)
    assert own < found[MAIN].cpu_times().user  # who imports once more has used as much


@pytest.mark.fault
@pytest.mark.parametrize("victim", [MAIN, TWIN, SCHEDULER, DETOKENIZER])
def test_the_death_of_any_process_is_noticed_and_leaves_nothing(quick, tiny_model, victim):
    engine = engine_of(quick, tiny_model)
    found = processes(engine)
    os.kill(found[victim].pid, signal.SIGKILL)

    with pytest.raises(ServerGoneError, match="main process" if victim == MAIN else victim[8:]):
        step_until_it_fails(engine)
    engine.close()

    until = time.monotonic() + DEADLINE_S
    while not all(map(gone, found.values())):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.fault
def test_when_the_main_process_dies_the_kernel_ends_all_others(quick, tiny_model):
    engine = engine_of(quick, tiny_model)
    found = processes(engine)
    os.kill(found[MAIN].pid, signal.SIGKILL)  # and nobody calls `close`
    until = time.monotonic() + DEADLINE_S
    while not all(map(gone, found.values())):
        assert time.monotonic() < until
        time.sleep(0.01)
    engine.close()
