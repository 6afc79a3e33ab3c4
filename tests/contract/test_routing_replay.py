"""Routed experts, from the engine that records them to the backend that replays them."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from relax_actor.config import ModelConfig, TrainConfig
from relax_actor.engines.base import Completion, Prefix, Request, SamplingParams
from relax_actor.engines.transformers_engine import TransformersEngine
from relax_actor.errors import RoutedExpertsError, RoutingMismatchError, UnsupportedRoutingError
from relax_actor.rl.routing import DENSE, layout_of, pack, unpack
from relax_actor.trainers import torch_backend
from relax_actor.trainers.base import TrainSequence
from relax_actor.trainers.torch_backend import TorchBackend

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large enough for routes, and log-probs with them, to depend on the context
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
KINDS = {
    "Qwen3Moe": {
        "head_dim": 16,
        "num_experts": 8,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "Mixtral": {"num_local_experts": 4, "tie_word_embeddings": False},
}
R3 = TrainConfig(learning_rate=1e-2, use_r3=True, r3_replay_mode="sync")
PARAMS = SamplingParams(max_new_tokens=9, temperature=0.8)


def save_model(folder: Path, kind: str, **options) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS.get(kind, {}), **options})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    kinds = (*KINDS, "Qwen3")
    return {kind: save_model(tmp_path_factory.mktemp(kind), kind) for kind in kinds}


@pytest.fixture(params=KINDS)
def folder(request, folders) -> Path:
    return folders[request.param]


@pytest.fixture
def moe(folders) -> Path:
    return folders["Qwen3Moe"]


def backend_of(folder: Path, train: TrainConfig = R3, dtype: str = "float32") -> TorchBackend:
    return TorchBackend(ModelConfig(path=str(folder), dtype=dtype), train, temperature=0.8, total_steps=9)


def engine_of(backend: TorchBackend, folder: Path, **options) -> TransformersEngine:
    options = {"dtype": "float32", "slots": 8, "record_routes": True, **options}
    engine = TransformersEngine(folder, seed=1, **options)
    engine.install(0, backend.weights())
    return engine


def requests(groups: int = 2, samples: int = 3, prefix: Prefix | None = None) -> list[Request]:
    prompts = [(5, 6, 7, 8, 10 + group, 11) for group in range(groups)]
    extra = {} if prefix is None else {"prefix": prefix}
    return [
        Request(group_id=group, sample_index=index, prompt=prompt, params=PARAMS, **extra)
        for group, prompt in enumerate(prompts)
        for index in range(samples)
    ]


def finish(engine: TransformersEngine) -> list[Completion]:
    done: list[Completion] = []
    while engine.in_flight:
        done += engine.step()
    return sorted(done, key=lambda completion: completion.request.key)


def sampled(engine: TransformersEngine, wanted: list[Request] | None = None) -> list[Completion]:
    engine.submit(wanted or requests())
    return finish(engine)


def layout(folder: Path):
    return layout_of(transformers.AutoConfig.from_pretrained(folder).to_dict())


def sequence(folder: Path, done: Completion, **changes) -> TrainSequence:
    fields = {
        "prompt": np.array(done.request.prompt, np.int32),
        "response": done.tokens,
        "rollout_logprobs": done.logprobs,
        "advantage": 1.0,
        "key": done.request.key,
        "versions": done.versions,
        "routed_experts": pack(done.routed_experts, layout(folder), done.request.key),
    }
    return TrainSequence(**{**fields, **changes})


def apart(backend: TorchBackend, batch: list[TrainSequence]) -> float:
    found = backend.logprobs(batch)
    return max(
        float(np.abs(own - each.rollout_logprobs).max()) for own, each in zip(found, batch, strict=True)
    )


def elsewhere(folder: Path, routes):
    """Return routes through the next expert each."""
    known = layout(folder)
    return ((routes.astype(np.int64) + 1) % known.experts).astype(known.dtype)


@pytest.mark.parametrize("deterministic", [False, True], ids=["together", "alone"])
def test_an_engine_records_the_experts_of_every_token_but_the_last(folder, deterministic):
    """And it is the model's own choice, whatever was prefilled, shared, copied or decoded on the way."""
    backend = backend_of(folder)
    done = sampled(engine_of(backend, folder, deterministic=deterministic))
    known, model = layout(folder), transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for each in done:
        text = [*each.request.prompt, *each.tokens.tolist()][:-1]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([text]), output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(known.top_k).indices for layer in logits], dim=1).numpy()
        assert each.routed_experts.dtype == np.int32
        assert each.routed_experts.shape == (len(text), known.layers, known.top_k)
        assert (np.sort(each.routed_experts[:, list(known.moe_layers)]) == np.sort(chosen)).all()
        dense = [layer for layer in range(known.layers) if layer not in known.moe_layers]
        assert (each.routed_experts[:, dense] == DENSE).all()


