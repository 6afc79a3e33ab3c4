"""One suite for every engine: the scripted fake is proven here to keep the real ones' promises.

What some engines promise and others do not is in `KINDS`; `only` runs a test with those that promise it.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from sglang_bench import SglangBench
from sglang_site import interpreter
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen3Config,
    Qwen3VLConfig,
)

from relax_actor.engines.base import Prefix, Request, SamplingParams
from relax_actor.engines.errors import EngineNotReadyError, LogitsError, RequestError
from relax_actor.engines.scripted import ScriptedEngine
from relax_actor.engines.sglang.weights import SglangUpdateError
from relax_actor.engines.stop_strings import StopStrings
from relax_actor.engines.transformers_engine import TransformersEngine
from relax_actor.engines.vision_engine import VisionEngine
from relax_actor.protocol import FinishReason

VOCABULARY, CONTEXT, SEED = 103, 512, 11
STOPS = (2, 3)
DEADLINE_S = 60.0
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # far from uniform, so that a wrong mask shows
    "pad_token_id": STOPS[0],  # the same as the end token, as many tokenizers have it
    "eos_token_id": STOPS[0],
}
CONFIGS = {
    "qwen3": Qwen3Config(**TINY, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"]),
    "llama": LlamaConfig(**TINY, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**TINY, tie_word_embeddings=True),
    "vision": Qwen3VLConfig(
        text_config=TINY
        | {
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "out_hidden_size": 64,
            "intermediate_size": 16,
            "num_heads": 1,
            "patch_size": 4,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=0,
        video_token_id=1,
        vision_start_token_id=0,
        vision_end_token_id=1,
        tie_word_embeddings=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What engines of a kind promise beyond what all do."""

    model: str = "qwen3"
    """Which of `CONFIGS` it runs."""
    is_real: bool = True
    """Its log-probs are those of the model."""
    lockstep: bool = True
    """A call of `step` samples exactly one token of every request; others sample by themselves."""
    long: int = 24
    """Tokens of a sample that does not come to its end while a test looks at it."""
    heard: bool = True
    """Tokens are known as they come, not only at a sample's end."""
    repeatable: bool = True
    """A sample depends on the seed, its ids and the weights alone."""
    exact: bool = False
    """It does so to the last bit of its log-probs."""
    reads_back: bool = True
    """It shows the weights that it has."""
    mends: bool = True
    """After an install that failed it goes on, with its requests, once one succeeds; others are over."""
    parts: bool = True
    """An install may bring some weights, or none: the others stay."""


SERVER = {
    "lockstep": False,
    "long": 400,
    "repeatable": False,
    "reads_back": False,
    "mends": False,
    "parts": False,
}
KINDS = {
    "scripted": Kind(is_real=False, exact=True),
    "qwen3": Kind(),
    "llama": Kind(model="llama"),
    "qwen2": Kind(model="qwen2"),
    "alone": Kind(exact=True),
    "vision": Kind(model="vision"),
    "sglang": Kind(**SERVER, heard=False),
    "sglang_chunks": Kind(**SERVER),  # the same server; requests are streamed
}
EVERY = ["scripted", "qwen3", "llama", "alone", "vision", "sglang", "sglang_chunks"]
REAL = ["qwen3", "llama", "qwen2", "alone", "sglang", "sglang_chunks"]


SLOW = (pytest.mark.sglang, pytest.mark.timeout(400))  # the first of them waits for a server


def params_of(kinds, **promises):
    """Return the kinds that promise this, as parameters."""
    keeping = [
        kind for kind in kinds if all(getattr(KINDS[kind], name) == value for name, value in promises.items())
    ]
    return [pytest.param(kind, marks=SLOW if kind.startswith("sglang") else ()) for kind in keeping]


def only(**promises):
    """Run a test with the kinds that promise this, of those it would run with."""

    def decorate(test):
        names = test.__code__.co_varnames[: test.__code__.co_argcount]
        fixture, kinds = ("real", REAL) if "real" in names else ("kind", EVERY)
        return pytest.mark.parametrize(fixture, params_of(kinds, **promises), indirect=True)(test)

    return decorate


