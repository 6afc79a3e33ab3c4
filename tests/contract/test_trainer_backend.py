"""What every training backend promises, and the torch backend on top of it.

The reference is written out here: each sequence alone through the Hugging Face model, the loss token
by token, and torch's own AdamW.
"""

import itertools
import json
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers

from relax_actor.config import ModelConfig, TrainConfig
from relax_actor.rl.batching import Cut
from relax_actor.trainers import torch_policy
from relax_actor.trainers.base import TrainSequence
from relax_actor.trainers.torch_backend import NO_SIGNAL, NOT_FINITE, TorchBackend
from relax_actor.trainers.torch_policy import TorchPolicy, UnsupportedModelError, pack

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large enough for log-probs to depend on the context
    "pad_token_id": 0,
    "eos_token_id": 0,  # pad and end of sequence are the same token: BUGCASES 17
    "bos_token_id": 1,
}
TRAIN = TrainConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)


def save_model(folder: Path, kind: str, **options) -> Path:
    """Write a random model of this kind as a Hugging Face folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    """A Qwen3 whose output layer is its embedding."""
    return save_model(tmp_path_factory.mktemp("tied"), "Qwen3", head_dim=16, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> Path:
    """A Llama with an output layer of its own."""
    return save_model(tmp_path_factory.mktemp("untied"), "Llama", tie_word_embeddings=False)


@pytest.fixture(params=["tied", "untied"])
def model_folder(request) -> Path:
    return request.getfixturevalue(request.param)


def make(folder: Path, train: TrainConfig = TRAIN, *, dtype: str = "float32", **options) -> TorchBackend:
    model = ModelConfig(path=str(folder), dtype=dtype)
    return TorchBackend(model, train, **{"total_steps": 10, "temperature": 0.8, **options})


def sequences(seed: int = 0, *, groups: int = 3, samples: int = 4) -> list[TrainSequence]:
    """Groups of samples of one prompt, all prompts beginning alike; lengths differ."""
    rng = np.random.default_rng(seed)
    return [
        sample(rng, prompt)
        for prompt in (np.r_[5, 6, 7, 8, rng.integers(2, VOCABULARY, 3)] for _ in range(groups))
        for _ in range(samples)
    ]


def sample(rng: np.random.Generator, prompt: np.ndarray) -> TrainSequence:
    n = int(rng.integers(1, 6))
    response = np.r_[rng.integers(2, 6, n - 1), SIZES["eos_token_id"]]
    return TrainSequence(
        prompt=prompt.astype(np.int32),
        response=response.astype(np.int32),
        rollout_logprobs=rng.uniform(-5, -3, n).astype(np.float32),
        advantage=float(rng.normal()),
    )


def with_advantage(batch: list[TrainSequence], advantage: float, **options) -> list[TrainSequence]:
    fields = ("prompt", "response", "rollout_logprobs")
    return [
        TrainSequence(**{name: getattr(s, name) for name in fields}, advantage=advantage, **options)
        for s in batch
    ]


def update(backend: TorchBackend, batch: list[TrainSequence], split: tuple[int, ...] = ()):
    """Do one optimizer update, cutting the batch at the positions of `split`."""
    tokens = sum(len(sequence.response) for sequence in batch)
    backend.begin_update(total_tokens=tokens, total_sequences=len(batch))
    borders = [0, *split, len(batch)]
    parts = [backend.accumulate(batch[a:b]) for a, b in itertools.pairwise(borders)]
    return backend.finish_update(), parts


def in_parts(backend: TorchBackend, batch: list[TrainSequence], *, tokens: int, split: tuple[int, ...]):
    """Do one optimizer update of which only estimates were known when it began."""
    backend.begin_update(total_tokens=tokens, total_sequences=2 * len(batch), is_estimate=True)
    borders = [0, *split, len(batch)]
    parts = [backend.accumulate(batch[a:b]) for a, b in itertools.pairwise(borders)]
    return backend.finish_update(), parts


def snapshot(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in backend.weights()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def logprobs_alone(model, sequence: TrainSequence, temperature: float = 0.8) -> torch.Tensor:
    """Run the Hugging Face model over one sequence, nothing shared and nothing padded."""
    ids = torch.tensor([[*sequence.prompt.tolist(), *sequence.response.tolist()]])
    logits = model(input_ids=ids).logits[0, len(sequence.prompt) - 1 : -1].float() / temperature
    targets = torch.tensor(sequence.response.astype(np.int64))
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]


def reference_update(folder: Path, batch: list[TrainSequence], train: TrainConfig) -> dict[str, torch.Tensor]:
    """Do the first update of a run by hand: the ratio is 1, only its gradient counts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = sum(len(sequence.response) for sequence in batch)
    loss = torch.zeros(())
    for sequence in batch:
        new = logprobs_alone(model, sequence)
        importance = torch.exp(new.detach() - torch.tensor(sequence.rollout_logprobs)).clamp(max=2.0)
        gain = importance * torch.exp(new - new.detach()) * sequence.advantage
        share = 1 / total if train.loss_aggregation == "token_mean" else 1 / (len(gain) * len(batch))
        loss = loss - gain.sum() * share
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
    torch.optim.AdamW(
        model.parameters(), lr=train.learning_rate, betas=train.adam_betas, weight_decay=train.weight_decay
    ).step()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_one_update_is_that_of_every_sequence_alone(model_folder, aggregation):
    """Shared prefixes, row bounds and master weights change nothing but the time it takes."""
    train = TrainConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, loss_aggregation=aggregation)
    backend, batch = make(model_folder, train), sequences()

    update(backend, batch)

    expected = reference_update(model_folder, batch, train)
    for name, value in backend.weights():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_logprobs_are_those_of_every_sequence_alone(model_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    batch = sequences()

    found = make(model_folder).logprobs(batch)

    for sequence, logprobs in zip(batch, found, strict=True):
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, logprobs_alone(model, sequence).detach(), atol=1e-5)


