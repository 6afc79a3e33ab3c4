"""What only the scripted engine does: time, scripts, faults and its known distribution."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from relax_actor.config import Config, DataConfig, ModelConfig
from relax_actor.engines.base import Request, SamplingParams
from relax_actor.engines.errors import RequestError
from relax_actor.engines.scripted import EngineFaults, InjectedFaultError, ScriptedEngine
from relax_actor.protocol import FinishReason
from relax_actor.roles.engine_choice import scripted_vocabulary
from transport.clock import ManualClock

STOP = 2


def engine(**changes):
    made = ScriptedEngine(**{"seed": 1, "slots": 8, "vocab": range(10, 20), "stop_token_id": STOP, **changes})
    made.install(0, [])
    return made


def request(group=0, sample=0, max_new=6, **changes):
    params = SamplingParams(max_new_tokens=max_new, **{"stop_token_ids": (STOP,), **changes})
    return Request(group_id=group, sample_index=sample, prompt=(5, 6, 7), params=params)


def run(made, *requests):
    made.submit(requests)
    done = {}
    while made.in_flight:
        done.update({c.request.key: c for c in made.step()})
    return done


def test_its_vocabulary_is_that_of_the_text_model_without_stops_and_placeholders(tmp_path):
    config = Config(model=ModelConfig(path=str(tmp_path)), data=DataConfig(path=""))
    text = {"vocab_size": 9, "pad_token_id": 0}
    models = (text, {"vision_config": {}, "image_token_id": 5, "video_token_id": None, "text_config": text})
    found = []
    for model in models:
        (tmp_path / "config.json").write_text(json.dumps(model))
        found.append(scripted_vocabulary(config, (1, 2)))

    assert found == [[0, 3, 4, 5, 6, 7, 8], [3, 4, 6, 7, 8]]


def test_torch_is_not_imported():
    code = "import sys, relax_actor.engines.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_decode_step_takes_token_s_and_step_never_waits():
    clock = ManualClock()
    made = engine(token_s=0.5, clock=clock)
    made.submit([request(max_new=2, stop_token_ids=())])

    assert made.step() == []
    assert made.steps == 0
    clock.advance(0.5)
    assert made.step() == []
    assert made.step() == []
    assert made.steps == 1
    clock.advance(0.5)
    (completion,) = made.step()
    assert len(completion.tokens) == 2


def test_lengths_are_spread_evenly_from_one_token_to_all():
    made = engine(slots=600)
    done = run(made, *[request(group=i, max_new=5) for i in range(600)])

    lengths = np.bincount([len(c.tokens) for c in done.values()], minlength=6)
    assert lengths[0] == 0
    assert all(n > 60 for n in lengths[1:5])  # 100 expected of each, and 200 of length 5
    assert {c.finish_reason for c in done.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert all((c.finish_reason == "stop") == (c.tokens[-1] == STOP) for c in done.values())


def test_log_probs_are_those_of_its_distribution():
    """The stop token has the hazard 1 / (tokens left + 1), the ten others share the rest."""
    for completion in run(engine(), *[request(sample=i, max_new=4) for i in range(8)]).values():
        for i, (token, logprob) in enumerate(zip(completion.tokens, completion.logprobs, strict=True)):
            hazard = 1 / (4 - i + 1)
            p = hazard if token == STOP else (1 - hazard) / 10
            assert logprob == pytest.approx(math.log(p), abs=1e-6)


def test_another_prompt_has_another_answer():
    params = SamplingParams(max_new_tokens=12)
    made = engine()
    answers = set()
    for prompt in ((1,), (2,), (1, 2)):
        done = run(made, Request(group_id=0, sample_index=0, prompt=prompt, params=params))
        answers.add(tuple(done[0, 0].tokens))
    assert len(answers) == 3


def test_a_script_answers_and_its_end_is_a_stop_token():
    made = engine(script=lambda r: [41, 42] if r.group_id == 0 else None)
    done = run(made, request(), request(group=1))

    assert done[0, 0].tokens.tolist() == [41, 42, STOP]
    assert done[0, 0].logprobs.tolist() == [0, 0, 0]
    assert 41 not in done[1, 0].tokens


def test_a_request_that_never_finishes_keeps_its_slot_until_it_is_aborted():
    made = engine(faults=EngineFaults(never_finish=frozenset({(0, 1)})))
    made.submit([request(), request(sample=1)])
    for _ in range(20):
        made.step()

    assert made.in_flight == 1
    (stuck,) = made.abort([(0, 1)])
    assert stuck.finish_reason is FinishReason.ABORT
    assert len(stuck.tokens) == 0


def test_a_step_that_shall_raise_raises():
    made = engine(faults=EngineFaults(raise_at_step=2))
    made.submit([request(stop_token_ids=())])
    made.step()
    with pytest.raises(InjectedFaultError, match="step 2"):
        made.step()


def test_nothing_left_to_emit_is_refused():
    with pytest.raises(RequestError, match="forbidden"):
        engine().submit([request(forbidden_token_ids=tuple(range(10, 20)))])


def test_the_digest_tells_weights_apart():
    made = engine()
    digests = []
    for name, value in [("a", 1.0), ("a", 2.0), ("b", 1.0), ("a", 1.0)]:
        made.install(0, [(name, torch.tensor([value, 3.0], dtype=torch.bfloat16))])
        digests.append(made.weights_digest)
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3