class Model:
    """A tiny model: its config.json for engines, its weights to install, itself as the reference."""

    def __init__(self, folder: Path, config, seed: int) -> None:
        self.folder = folder
        config.save_pretrained(folder)
        auto = AutoModelForImageTextToText if isinstance(config, Qwen3VLConfig) else AutoModelForCausalLM
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = auto.from_config(config, dtype=torch.float32).eval()

    def weights(self):
        return list(self.model.named_parameters())  # a tied head is not among them

    @torch.inference_mode()
    def logprobs(self, prompt, tokens, temperature=1.0):
        """Recompute everything, one sequence, without a cache."""
        ids = torch.tensor([[*prompt, *map(int, tokens)]])
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two policies of every architecture: other seeds, one shape."""
    return {
        name: [Model(tmp_path_factory.mktemp(name), config, seed) for seed in (0, 1)]
        for name, config in CONFIGS.items()
    }


@pytest.fixture(scope="module")
def sglang_bench(tmp_path_factory, nothing_is_left_behind):
    bench = SglangBench(interpreter(), tmp_path_factory.mktemp("sglang"))
    yield bench
    bench.close()


@pytest.fixture
def build(models, request):
    """Make an engine of one of `KINDS`; `alone` is deterministic."""
    classes = {"vision": VisionEngine}

    def make(kind="qwen3", *, slots=16, seed=SEED, installed=True, **changes):
        name = KINDS[kind].model
        if kind.startswith("sglang"):
            engine = request.getfixturevalue("sglang_bench").engine(
                models[name][0].folder,
                vocabulary=VOCABULARY,
                context=CONTEXT,
                slots=slots,
                stream=KINDS[kind].heard,
            )
        elif kind == "scripted":
            shapes = {n: tuple(w.shape) for n, w in models[name][0].weights()}
            engine = ScriptedEngine(
                seed=seed,
                slots=slots,
                vocab=range(4, VOCABULARY),
                stop_token_id=STOPS[0],
                context=CONTEXT,
                shapes=shapes,
            )
        else:
            changes = {"dtype": "float32", "deterministic": kind == "alone", **changes}
            made = classes.get(kind, TransformersEngine)
            engine = made(models[name][0].folder, seed=seed, slots=slots, **changes)
        if installed:
            engine.install(0, models[name][0].weights())
        return engine

    return make


@pytest.fixture(params=params_of(EVERY))
def kind(request):
    return request.param


@pytest.fixture
def long(kind):
    """How many tokens a sample has that goes on while others come and go."""
    return KINDS[kind].long


@pytest.fixture
def policies(models, kind):
    """Two policies of the kind's shape."""
    return models[KINDS[kind].model]


@pytest.fixture
def engine(build, kind):
    return build(kind)


def request(group=0, sample=0, prompt=(5, 6, 7, 8), max_new=8, **changes):
    params = SamplingParams(max_new_tokens=max_new, **changes)
    return Request(group_id=group, sample_index=sample, prompt=tuple(prompt), params=params)


def ragged(count=12, **changes):
    """Prompts of many lengths, some with a common beginning, some twice."""
    rng = np.random.default_rng(5)
    prefix = rng.integers(4, VOCABULARY, 20).tolist()
    bodies = [rng.integers(4, VOCABULARY, 1 + 4 * (i % 5)).tolist() for i in range(count)]
    prompts = [prefix + body if i % 3 else body for i, body in enumerate(bodies)]
    return [
        request(group=i, sample=s, prompt=prompt, max_new=3 + i % 6, **changes)
        for i, prompt in enumerate(prompts)
        for s in range(1 + i % 2)
    ]


def drain(engine, done=None):
    """Step until nothing is in flight; return completions by key."""
    done = {} if done is None else done
    for _ in stepping():
        if not engine.in_flight:
            return done
        done.update({c.request.key: c for c in engine.step()})
    return pytest.fail("the engine does not finish")


def run(engine, requests):
    """Sample all requests, as many at once as fit."""
    waiting, done = list(requests), {}
    for _ in stepping():
        free = engine.free_slots
        engine.submit(waiting[:free])
        waiting = waiting[free:]
        done.update({c.request.key: c for c in engine.step()})
        if not waiting and not engine.in_flight:
            return done
    return pytest.fail("the engine does not finish")


def advance(engine, tokens):
    """Step until every request in flight has so many tokens, or more if the engine is not in lockstep."""
    for _ in stepping():
        if all(length >= tokens for length in engine.lengths().values()):
            return
        assert engine.step() == []
    pytest.fail("the engine does not sample")


def stepping():
    """Go on for a while: an engine that samples by itself is looked at every few milliseconds."""
    end = time.monotonic() + DEADLINE_S
    steps = 0
    while time.monotonic() < end:
        yield steps
        steps += 1
        if steps > 64:
            time.sleep(0.002)


def tokens_of(done):
    return {key: c.tokens.tolist() for key, c in done.items()}


# Every engine


def test_a_fresh_engine_has_no_version_and_refuses_requests(build, kind):
    engine = build(kind, installed=False)

    assert engine.version is None
    with pytest.raises(EngineNotReadyError, match="install"):
        engine.submit([request()])
    with pytest.raises(EngineNotReadyError):
        engine.step()


def test_install_sets_the_version(engine, policies):
    assert engine.version == 0
    engine.install(3, policies[0].weights())
    engine.install(3, policies[1].weights())
    assert engine.version == 3


@only(parts=True)
def test_an_install_may_bring_some_weights_or_none(engine, policies):
    engine.install(3, policies[0].weights()[:1])
    engine.install(3, [])
    assert engine.version == 3


def test_a_lower_version_is_refused_and_nothing_changes(engine, policies):
    engine.install(3, policies[0].weights())
    with pytest.raises(ValueError, match="2 is lower than 3"):
        engine.install(2, policies[0].weights())
    assert engine.version == 3
    engine.submit([request(max_new=2)])
    assert set(drain(engine)) == {(0, 0)}