def test_logprobs_are_what_accumulate_sees(tied):
    """Handed back as the start of the step they make every ratio 1."""
    backend, batch = make(tied), sequences()
    for sequence, logprobs in zip(batch, backend.logprobs(batch), strict=True):
        sequence.rollout_logprobs = sequence.old_logprobs = logprobs

    _, (stats,) = update(backend, batch)

    assert stats.tokens == sum(len(sequence.response) for sequence in batch)
    assert stats.mismatch_abs_sum / stats.tokens < 1e-6
    assert stats.max_ratio == pytest.approx(1.0, abs=1e-5)
    assert stats.clipped_tokens == 0


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("split", [(1,), (4, 8), tuple(range(1, 12))])
def test_any_split_into_micro_batches_gives_the_same_gradient(tied, split, aggregation):
    train = TrainConfig(learning_rate=1e-2, loss_aggregation=aggregation)
    whole, parts, batch = make(tied, train), make(tied, train), sequences()

    once, (stats,) = update(whole, batch)
    often, several = update(parts, batch, split)

    assert often.grad_norm == pytest.approx(once.grad_norm, rel=1e-5)
    assert sum(part.loss for part in several) == pytest.approx(stats.loss, rel=1e-5, abs=1e-7)
    assert sum(part.tokens for part in several) == stats.tokens


def test_a_bound_on_rows_and_logits_changes_nothing(tied):
    batch = sequences()
    with torch.no_grad():
        model = torch_policy.load_model(tied, dtype=torch.float32, device="cpu")
        whole = TorchPolicy(model, temperature=0.8)
        chunked = TorchPolicy(model, temperature=0.8, max_logits=3 * VOCABULARY)
        (one,) = pack(batch)
        several = pack(batch, max_rows=20)

        expected = whole.score(one)
        found = [chunked.score(work) for work in several]

    assert len(several) > 1
    torch.testing.assert_close(torch.cat([part.logprobs for part in found]), expected.logprobs)
    torch.testing.assert_close(torch.cat([part.entropies for part in found]), expected.entropies)