def test_nothing_is_recorded_unless_it_is_wanted(moe):
    done = sampled(engine_of(backend_of(moe), moe, record_routes=False))
    assert all(each.routed_experts is None for each in done)


@pytest.mark.parametrize("deterministic", [False, True], ids=["together", "alone"])
def test_recording_changes_no_sample(moe, deterministic):
    backend = backend_of(moe)
    kept, plain = (
        sampled(engine_of(backend, moe, deterministic=deterministic, record_routes=wanted))
        for wanted in (True, False)
    )
    assert all((a.logprobs == b.logprobs).all() for a, b in zip(kept, plain, strict=True))


def test_replayed_logprobs_are_the_rollouts(folder):
    """Through the trees of the trainer, where samples of a prompt share their rows."""
    backend = backend_of(folder)
    batch = [sequence(folder, done) for done in sampled(engine_of(backend, folder))]
    assert apart(backend, batch) < 1e-5


def test_the_recorded_experts_are_the_ones_that_compute(folder):
    """Other experts give other log-probs: those of a model that is made to take them."""
    backend = backend_of(folder)
    batch = [sequence(folder, done) for done in sampled(engine_of(backend, folder))]
    for each in batch:
        each.routed_experts = elsewhere(folder, each.routed_experts)
    assert apart(backend, batch) > 0.05
    for each in batch:
        expected = forced_logprobs(folder, each)
        (own,) = backend.logprobs([each])
        assert np.abs(own - expected).max() < 1e-5