@only(mends=True)
def test_an_unknown_weight_or_a_wrong_shape_is_refused_until_a_whole_install(engine, policies):
    norm = next(name for name, _ in policies[0].weights() if name.endswith("model.norm.weight"))
    with pytest.raises(KeyError, match=r"no\.such"):
        engine.install(1, [("no.such", torch.zeros(1))])
    assert engine.version is None
    with pytest.raises(ValueError, match=rf"{norm}.*\[7\].*\[64\]"):
        engine.install(1, [(norm, torch.zeros(7))])
    with pytest.raises(EngineNotReadyError):
        engine.submit([request()])

    engine.install(1, [(norm, torch.ones(64))])
    engine.submit([request()])


def half_of(weights):
    """Break off in the middle, as a source that is lost does."""
    yield from weights[: len(weights) // 2]
    raise ConnectionError("the source is lost")


def assert_samples_nothing(engine):
    assert engine.version is None
    for refused in (engine.step, lambda: engine.submit([request(group=1)]), lambda: engine.weights([])):
        with pytest.raises(EngineNotReadyError):
            refused()


@only(mends=True)
def test_an_install_that_breaks_off_leaves_torn_weights_from_which_nothing_is_sampled(engine, policies):
    engine.submit([request(max_new=3)])
    with pytest.raises(ConnectionError):
        engine.install(1, half_of(policies[1].weights()))
    assert_samples_nothing(engine)


@only(mends=True)
def test_an_install_may_break_off_again_and_requests_in_flight_wait(engine, policies):
    engine.submit([request(max_new=3)])
    for version in (1, 2):
        with pytest.raises(ConnectionError):
            engine.install(version, half_of(policies[1].weights()))
        assert_samples_nothing(engine)
        assert engine.in_flight == 1


@only(mends=False, heard=False)  # of the two that share a server, one: it does not survive this
def test_an_engine_whose_weights_are_torn_samples_nothing_and_is_over(engine, policies, long):
    """Another one takes its place, and its requests."""
    engine.submit([request(max_new=long)])
    with pytest.raises(SglangUpdateError, match="the source is lost"):
        engine.install(1, half_of(policies[1].weights()))
    assert_samples_nothing(engine)
    with pytest.raises(EngineNotReadyError):
        engine.install(2, policies[1].weights())


@only(mends=True)
def test_samples_in_flight_keep_their_tokens_while_the_weights_are_torn_and_go_on(engine, policies):
    engine.submit([request(max_new=4)])
    engine.step()
    with pytest.raises(ConnectionError):
        engine.install(1, half_of(policies[1].weights()))
    engine.install(2, policies[1].weights())

    assert drain(engine)[0, 0].versions.tolist() == [0, 2, 2, 2]


@only(mends=True)
def test_torn_weights_may_go_back_to_the_version_before(engine, policies):
    with pytest.raises(ConnectionError):
        engine.install(1, half_of(policies[1].weights()))
    engine.install(0, policies[0].weights())
    assert engine.version == 0


def test_an_engine_says_whether_it_can_read_back(build, kind):
    assert build(kind, installed=False).can_read_back == KINDS[kind].reads_back


@only(reads_back=True)
def test_weights_that_are_read_back_are_those_that_were_installed(engine, policies):
    for version, policy in enumerate(policies):
        engine.install(version, policy.weights())
        published = dict(policy.weights())
        found = dict(engine.weights(published))
        assert list(found) == list(published)
        assert all(torch.equal(found[name], published[name]) for name in published)


@only(reads_back=True)
def test_a_weight_nobody_installed_cannot_be_read_back(engine):
    with pytest.raises(KeyError, match=r"no\.such"):
        list(engine.weights(["no.such"]))


def test_nothing_is_sampled_from_invalid_weights(engine):
    engine.invalidate()
    assert_samples_nothing(engine)


@only(mends=True)
def test_invalid_weights_are_torn_and_can_be_replaced(engine, policies):
    engine.submit([request(max_new=2)])
    engine.step()
    engine.invalidate()
    engine.install(1, policies[1].weights())
    assert drain(engine)[0, 0].versions.tolist() == [0, 1]


def test_slots_are_counted_and_used_again(engine):
    engine.submit([request(sample=i, max_new=1 + i) for i in range(16)])
    assert (engine.free_slots, engine.in_flight) == (0, 16)
    with pytest.raises(ValueError, match="1 requests do not fit into 0 free slots"):
        engine.submit([request(group=1)])

    for round_ in range(1, 4):
        drain(engine)
        assert (engine.free_slots, engine.in_flight) == (16, 0)
        engine.submit([request(group=round_, sample=i) for i in range(16)])


@only(lockstep=True)
def test_finished_requests_are_returned_at_once(engine):
    engine.submit([request(sample=i, max_new=i) for i in (1, 2, 3)])
    returned = [[c.request.sample_index for c in engine.step()] for _ in range(3)]
    assert returned == [[1], [2], [3]]
    assert engine.step() == []


def test_a_short_sample_is_returned_while_a_long_one_goes_on(engine, kind, long):
    """An engine that samples by itself may have finished both before it was looked at: then once more."""
    for group in range(1 if KINDS[kind].lockstep else 20):
        engine.submit([request(group, 0, max_new=long), request(group, 1, max_new=2)])
        returned = next(done for _ in stepping() if (done := engine.step()))
        if len(returned) == 1:
            break
    assert [completion.request.key for completion in returned] == [(group, 1)]
    assert engine.in_flight == 1


def test_a_completion_has_one_log_prob_and_version_for_every_token(engine):
    for completion in run(engine, ragged(stop_token_ids=STOPS)).values():
        n = len(completion.tokens)
        assert 1 <= n <= completion.request.params.max_new_tokens
        assert completion.tokens.shape == completion.logprobs.shape == completion.versions.shape == (n,)
        assert (completion.tokens.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
        assert completion.versions.dtype == np.int32
        assert np.isfinite(completion.logprobs).all()
        assert (completion.logprobs <= 0).all()
        assert (completion.versions == 0).all()
        assert ((completion.tokens >= 0) & (completion.tokens < VOCABULARY)).all()


def test_any_stop_token_ends_a_sample_and_is_its_last_token(engine, kind):
    """Every third token stops, so that both reasons are seen; the model's own does in SGLang in any case."""
    samples = 16 if KINDS[kind].repeatable else 128
    stops = (STOPS[0], *range(4, VOCABULARY, 3))
    done = run(engine, [request(sample=i, max_new=4, stop_token_ids=stops) for i in range(samples)])

    reasons = {completion.finish_reason for completion in done.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for completion in done.values():
        stopped = [token in stops for token in completion.tokens.tolist()]
        assert not any(stopped[:-1])
        assert stopped[-1] == (completion.finish_reason is FinishReason.STOP)
        assert stopped[-1] or len(stopped) == 4


@only(lockstep=True)
def test_a_stop_string_ends_a_sample_with_the_token_that_makes_it_whole(build, kind):
    """A server looks for them itself; see tests/sglang."""
    text_of = lambda tokens: "".join(f"<{token}>" for token in tokens)  # noqa: E731
    whole = run(build(kind), [request(sample=i, max_new=12) for i in range(4)])
    tokens = whole[0, 1].tokens.tolist()
    strings = StopStrings([f"{tokens[4]}><{tokens[5]}"], text_of)
    done = run(build(kind), [request(sample=i, max_new=12, stop_strings=strings) for i in range(4)])

    for key, completion in done.items():
        end = strings.end(whole[key].tokens.tolist())
        assert completion.tokens.tolist() == whole[key].tokens.tolist()[:end]
        assert completion.finish_reason is (FinishReason.STOP if end else FinishReason.LENGTH)
    assert done[0, 1].finish_reason is FinishReason.STOP


def test_without_stop_tokens_a_sample_has_its_full_length(engine):
    for completion in run(engine, [request(sample=i, max_new=30) for i in range(4)]).values():
        assert len(completion.tokens) == 30
        assert completion.finish_reason is FinishReason.LENGTH


def test_a_sample_is_clipped_to_the_context(engine):
    prompt = [5] * (CONTEXT - 3)
    done = run(
        engine, [request(prompt=prompt, max_new=1024), request(group=1, prompt=prompt[:-1], max_new=2)]
    )

    assert len(done[0, 0].tokens) == 3
    assert done[0, 0].finish_reason is FinishReason.LENGTH
    assert len(done[1, 0].tokens) == 2


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (request(group=9, prompt=()), "empty"),
        (
            request(group=9, prompt=[5] * CONTEXT),
            f"{CONTEXT} tokens leaves no room in a context of {CONTEXT}",
        ),
        (request(group=9, prompt=[5] * 50_000), "50000"),
        (request(group=9, max_new=0), "max_new_tokens is 0"),
    ],
)
def test_a_request_that_cannot_be_sampled_is_refused_with_its_key(engine, bad, says):
    with pytest.raises(RequestError, match=says) as caught:
        engine.submit([request(), bad])
    assert caught.value.key == (9, 0)
    assert isinstance(caught.value, ValueError)
    assert engine.in_flight == 0  # all or none


def test_a_key_is_in_flight_once(engine):
    engine.submit([request()])
    with pytest.raises(RequestError, match="in flight"):
        engine.submit([request()])
    with pytest.raises(RequestError, match="in flight"):
        engine.submit([request(group=1), request(group=1)])
    drain(engine)
    engine.submit([request()])


def test_abort_returns_what_it_stops_and_the_others_go_on(engine, long):
    engine.submit([request(sample=i, max_new=long) for i in range(5)])
    engine.step()

    aborted = {c.request.key: c for c in engine.abort([(0, 1), (0, 3), (7, 7)])}

    assert sorted(aborted) == [(0, 1), (0, 3)]
    for completion in aborted.values():
        assert completion.finish_reason is FinishReason.ABORT
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) < long
    assert engine.in_flight == 3
    rest = drain(engine)
    assert sorted(rest) == [(0, 0), (0, 2), (0, 4)]
    assert all(len(completion.tokens) == long for completion in rest.values())