def test_logits_in_chunks_give_the_same_gradient(tied):
    """The logits of each chunk are computed again in the backward pass."""
    gradients = []
    for options in ({}, {"max_logits": 3 * VOCABULARY}):
        model = torch_policy.load_model(tied, dtype=torch.float32, device="cpu")
        (work,) = pack(sequences())
        TorchPolicy(model, temperature=0.8, **options).score(work).logprobs.sum().backward()
        gradients.append({name: value.grad for name, value in model.named_parameters()})

    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def test_the_entropy_is_that_of_the_whole_distribution(tied):
    model = transformers.AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32).eval()
    (sequence,) = sequences(groups=1, samples=1)
    ids = torch.tensor([[*sequence.prompt.tolist(), *sequence.response.tolist()]])
    logits = model(input_ids=ids).logits[0, len(sequence.prompt) - 1 : -1].detach().double().numpy() / 0.8
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    _, (stats,) = update(make(tied), [sequence])

    assert stats.entropy_sum == pytest.approx(-(p * np.log(p)).sum(), rel=1e-5)


RECIPES = [
    pytest.param("float32", TRAIN, id="float32"),
    pytest.param("bfloat16", TRAIN, id="bfloat16"),
    pytest.param(
        "bfloat16",
        TrainConfig(
            learning_rate=1e-2,
            kl_coef=0.1,
            lr_schedule="linear",
            warmup_steps=2,
            updates_per_batch=2,
            frozen=("embed",),
        ),
        id="everything on",
    ),
]