def forced_logprobs(folder: Path, each: TrainSequence):
    """Return the log-probs of a model whose router logits are -inf but for the recorded experts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    routes = torch.from_numpy(each.routed_experts.astype(np.int64))
    for place, gate in enumerate(gates):
        gate.forward = forced(gate, routes[:, place])
    text = torch.tensor([[*each.prompt.tolist(), *each.response.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=text[:, :-1]).logits[0, len(each.prompt) - 1 :] / 0.8
    return torch.log_softmax(logits, -1).gather(1, text[0, len(each.prompt) :, None])[:, 0].numpy()


def forced(gate, experts):
    def forward(hidden):
        logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        allowed = torch.full_like(logits, -torch.inf).scatter(1, experts, 0.0)
        weights = torch.softmax(logits + allowed, -1).gather(1, experts)
        return logits, weights, experts

    return forward


def test_samples_of_a_prompt_may_have_been_routed_differently(moe):
    """Rows of the tree are shared only as far as the routes are the same."""
    backend = backend_of(moe)
    done = sampled(engine_of(backend, moe), requests(groups=1, samples=2))
    one, other = (sequence(moe, each) for each in done)
    other.routed_experts = elsewhere(moe, other.routed_experts)
    (work,) = backend._policy.pack([one, other])
    assert work.tree.rows == len(one.routed_experts) + len(other.routed_experts)
    together = backend.logprobs([one, other])
    alone = [*backend.logprobs([one]), *backend.logprobs([other])]
    assert all(np.abs(a - b).max() < 1e-5 for a, b in zip(together, alone, strict=True))


def test_gradients_flow_through_the_gate_and_the_recorded_experts_only(moe):
    backend = backend_of(moe)
    batch = [sequence(moe, done) for done in sampled(engine_of(backend, moe))]
    for each in batch:
        each.routed_experts = np.tile(np.array([1, 3], np.uint8), (*each.routed_experts.shape[:2], 1))
    before = {name: value.clone() for name, value in backend.weights()}
    train(backend, batch)
    moved = {name for name, value in backend.weights() if not torch.equal(value, before[name])}
    for layer in (0, 2):
        assert f"model.layers.{layer}.mlp.gate.weight" in moved
        experts = {
            name.split(".")[5] for name in moved if name.startswith(f"model.layers.{layer}.mlp.experts")
        }
        assert experts == {"1", "3"}


def train(backend: TorchBackend, batch: list[TrainSequence]):
    backend.begin_update(total_tokens=sum(len(each.response) for each in batch), total_sequences=len(batch))
    stats = backend.accumulate(batch)
    backend.finish_update()
    return stats


def test_the_reference_of_a_kl_term_routes_by_itself(moe):
    """So the KL to a frozen copy of the same weights is not 0 where the replayed routes are others."""
    options = {"use_r3": True, "kl_coef": 0.1}
    backend = backend_of(moe, TrainConfig(**options))
    done = sampled(engine_of(backend, moe))
    same = [sequence(moe, each) for each in done]
    assert train(backend_of(moe, TrainConfig(**options)), same).kl_sum == pytest.approx(0.0, abs=1e-6)
    for each in same:
        each.routed_experts = elsewhere(moe, each.routed_experts)
    assert train(backend, same).kl_sum > 1e-3


@pytest.mark.parametrize("deterministic", [False, True], ids=["together", "alone"])
@pytest.mark.parametrize("cut", [1, 4])
def test_a_sample_that_goes_on_elsewhere_keeps_the_routes_of_its_old_tokens(moe, cut, deterministic):
    """Also where the other replica, with newer weights, would have chosen others for them."""
    backend = backend_of(moe)
    (whole,) = sampled(engine_of(backend, moe, deterministic=deterministic), requests(1, 1))
    engine = engine_of(backend, moe, deterministic=deterministic)
    engine.submit(requests(1, 1))
    for _ in range(cut):
        engine.step()
    (part,) = engine.peek([(0, 0)])
    assert len(part.routed_experts) == len(part.request.prompt) + cut - 1
    marked = elsewhere(moe, pack(part.routed_experts, layout(moe), (0, 0)))
    prefix = Prefix(
        tokens=tuple(part.tokens.tolist()),
        logprobs=tuple(part.logprobs.tolist()),
        versions=tuple(part.versions.tolist()),
        routed_experts=unpack(marked, layout(moe)),
    )
    (on,) = sampled(engine_of(backend, moe, deterministic=deterministic), requests(1, 1, prefix))
    old = len(marked)
    assert (on.tokens == whole.tokens).all()
    assert (pack(on.routed_experts, layout(moe), (0, 0))[:old] == marked).all()
    assert (on.routed_experts[old:] == whole.routed_experts[old:]).all()


def test_a_sample_that_is_aborted_before_it_begins_has_the_routes_of_its_prefix(moe):
    backend = backend_of(moe)
    (whole,) = sampled(engine_of(backend, moe), requests(1, 1))
    kept = whole.routed_experts[: len(whole.request.prompt) + 1]
    prefix = Prefix(
        tokens=tuple(whole.tokens[:2].tolist()),
        logprobs=tuple(whole.logprobs[:2].tolist()),
        versions=(0, 0),
        routed_experts=kept,
    )
    engine = engine_of(backend, moe)
    engine.submit(requests(1, 1, prefix))
    (aborted,) = engine.abort([(0, 0)])
    assert (aborted.routed_experts == kept).all()


@pytest.mark.parametrize("rows", [6, 8])
def test_a_prefix_with_routes_of_another_length_is_refused(moe, rows):
    prefix = Prefix(
        tokens=(3, 4), logprobs=(-1.0, -1.0), versions=(0, 0), routed_experts=np.zeros((rows, 3, 2))
    )
    engine = engine_of(backend_of(moe), moe)
    with pytest.raises(RoutedExpertsError, match="6 prompt and 2 response tokens have 7"):
        engine.submit(requests(1, 1, prefix))
    assert engine.in_flight == 0


def test_experts_beyond_a_byte_are_recorded_and_replayed(tmp_path):
    folder = save_model(tmp_path, "Qwen3Moe", num_experts=300, moe_intermediate_size=4)
    backend = backend_of(folder)
    batch = [sequence(folder, done) for done in sampled(engine_of(backend, folder))]
    assert batch[0].routed_experts.dtype == np.uint16
    assert max(int(each.routed_experts.max()) for each in batch) > 255
    assert apart(backend, batch) < 1e-5


def test_a_model_that_reads_images_cannot_be_replayed():
    with pytest.raises(UnsupportedRoutingError, match="reads images"):
        torch_backend._start_replay(object(), Path("folder"), R3)


def test_routes_stay_with_their_sample_while_others_leave_and_join(moe):
    """Rows move when a gap is closed, and grow when a sample gets long."""
    backend = backend_of(moe)
    engine = engine_of(backend, moe, slots=4)
    lengths = {(0, 0): 2, (0, 1): 70, (0, 2): 3, (1, 0): 80, (1, 1): 5, (1, 2): 75}
    waiting = [
        Request(
            group_id=key[0],
            sample_index=key[1],
            prompt=(5, 6, 7, 8, 10 + key[0]),
            params=SamplingParams(max_new_tokens=length, temperature=0.8),
        )
        for key, length in lengths.items()
    ]
    done: list[Completion] = []
    while waiting or engine.in_flight:
        free = engine.free_slots
        engine.submit(waiting[:free])
        waiting = waiting[free:]
        done += engine.step()
    assert {each.request.key: len(each.tokens) for each in done} == lengths
    assert apart(backend, [sequence(moe, each) for each in done]) < 1e-5


def test_check_passes_where_both_route_alike_and_counts_what_it_compared(moe):
    checking = TrainConfig(use_r3=True, r3_replay_mode="check", r3_tolerance_frac=0.0)
    backend = backend_of(moe, checking)
    batch = [sequence(moe, done) for done in sampled(engine_of(backend, moe))]
    stats = train(backend, batch)
    assert (stats.routed_apart, stats.routed_places > 0) == (0, True)


def test_check_names_group_sample_token_layer_and_both_sets(moe):
    checking = TrainConfig(use_r3=True, r3_replay_mode="check", r3_tolerance_frac=0.0)
    backend = backend_of(moe, checking)
    batch = [sequence(moe, done) for done in sampled(engine_of(backend, moe))]
    own = batch[4].routed_experts[7, 1].copy()
    changed = (own + 1) % 8 if set((own + 1) % 8) != set(own) else (own + 2) % 8
    batch[4].routed_experts[7, 1] = changed
    with pytest.raises(RoutingMismatchError) as caught:
        backend.logprobs(batch)
    error = caught.value
    assert (error.sample, error.token, error.layer) == (batch[4].key, 7, 2)
    assert (error.recorded, error.own) == (tuple(sorted(changed)), tuple(sorted(own)))


def test_check_tolerates_what_it_was_told_to(moe):
    checking = TrainConfig(use_r3=True, r3_replay_mode="check", r3_tolerance_frac=1.0)
    backend = backend_of(moe, checking)
    batch = [sequence(moe, done) for done in sampled(engine_of(backend, moe))]
    for each in batch:
        each.routed_experts = elsewhere(moe, each.routed_experts)
    stats = train(backend, batch)
    assert 0 < stats.routed_apart <= stats.routed_places


def test_bfloat16_is_closer_to_the_rollout_with_replay(moe):
    """What replay is for: rounding sends tokens to other experts, and their log-probs jump."""
    plain, replayed = (backend_of(moe, TrainConfig(use_r3=r3), dtype="bfloat16") for r3 in (False, True))
    done = sampled(engine_of(replayed, moe, dtype="bfloat16", slots=64), requests(groups=16, samples=4))
    batch = [sequence(moe, each) for each in done]
    without, with_r3 = (
        np.mean(
            np.concatenate(
                [
                    np.abs(own - each.rollout_logprobs)
                    for own, each in zip(backend.logprobs(batch), batch, strict=True)
                ]
            )
        )
        for backend in (plain, replayed)
    )
    assert with_r3 < without


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"routed_experts": None}, "are missing"),
        ({"routed_experts": np.zeros((3, 2, 2), np.uint8)}, "are of 3 tokens"),
        ({"routed_experts": np.zeros((14, 3, 2), np.uint8)}, "have shape"),
        ({"routed_experts": np.full((14, 2, 2), 8, np.uint8)}, "expert 8 at token 0, layer 0"),
    ],
)
def test_a_sequence_whose_routes_cannot_be_its_own_is_refused_by_name(moe, changes, fact):
    backend = backend_of(moe)
    (done,) = sampled(engine_of(backend, moe), requests(1, 1))
    with pytest.raises(RoutedExpertsError, match=f"sample 0 of group 0 .*{fact}"):
        backend.logprobs([sequence(moe, done, **changes)])


def test_a_dense_model_cannot_be_replayed_or_recorded(folders):
    with pytest.raises(UnsupportedRoutingError, match="`qwen3` has no experts"):
        backend_of(folders["Qwen3"])
    with pytest.raises(UnsupportedRoutingError, match="has no experts"):
        engine_of(backend_of(folders["Qwen3"], TrainConfig()), folders["Qwen3"])


def test_weights_are_named_as_in_model_files_and_the_engine_reads_either(folder, tmp_path):
    """Other engines know no fused experts, and a checkpoint is another way to the same weights."""
    backend = backend_of(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    published = dict(backend.weights())
    assert saved.keys() == published.keys() | ({"lm_head.weight"} & saved.keys())
    assert all(torch.equal(saved[name], value) for name, value in published.items())
    engine = engine_of(backend, folder)
    engine.install(1, saved.items())
    assert all(torch.equal(value, saved[name]) for name, value in engine.weights(published))