@only(heard=True)
def test_abort_returns_the_tokens_so_far(engine, long):
    engine.submit([request(max_new=long)])
    advance(engine, 3)
    (seen,) = engine.peek([(0, 0)])
    (aborted,) = engine.abort([(0, 0)])

    assert 3 <= len(seen.tokens) <= len(aborted.tokens) < long
    assert aborted.tokens[: len(seen.tokens)].tolist() == seen.tokens.tolist()


@only(lockstep=True)
def test_a_sample_has_one_token_for_every_step_when_it_is_aborted(engine):
    engine.submit([request(sample=i, max_new=20) for i in range(5)])
    for _ in range(3):
        engine.step()
    engine.submit([request(group=1, max_new=20)])

    aborted = {c.request.key: c for c in engine.abort([(0, 1), (0, 3), (1, 0)])}

    assert {key: len(c.tokens) for key, c in aborted.items()} == {(0, 1): 3, (0, 3): 3, (1, 0): 0}


@only(repeatable=True)
def test_abort_disturbs_no_other_sample(build, kind):
    requests = [request(sample=i, max_new=12) for i in range(6)]
    undisturbed = tokens_of(run(build(kind), requests))
    engine = build(kind)
    engine.submit(requests)
    engine.step()
    engine.abort([(0, 0), (0, 2)])

    assert tokens_of(drain(engine)) == {key: undisturbed[key] for key in [(0, 1), (0, 3), (0, 4), (0, 5)]}