@pytest.fixture
def own_algorithms():
    """Let torch choose its algorithms again afterwards."""
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.usefixtures("own_algorithms")
def test_deterministic_algorithms_are_asked_of_torch(tied, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    make(tied)
    assert not torch.are_deterministic_algorithms_enabled()
    backend = make(tied, msgspec.structs.replace(TRAIN, deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    update(backend, sequences(0))  # nothing that an update needs is refused


@pytest.mark.parametrize(("dtype", "train"), RECIPES)
def test_the_same_calls_give_the_same_weights_bit_for_bit(tied, dtype, train):
    runs = [make(tied, train, dtype=dtype) for _ in range(2)]

    for backend in runs:
        for seed in range(4):
            update(backend, sequences(seed), split=(5,))

    assert same(snapshot(runs[0]), snapshot(runs[1]))


@pytest.mark.parametrize(("dtype", "train"), RECIPES)
def test_ten_updates_equal_five_a_restart_and_five(tied, tmp_path, dtype, train):
    straight, before, after = (make(tied, train, dtype=dtype) for _ in range(3))
    expected = [update(straight, sequences(seed))[0] for seed in range(10)]

    found = [update(before, sequences(seed))[0] for seed in range(5)]
    before.save(tmp_path)
    after.load(tmp_path)
    found += [update(after, sequences(seed))[0] for seed in range(5, 10)]

    assert found == expected
    assert same(snapshot(after), snapshot(straight))


def test_a_checkpoint_is_also_a_model_folder(tied, tmp_path):
    origin = shutil.copytree(tied, tmp_path / "origin")
    (origin / "tokenizer.json").write_text("{}")
    backend = make(origin, dtype="bfloat16")
    update(backend, sequences())
    (tmp_path / "saved").mkdir()

    backend.save(tmp_path / "saved")

    folder = tmp_path / "saved" / "model"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert same({name: value.detach() for name, value in loaded.named_parameters()}, snapshot(backend))
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_a_backend_continues_over_whatever_it_did_before_the_load(tied, tmp_path):
    fresh, used = make(tied, dtype="bfloat16"), make(tied, dtype="bfloat16")
    fresh.save(tmp_path)
    update(used, sequences())

    used.load(tmp_path)

    assert update(used, sequences(7)) == update(fresh, sequences(7))
    assert same(snapshot(used), snapshot(fresh))


@pytest.mark.parametrize("missing", ["trainer.json", "optimizer.safetensors", "model"])
def test_a_missing_file_is_named(tied, tmp_path, missing):
    backend = make(tied)
    backend.save(tmp_path)
    (tmp_path / missing).rename(tmp_path / "gone")

    with pytest.raises(FileNotFoundError, match=missing):
        backend.load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tied, untied, tmp_path):
    make(untied).save(tmp_path)

    with pytest.raises(ValueError, match=r"of another model: `lm_head\.weight`"):
        make(tied).load(tmp_path)


def test_a_checkpoint_of_another_choice_of_frozen_parameters_is_refused(tied, tmp_path):
    make(tied).save(tmp_path)

    with pytest.raises(ValueError, match=r"of another model: `model\.embed_tokens\.weight`"):
        make(tied, TrainConfig(frozen=("embed",))).load(tmp_path)


def test_a_checkpoint_of_another_format_or_optimizer_is_refused(tied, tmp_path):
    backend = make(tied)
    backend.save(tmp_path)
    state = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps({**state, "format": 99}))

    with pytest.raises(ValueError, match="format 99"):
        backend.load(tmp_path)
    with pytest.raises(ValueError, match="of other parameters"):
        backend._optimizer.load_state({})


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_equal_rewards_move_nothing(tied, kl_coef):
    """Not by momentum, not by weight decay, and not by the KL term either."""
    train = TrainConfig(learning_rate=1e-2, weight_decay=0.1, kl_coef=kl_coef)
    backend = make(tied, train)
    update(backend, sequences())
    before = snapshot(backend)

    done, (stats,) = update(backend, with_advantage(sequences(1), 0.0))

    assert (done.skipped, done.grad_norm, stats.tokens) == (NO_SIGNAL, 0.0, 0)
    assert same(snapshot(backend), before)


def test_an_empty_update_is_skipped_with_a_reason(tied):
    done, (stats,) = update(make(tied), [])

    assert (done.skipped, stats.tokens) == (NO_SIGNAL, 0)


def test_equal_rewards_feel_the_kl_term_where_that_is_asked_for(tied):
    train = TrainConfig(learning_rate=1e-2, kl_coef=0.1, kl_without_signal=True)
    backend = make(tied, train)
    update(backend, sequences())

    done, (stats,) = update(backend, with_advantage(sequences(1), 0.0))

    assert done.skipped == ""
    assert done.grad_norm > 0
    assert stats.kl_sum > 0


def test_the_average_sample_of_a_group_with_signal_feels_the_kl_term(tied):
    """Its advantage is 0, and yet its group has something to teach."""
    backend = make(tied, TrainConfig(learning_rate=1e-2, kl_coef=0.1))
    update(backend, sequences())

    done, _ = update(backend, with_advantage(sequences(1), 0.0, has_signal=True))

    assert done.grad_norm > 0


def test_a_sequence_without_signal_beside_one_with_it_feels_no_kl(tied):
    backends = [make(tied, TrainConfig(learning_rate=1e-2, kl_coef=0.5)) for _ in range(2)]
    silent, loud = with_advantage(sequences(1), 0.0), sequences(2)
    tokens = sum(len(sequence.response) for sequence in [*silent, *loud])
    for backend, batch in zip(backends, ([*loud, *silent], loud), strict=True):
        update(backend, sequences())
        backend.begin_update(total_tokens=tokens, total_sequences=24)
        backend.accumulate(batch)

    assert backends[0]._optimizer.clip() == backends[1]._optimizer.clip()


def test_the_reference_is_the_model_the_run_began_with(tied, tmp_path):
    train = TrainConfig(learning_rate=1e-2, kl_coef=0.1)
    trained, resumed = make(tied, train), make(tied, train)
    _, (first,) = update(trained, sequences())
    trained.save(tmp_path)
    resumed.load(tmp_path)

    _, (second,) = update(trained, sequences(1))
    _, (again,) = update(resumed, sequences(1))

    assert first.kl_sum == 0.0
    assert second.kl_sum > 0.0
    assert again.kl_sum == second.kl_sum


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_never_reaches_the_optimizer(tied, dtype):
    backend, undisturbed = (make(tied, dtype=dtype) for _ in range(2))
    poisoned = sequences(1)
    poisoned[3].advantage = float("nan")
    for each in (backend, undisturbed):
        update(each, sequences())
    before = snapshot(backend)

    done, _ = update(backend, poisoned)

    assert done.skipped == NOT_FINITE
    assert same(snapshot(backend), before)
    update(backend, sequences(2))
    update(undisturbed, sequences(2))
    assert same(snapshot(backend), snapshot(undisturbed))


def test_the_learning_rate_counts_updates_skipped_ones_included(tied):
    train = TrainConfig(
        learning_rate=1.0, lr_schedule="linear", warmup_steps=1, updates_per_batch=2, min_lr_frac=0.0
    )
    backend = make(tied, train, total_steps=3)

    rates = [update(backend, [])[0].learning_rate for _ in range(6)]

    assert rates == pytest.approx([0.5, 1.0, 1.0, 2 / 3, 1 / 3, 0.0])


def test_the_gradient_is_clipped_to_its_bound_and_the_norm_before_is_told(tied):
    """Of AdamW's first step only the first moment knows the gradient's size: it is 0.1 of it."""
    backend = make(tied, TrainConfig(learning_rate=1e-3, max_grad_norm=1e-3))

    done, _ = update(backend, sequences())

    moments = [value for name, value in backend._optimizer.state().items() if name.startswith("exp_avg/")]
    clipped = torch.cat([value.flatten() for value in moments]).norm().item() / 0.1
    assert done.grad_norm > 1e-2
    assert clipped == pytest.approx(1e-3, rel=1e-3)


def test_a_bound_of_zero_does_not_clip(tied):
    loose = update(make(tied, TrainConfig(max_grad_norm=0.0)), sequences())[0]

    assert loose.grad_norm == update(make(tied, TrainConfig()), sequences())[0].grad_norm


def test_updates_too_small_for_bfloat16_add_up_in_the_masters(tied):
    backend = make(tied, TrainConfig(learning_rate=1e-5), dtype="bfloat16")
    name = "model.embed_tokens.weight"
    before = snapshot(backend)[name]

    update(backend, sequences())
    after_one = snapshot(backend)[name]
    for _ in range(60):
        update(backend, sequences())

    big = before.abs() > 0.1  # where neighbouring bfloat16 numbers are at least 5e-4 apart
    moved_at_once = (after_one != before)[big].float().mean().item()
    moved_at_last = (snapshot(backend)[name] != before)[big].float().mean().item()
    assert moved_at_once < 0.05
    assert moved_at_last > 4 * moved_at_once


def test_old_logprobs_are_what_the_ratio_divides_by(tied):
    backend, batch = make(tied), with_advantage(sequences(), 1.0)
    for sequence, logprobs in zip(batch, backend.logprobs(batch), strict=True):
        sequence.old_logprobs = logprobs - np.float32(1.0)

    _, (stats,) = update(backend, batch)

    assert stats.clipped_tokens == stats.tokens


def test_the_rollout_as_base_needs_no_importance_weight(tied):
    batch = with_advantage(sequences(), 1.0)
    for sequence, logprobs in zip(batch, make(tied).logprobs(batch), strict=True):
        sequence.rollout_logprobs = logprobs - np.float32(0.1)

    _, (stats,) = update(make(tied, TrainConfig(ratio_base="rollout")), batch)

    assert stats.loss == pytest.approx(-np.exp(0.1), rel=1e-4)
    assert stats.mismatch_abs_sum / stats.tokens == pytest.approx(0.1, rel=1e-3)


def test_an_end_token_that_is_also_the_pad_token_is_trained(tied):
    """BUGCASES 17: a mask made of the pad id would leave nothing of this response."""
    backend = make(tied, TrainConfig(learning_rate=1e-2))
    end = TrainSequence(
        prompt=np.array([5, 6], np.int32),
        response=np.array([SIZES["eos_token_id"]], np.int32),
        rollout_logprobs=np.array([-4.0], np.float32),
        advantage=1.0,
    )
    before = backend.logprobs([end])[0]

    update(backend, [end])

    assert backend.logprobs([end])[0] > before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_in_one_order_and_dtype_frozen_ones_too(model_folder, dtype):
    backend = make(model_folder, TrainConfig(frozen=("embed",)), dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    names = [name for name, _ in model.named_parameters()]

    update(backend, sequences())

    assert [name for name, _ in backend.weights()] == names
    assert {value.dtype for _, value in backend.weights()} == {getattr(torch, dtype)}
    assert ("lm_head.weight" in names) == (not model.config.tie_word_embeddings)


def test_what_matches_a_frozen_pattern_does_not_move(untied):
    train = TrainConfig(learning_rate=1e-2, weight_decay=0.1, frozen=("embed_tokens", r"layers\.0\."))
    backend = make(untied, train)
    before = snapshot(backend)

    update(backend, sequences())

    moved = {name for name, value in backend.weights() if not torch.equal(value, before[name])}
    frozen = {name for name in before if "embed_tokens" in name or "layers.0." in name}
    assert moved == set(before) - frozen


@pytest.mark.parametrize(
    ("patterns", "fact"), [(("embed", "nowhere"), "'nowhere' matches none"), ((".",), "every parameter")]
)
def test_a_frozen_pattern_that_makes_no_sense_is_refused(tied, patterns, fact):
    with pytest.raises(ValueError, match=fact):
        make(tied, TrainConfig(frozen=patterns))


def test_an_update_of_other_sizes_than_announced_is_refused(tied):
    backend = make(tied)
    backend.begin_update(total_tokens=5, total_sequences=12)
    backend.accumulate(sequences())

    with pytest.raises(ValueError, match=r"\(5, 12\) and had"):
        backend.finish_update()


def test_accumulate_and_finish_want_an_update_that_has_begun(tied):
    backend = make(tied)
    with pytest.raises(RuntimeError, match="begin_update"):
        backend.accumulate([])
    with pytest.raises(RuntimeError, match="begin_update"):
        backend.finish_update()


@pytest.mark.parametrize(
    ("prompt", "response", "logprobs", "fact"),
    [
        ([], [3], [-1.0], "0 prompt and 1 response"),
        ([3], [], [], "1 prompt and 0 response"),
        ([3], [4, 5], [-1.0], "1 log-probs for 2"),
    ],
)
def test_a_sequence_that_cannot_be_trained_on_is_refused(tied, prompt, response, logprobs, fact):
    sequence = TrainSequence(
        prompt=np.array(prompt, np.int32),
        response=np.array(response, np.int32),
        rollout_logprobs=np.array(logprobs, np.float32),
        advantage=1.0,
    )

    with pytest.raises(ValueError, match=fact):
        update(make(tied), [sequence])


def test_arrays_that_cannot_be_written_to_are_taken(tied):
    """They lie in shared memory that belongs to the queue."""
    batch = sequences()
    for sequence in batch:
        sequence.old_logprobs = sequence.rollout_logprobs
        for array in (sequence.prompt, sequence.response, sequence.rollout_logprobs):
            array.flags.writeable = False

    assert update(make(tied), batch)[0].skipped == ""


def test_greedy_rollouts_are_trained_at_temperature_one(tied):
    batch = sequences()

    greedy, one = (make(tied, temperature=t).logprobs(batch) for t in (0.0, 1.0))

    assert all(np.array_equal(a, b) for a, b in zip(greedy, one, strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "fact"),
    [
        ("Mamba", {"state_size": 4}, "cannot be loaded"),  # no attention
        ("Electra", {}, "cannot run on a tree"),  # an output layer with a transformation before it
        ("Lfm2", {"full_attn_idxs": [1]}, "gives other logits"),  # convolutions
        ("Cohere", {}, "gives other logits"),  # scales its logits
    ],
)
def test_a_model_on_which_trees_are_not_exact_is_refused_at_the_start(tmp_path, kind, options, fact):
    with pytest.raises(UnsupportedModelError, match=f"(?s){fact}.*Llama, Qwen2 and Qwen3"):
        make(save_model(tmp_path, kind, **options))


def test_a_sequence_longer_than_a_sliding_window_is_refused(tmp_path):
    backend = make(save_model(tmp_path, "Mistral", head_dim=16, sliding_window=8))

    with pytest.raises(UnsupportedModelError, match="its last 8 tokens only, and a sequence has"):
        update(backend, sequences())


# Sizes that are not known when an update begins


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_an_update_begun_on_estimates_is_the_one_of_the_right_sizes(untied, aggregation):
    """Its gradient is multiplied at the end, before it is clipped; its losses are to be."""
    train = msgspec.structs.replace(TRAIN, loss_aggregation=aggregation)
    whole, streamed = make(untied, train), make(untied, train)
    batch = sequences()

    known, parts = update(whole, batch, split=(4, 8))
    guessed, estimated = in_parts(streamed, batch, tokens=512, split=(4, 8))

    assert guessed.grad_norm == pytest.approx(known.grad_norm, rel=1e-6)
    assert sum(part.loss for part in estimated) * guessed.loss_factor == pytest.approx(
        sum(part.loss for part in parts), rel=1e-5
    )
    for name, value in snapshot(whole).items():
        torch.testing.assert_close(snapshot(streamed)[name], value, rtol=1e-5, atol=1e-6)


def test_an_update_that_begins_again_forgets_what_it_had(untied):
    once, twice = make(untied), make(untied)
    batch = sequences()
    twice.begin_update(total_tokens=64, total_sequences=9, is_estimate=True)
    twice.accumulate(batch[:5])

    in_parts(once, batch, tokens=64, split=(4,))
    in_parts(twice, batch, tokens=64, split=(4,))

    assert all(torch.equal(value, snapshot(twice)[name]) for name, value in snapshot(once).items())


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_micro_batches_by_tokens_have_the_gradient_of_one_in_float64(untied, aggregation):
    """However they are filled, each token weighs what it does in the whole batch."""
    train = msgspec.structs.replace(TRAIN, loss_aggregation=aggregation, max_grad_norm=0.0)
    batch = sequences(groups=5)
    cut = Cut(size=1, max_tokens=30, tokens=lambda each: len(each.prompt) + len(each.response))
    sizes = [len(part) for part in cut.all(batch)]
    assert len(set(sizes)) > 1, "of different sizes, or this would prove little"

    backend = make(untied, train)
    done, parts = update(backend, batch, split=tuple(itertools.accumulate(sizes))[:-1])
    loss, norm = float64_reference(untied, batch, aggregation)

    assert sum(part.loss for part in parts) == pytest.approx(loss, rel=1e-4)
    assert done.grad_norm == pytest.approx(norm, rel=1e-4)


def float64_reference(folder: Path, batch: list[TrainSequence], aggregation: str) -> tuple[float, float]:
    """Return loss and gradient norm of the batch, sequence by sequence in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total = sum(len(each.response) for each in batch)
    loss = torch.zeros((), dtype=torch.float64)
    for each in batch:
        tokens = torch.tensor(np.r_[each.prompt, each.response].astype(np.int64))
        logits = model(tokens[None]).logits[0] / 0.8
        after = torch.log_softmax(logits[len(each.prompt) - 1 : -1], dim=-1)
        logprobs = after.gather(1, torch.tensor(each.response.astype(np.int64))[:, None])[:, 0]
        start = logprobs.detach()
        importance = (start - torch.tensor(each.rollout_logprobs, dtype=torch.float64)).exp().clamp(max=2.0)
        surrogate = -(logprobs - start).exp() * each.advantage
        weight = 1 / total if aggregation == "token_mean" else 1 / (len(each.response) * len(batch))
        loss = loss + (weight * importance * surrogate).sum()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
    return loss.item(), norm.item()