@only(lockstep=True)
def test_an_install_in_mid_sequence_marks_the_tokens_that_follow(engine, policies):
    engine.submit([request(max_new=6)])
    engine.step()
    engine.step()
    engine.install(4, policies[0].weights())
    engine.submit([request(group=1, max_new=2)])
    done = drain(engine)

    assert done[0, 0].versions.tolist() == [0, 0, 4, 4, 4, 4]
    assert done[1, 0].versions.tolist() == [4, 4]


@only(heard=True)
def test_a_sample_over_an_install_has_tokens_of_both_versions_in_order(engine, policies, long):
    engine.submit([request(max_new=long)])
    advance(engine, 2)
    engine.install(4, policies[1].weights())
    engine.submit([request(group=1, max_new=2)])
    done = drain(engine)

    versions = done[0, 0].versions.tolist()
    assert len(versions) == long
    assert versions == sorted(versions)
    assert versions[:2] == [0, 0]
    assert set(versions) == {0, 4}
    assert done[1, 0].versions.tolist() == [4, 4]


@only(repeatable=True)
def test_samples_do_not_depend_on_replica_order_or_neighbours(build, kind):
    requests = ragged(10, stop_token_ids=STOPS)
    first = tokens_of(run(build(kind), requests))

    assert tokens_of(run(build(kind, slots=3), requests[::-1])) == first
    replica = build(kind)
    for one in requests[4:7]:
        assert tokens_of(run(replica, [one])) == {one.key: first[one.key]}


def test_samples_of_a_prompt_differ(engine):
    done = tokens_of(run(engine, [request(sample=i, max_new=30) for i in range(8)]))
    assert len({tuple(tokens) for tokens in done.values()}) == 8


@only(repeatable=True)
def test_samples_differ_by_seed(build, kind):
    requests = [request(sample=i, max_new=10) for i in range(8)]
    done = tokens_of(run(build(kind), requests))

    assert tokens_of(run(build(kind, seed=SEED + 1), requests)) != done


def test_at_temperature_0_all_samples_of_a_prompt_are_equal(engine):
    done = run(engine, [request(sample=i, temperature=0.0, stop_token_ids=STOPS) for i in range(4)])
    assert len({tuple(c.tokens.tolist()) for c in done.values()}) == 1


def test_forbidden_tokens_are_never_sampled(engine):
    forbidden = (*STOPS, *range(4, 90))
    done = run(engine, [request(sample=i, max_new=10, forbidden_token_ids=forbidden) for i in range(8)])
    assert not {int(t) for c in done.values() for t in c.tokens} & set(forbidden)


def cut_after(build, kind, requests, steps):
    """Sample some tokens; return the requests that were not finished, with what they had."""
    engine = build(kind)
    engine.submit(requests)
    if KINDS[kind].lockstep:
        for _ in range(steps):
            engine.step()
    else:
        advance(engine, steps)
    return [continued(completion) for completion in engine.abort([one.key for one in requests])]


def continued(completion):
    prefix = Prefix(
        tokens=tuple(completion.tokens.tolist()),
        logprobs=tuple(completion.logprobs.tolist()),
        versions=tuple(completion.versions.tolist()),
    )
    return msgspec.structs.replace(completion.request, prefix=prefix)


@only(repeatable=True)
def test_a_sample_goes_on_elsewhere_as_it_would_have_gone_on(build, kind):
    """Cut after any number of steps, among others at any stage, with its tokens, log-probs and reason."""
    requests = ragged(6, stop_token_ids=STOPS)
    whole = run(build(kind), requests)
    for steps in range(1, 8):
        cut = cut_after(build, kind, requests, steps)
        assert all(len(one.prefix.tokens) == steps for one in cut)
        again = run(build(kind), cut)
        assert set(again) == {one.key for one in cut}
        for key, completion in again.items():
            assert completion.tokens.tolist() == whole[key].tokens.tolist()
            assert completion.finish_reason is whole[key].finish_reason
            np.testing.assert_allclose(completion.logprobs, whole[key].logprobs, atol=1e-4, rtol=0)
            if KINDS[kind].exact:
                assert completion.logprobs.tobytes() == whole[key].logprobs.tobytes()


@only(heard=True)
def test_a_prefix_counts_for_max_new_tokens_and_keeps_its_versions(build, kind, policies, long):
    (cut,) = cut_after(build, kind, [request(max_new=long)], 4)
    had = len(cut.prefix.tokens)
    engine = build(kind)
    engine.install(3, policies[1].weights())
    engine.submit([cut])
    assert engine.lengths()[0, 0] >= had
    completion = drain(engine)[0, 0]

    assert completion.versions.tolist() == [0] * had + [3] * (long - had)
    assert completion.tokens[:had].tolist() == list(cut.prefix.tokens)
    assert completion.logprobs[:had].tolist() == list(cut.prefix.logprobs)
    assert completion.finish_reason is FinishReason.LENGTH


@only(repeatable=True)
def test_samples_of_one_prompt_may_go_on_from_different_places_and_from_none(build, kind):
    group = [request(sample=i, max_new=8) for i in range(4)]
    whole = run(build(kind), group)
    cut = [*cut_after(build, kind, group[:1], 2), *cut_after(build, kind, group[1:2], 5), *group[2:]]
    assert tokens_of(run(build(kind), cut)) == tokens_of(whole)


@pytest.mark.parametrize("length", [3, 4])
def test_nothing_follows_a_prefix_that_has_come_to_its_end(engine, length):
    prefix = Prefix(
        tokens=(5,) * (length - 1) + (STOPS[0],), logprobs=(-1.0,) * length, versions=(0,) * length
    )
    ended = msgspec.structs.replace(request(max_new=4, stop_token_ids=STOPS), prefix=prefix)
    with pytest.raises(RequestError, match="come to its end: stop"):
        engine.submit([ended])
    assert engine.in_flight == 0


def test_a_prefix_without_a_log_prob_or_version_for_every_token_is_refused(engine):
    prefix = Prefix(tokens=(5, 6), logprobs=(-1.0,), versions=(0, 0))
    with pytest.raises(RequestError, match="2 tokens, 1 log-probs, 2 versions"):
        engine.submit([msgspec.structs.replace(request(), prefix=prefix)])


@only(lockstep=True)
def test_tokens_so_far_can_be_looked_at_while_a_sample_goes_on(build, kind):
    whole = run(build(kind), [request(max_new=5)])[0, 0]
    engine = build(kind)
    engine.submit([request(max_new=5), request(sample=1, max_new=5)])
    assert engine.lengths() == {(0, 0): 0, (0, 1): 0}
    for step in range(1, 5):
        engine.step()
        assert engine.lengths() == {(0, 0): step, (0, 1): step}
        (seen,) = engine.peek([(0, 0), (7, 7)])
        assert seen.tokens.tolist() == whole.tokens[:step].tolist()
        assert len(seen.logprobs) == len(seen.versions) == step
        assert seen.finish_reason is FinishReason.ABORT
    assert tokens_of(drain(engine))[0, 0] == whole.tokens.tolist()
    assert engine.lengths() == {}


@only(heard=True)
def test_what_was_seen_of_a_sample_is_how_it_begins(engine, long):
    engine.submit([request(max_new=long), request(sample=1, max_new=long)])
    seen = []
    for tokens in (1, 5, 20):
        advance(engine, tokens)
        (found,) = engine.peek([(0, 0), (7, 7)])
        assert found.finish_reason is FinishReason.ABORT
        assert tokens <= len(found.tokens) == len(found.logprobs) == len(found.versions)
        seen.append(found)
    whole = drain(engine)[0, 0]

    for found in seen:
        assert found.tokens.tolist() == whole.tokens[: len(found.tokens)].tolist()
        assert found.logprobs.tolist() == whole.logprobs[: len(found.tokens)].tolist()
    assert engine.lengths() == {}


def test_evaluation_groups_have_negative_ids(engine):
    done = run(engine, [request(group=-3, sample=i) for i in range(2)])
    assert sorted(done) == [(-3, 0), (-3, 1)]


# The engines with a model


def assert_exact(model, done, temperature=1.0):
    for completion in done.values():
        exact = model.logprobs(completion.request.prompt, completion.tokens, temperature)
        np.testing.assert_allclose(completion.logprobs, exact, atol=1e-4, rtol=0)


@pytest.fixture(params=params_of(REAL))
def real(request):
    return request.param


@pytest.fixture
def model(models, real):
    return models[KINDS[real].model][0]


@pytest.fixture
def other(models, real):
    """Another policy of the same shape."""
    return models[KINDS[real].model][1]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_plain_forward(build, real, model, temperature):
    """Ragged prompts, joins in mid-flight, compaction, growth of the cache and shared prefixes at once."""
    requests = ragged(14, temperature=temperature, stop_token_ids=STOPS)
    requests.append(request(group=50, prompt=[9] * 40, max_new=50, temperature=temperature))
    engine, done = build(real, slots=9), {}
    for _ in stepping():
        joining, requests = requests[: min(2, engine.free_slots)], requests[min(2, engine.free_slots) :]
        engine.submit(joining)
        done.update({c.request.key: c for c in engine.step()})
        if not requests and not engine.in_flight:
            break

    assert len(done) == 22
    assert_exact(model, done, temperature)


def test_greedy_takes_the_best_token(build, real, model):
    completion = run(build(real), [request(temperature=0.0)])[0, 0]
    ids = torch.tensor([[*completion.request.prompt, *completion.tokens.tolist()]])
    with torch.inference_mode():
        best = model.model(input_ids=ids).logits[0, 3:-1].argmax(-1)
    assert completion.tokens.tolist() == best.tolist()
    assert_exact(model, {(0, 0): completion})


def test_after_an_install_log_probs_are_those_of_the_new_weights(build, real, other):
    """Also where prompts begin like one whose keys and values the old weights left behind."""
    prefix = list(range(4, 54))
    engine = build(real)
    run(engine, [request(prompt=[*prefix, 60])])
    engine.install(1, other.weights())

    assert_exact(other, run(engine, [request(prompt=[*prefix, 61]), request(group=1, prompt=[*prefix, 62])]))


def test_every_position_has_randomness_of_its_own(build, real, model):
    """With weights of 0 all tokens are equally likely, everywhere."""
    engine = build(real)
    engine.install(1, [(name, torch.zeros_like(value)) for name, value in model.weights()])
    completion = run(engine, [request(max_new=20)])[0, 0]

    assert completion.logprobs == pytest.approx(-np.log(VOCABULARY))
    assert len(set(completion.tokens.tolist())) > 10


def test_installed_weights_are_copies(build, real, model):
    weights = [(name, value.clone()) for name, value in model.weights()]
    engine = build(real, installed=False)
    engine.install(0, weights)
    for _, value in weights:
        value.data.zero_()

    assert_exact(model, run(engine, ragged(4)))


def test_a_tied_weight_may_come_under_either_name(build, models):
    model = models["qwen3"][0]
    renamed = [
        ("lm_head.weight" if name == "model.embed_tokens.weight" else name, value)
        for name, value in model.weights()
    ]
    engine = build(installed=False)
    engine.install(0, renamed)

    assert_exact(model, run(engine, ragged(4)))


@only(lockstep=True)
def test_requests_in_flight_keep_their_keys_and_values_over_an_install(build, real, models, other):
    """The token after the install is that of the new weights over the old cache: neither policy's own."""
    engine = build(real)
    engine.submit([request(max_new=2)])
    engine.step()
    engine.install(1, other.weights())
    completion = drain(engine)[0, 0]

    exact = other.logprobs(completion.request.prompt, completion.tokens)
    assert abs(completion.logprobs[1] - exact[1]) > 1e-3


def test_no_version_is_sampled_from_dummy_weights(build, real, model):
    """Weights come by install only, so the folder holds none."""
    assert not list(model.folder.glob("*.safetensors"))
    assert build(real, installed=False).version is None


def test_a_shared_prefix_changes_no_log_prob(build):
    """The same samples, once with their common beginning computed once and once each for itself."""
    prefix = list(range(4, 54))
    requests = [request(group=g, sample=s, prompt=[*prefix, 60 + g]) for g in range(8) for s in range(2)]
    together = run(build(), requests)
    apart = {}
    for one in requests:
        apart.update(run(build(), [one]))

    assert tokens_of(together) == tokens_of(apart)
    for key, completion in together.items():
        np.testing.assert_allclose(completion.logprobs, apart[key].logprobs, atol=1e-5, rtol=0)


def shapes_fed(engine, monkeypatch):
    """Record rows and columns of what each forward is given."""
    fed, forward = [], engine._decoder.forward

    def recorded(cache, window, tokens, last):
        fed.append(tuple(tokens.shape))
        return forward(cache, window, tokens, last)

    monkeypatch.setattr(engine._decoder, "forward", recorded)
    return fed


def test_a_shared_prefix_is_computed_once(build, monkeypatch):
    """128 requests for 16 questions after 50 common tokens: one forward of 50, one of 16 questions."""
    engine = build(slots=128)
    fed = shapes_fed(engine, monkeypatch)
    prefix = list(range(4, 54))
    requests = [
        request(group=g, sample=s, prompt=[*prefix, 60 + g, 70, 71], max_new=1)
        for g in range(16)
        for s in range(8)
    ]
    engine.submit(requests)
    engine.step()
    assert fed == [(1, 50), (16, 3)]

    fed.clear()
    engine.submit([request(group=16, prompt=[*prefix, 99, 70, 71], max_new=1)])  # the prefix is remembered
    engine.step()
    assert fed == [(1, 3)]


def test_finished_rows_cost_nothing(build, monkeypatch):
    engine = build()
    fed = shapes_fed(engine, monkeypatch)
    run(engine, [request(sample=i, max_new=n) for i, n in enumerate([1, 5, 2, 2, 3])])
    assert [rows for rows, _ in fed] == [1, 4, 2, 1, 1]


def test_alone_samples_are_bit_identical_beside_any_others(build):
    requests = ragged(10)
    whole = run(build("alone"), requests)
    engine, again = build("alone", slots=5), {}
    engine.submit([request(group=99, prompt=[7] * 60, max_new=30)])  # a long neighbour throughout
    for one in requests[::-2]:
        engine.submit([one])
        again.update({c.request.key: c for c in engine.step()})
        while engine.free_slots < 2:
            again.update({c.request.key: c for c in engine.step()})
    drain(engine, again)
    del again[99, 0]

    assert len(again) == 8
    for key, completion in again.items():
        assert completion.tokens.tobytes() == whole[key].tokens.tobytes()
        assert completion.logprobs.tobytes() == whole[key].logprobs.tobytes()


def test_alone_part_of_a_group_is_sampled_again_bit_for_bit(build):
    group = [request(sample=i, max_new=12) for i in range(6)]
    whole = run(build("alone"), group)
    engine = build("alone")
    engine.submit(group)
    engine.step()
    engine.abort([one.key for one in group])

    for key, completion in run(engine, [group[1], group[4]]).items():
        assert completion.logprobs.tobytes() == whole[key].logprobs.tobytes()


@pytest.mark.parametrize("real", params_of([each for each in REAL if each != "sglang_chunks"]), indirect=True)
def test_weights_that_are_not_numbers_stop_the_engine(build, real, model):
    engine = build(real)
    engine.install(1, [(name, torch.full_like(value, torch.nan)) for name, value in model.weights()])
    with pytest.raises(LogitsError):
        run(engine, [request()])


@pytest.mark.parametrize("changes", [{"prompt": (5, VOCABULARY)}, {"forbidden_token_ids": (-1,)}])
def test_token_ids_the_model_does_not_have_are_refused(build, changes):
    with pytest.raises(RequestError, match=f"the model has {VOCABULARY}"):
        build().submit([request(**changes)])


def test_the_context_may_be_shorter_than_the_models(build):
    done = run(build(context=10), [request(max_new=100)])
    assert len(done[0, 0].tokens) == 6


def test_weights_are_read_back_in_the_engines_element_type(build, models):
    weights = models["qwen3"][0].weights()
    for name, value in build(dtype="bfloat16").weights([name for name, _ in weights]):
        assert torch.equal(value, dict(weights)[name].to(torch.bfloat16))


def test_bfloat16_stays_close_to_float32(build, models):
    done = run(build(dtype="bfloat16"), ragged(6))
    differences = [
        completion.logprobs - models["qwen3"][0].logprobs(completion.request.prompt, completion.tokens)
        for completion in done.values()
    ]
    assert np.abs(np.concatenate(differences)).mean() < 0.3


def test_a_checkpoint_is_read_when_asked_for(models, tmp_path):
    model = models["llama"][0]
    model.model.save_pretrained(tmp_path)
    engine = TransformersEngine(tmp_path, seed=0, slots=4, dtype="float32", dummy_weights=False)
    engine.install(0, [])
    assert_exact(model, run(engine, ragged(3)))


def test_building_an_engine_leaves_torchs_generator_alone(build):
    before = torch.get_rng_state()
    build(installed=False)
    assert torch.equal(before, torch.get_rng_state())


def test_a_window_shorter_than_the_context_is_refused(tmp_path):
    MistralConfig(**TINY, sliding_window=32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"window of 32 tokens is shorter than the context of {CONTEXT}"):
        TransformersEngine(tmp_path, seed=0, slots=2, dtype="float32")

    engine = TransformersEngine(tmp_path, seed=0, slots=2, dtype="float32", context=32)
    engine.install(0, MistralForCausalLM(MistralConfig.from_pretrained(tmp_path)).state_dict().items())
    assert len(run(engine, [request()])[0, 0].tokens) == 8


def test_the_first_install_brings_every_weight(model):
    """Until then the weights are whatever was in memory."""
    engine = TransformersEngine(model.folder, seed=0, slots=2, dtype="float32")
    weights = list(model.weights())
    with pytest.raises(KeyError, match="1 weights have never been installed"):
        engine.install(0, [each for each in weights if "layers.1.mlp.up_proj" not in each[0]])
    with pytest.raises(EngineNotReadyError):
        engine.submit([request()])
    engine.install(0, weights)
    assert engine.version == 0


def test_layers_that_keep_a_recurrent_state_are_refused(tmp_path):
    layers = ["full_attention", "chunked_attention"]
    Qwen3Config(**TINY, layer_types=layers).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="chunked_attention"):
        TransformersEngine(tmp_path, seed=0, slots=2, dtype="float32")


# Sleep


def test_an_engine_that_slept_samples_as_before_once_it_has_weights_again(engine, kind, policies):
    before = run(engine, ragged())
    engine.sleep()
    assert engine.version is None
    engine.check()
    engine.wake()
    assert engine.version is None, "what is in its memory means nothing"
    with pytest.raises(EngineNotReadyError):
        engine.submit([request()])
    engine.install(0, policies[0].weights())  # the same version again: its trainer has died
    assert engine.version == 0
    after = run(engine, ragged())
    if KINDS[kind].repeatable:
        assert tokens_of(after) == tokens_of(before)
    else:
        assert after.keys() == before.keys()


def test_an_engine_with_samples_in_flight_does_not_sleep(engine, long):
    engine.submit([request(max_new=long)])
    with pytest.raises(ValueError, match="in flight cannot sleep"):
        engine.sleep()
    assert engine.version == 0
    drain(engine)


@only(lockstep=True)
def test_asleep_an_engine_of_this_process_holds_no_weights(build, kind):
    engine = build(kind)
    if KINDS[kind].is_real:
        assert engine.sleep()
        network = engine._decoder
        assert sum(each.numel() for each in network._loader._model.parameters()) == 0
    else:
        assert not engine.sleep(), "it has none that matter"
