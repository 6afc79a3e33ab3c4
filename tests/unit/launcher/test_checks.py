"""Whatever is wrong with a run is found before a process starts, all of it, with its option or line."""

import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from launcher import machine_checks
from launcher.checks import check_config
from launcher.errors import report
from launcher.estimate import POLICY_COPIES, Estimate, estimate
from launcher.fields import SECTIONS, dotted
from launcher.machine_checks import check_machine
from launcher.modelfolder import model_config, model_shape, weight_files
from launcher.ranges import RANGES
from launcher.sglang_checks import sglang_problems
from relax_actor.config import Config
from relax_actor.errors import RelaxError
from relax_actor.trainers.checkpoint import CheckpointStore


def with_(config: Config, **values: object) -> Config:
    """Replace `section__key` values."""
    for name, value in values.items():
        section, _, key = name.partition("__")
        changed = msgspec.structs.replace(getattr(config, section), **{key: value})
        config = msgspec.structs.replace(config, **{section: changed})
    return config


def text_of(problems: list) -> str:
    return "\n".join(report(problem) for problem in problems)


def test_nothing_is_wrong_with_a_good_configuration(config):
    assert check_config(config) == []


def test_every_numeric_field_has_a_range_or_needs_none():
    unlimited = {"reward.error_reward", "run.grace_s"}
    for section, fields in SECTIONS.items():
        for key, field in fields.items():
            if field.type in (int, float):
                option = dotted((section, key))
                assert option in RANGES or option in unlimited, option


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rollout__replicas", 0),
        ("run__steps", 0),
        ("run__max_staleness", -1),
        ("run__name", "a/b"),
        ("run__name", " "),
        ("rollout__temperature", -0.1),
        ("rollout__top_p", 1.01),
        ("rollout__samples_per_prompt", 1),
        ("rollout__stop_token_ids", (-1,)),
        ("train__learning_rate", 0.0),
        ("train__learning_rate", float("nan")),
        ("train__learning_rate", float("inf")),
        ("train__adam_betas", (0.9, 1.0)),
        ("train__frozen", ("(",)),
        ("train__global_batch_size", 2**31),
        ("queue__max_size_gb", 0.0),
        ("reward__timeout_s", -1.0),
    ],
)
def test_a_value_out_of_range_is_named(config, option, value):
    (problem,) = check_config(with_(config, **{option: value}))

    assert problem.where == option.replace("__", ".")


def test_all_problems_are_listed_and_called_what_the_user_called_them(config):
    bad = with_(config, rollout__replicas=0, train__learning_rate=-1.0, model__path="/nowhere")

    text = text_of(check_config(bad, where=lambda option: f"{option} (run.toml:7)"))

    assert "`rollout.replicas (run.toml:7)` must be 1 or more, got 0" in text
    assert "`train.learning_rate (run.toml:7)` must be above 0, got -1.0" in text
    assert "`model.path (run.toml:7)` is no folder: /nowhere" in text


@pytest.mark.parametrize(
    ("batch", "samples", "hint"),
    [
        (30, 7, "use 28 or 35, or samples_per_prompt 6 or 10"),
        (6, 5, "use 5 or 10, or samples_per_prompt 3 or 6"),
        (2, 5, "use 5, or samples_per_prompt 2"),
        (2147483646, 4, "use 2147483644 or 2147483648, or samples_per_prompt 3 or 6"),
    ],
)
def test_a_batch_that_is_no_multiple_of_the_group_lists_legal_sizes(config, batch, samples, hint):
    bad = with_(
        config, train__global_batch_size=batch, rollout__samples_per_prompt=samples, train__micro_batch_size=1
    )

    (problem,) = check_config(bad)

    assert problem.hint == hint


def test_updates_must_divide_the_batch(config):
    (problem,) = check_config(with_(config, train__updates_per_batch=3))

    assert problem.hint == "use 2 or 4"
    assert check_config(with_(config, train__updates_per_batch=4)) == []


def test_a_micro_batch_larger_than_an_update_is_refused_and_a_smaller_one_never_is(config):
    (problem,) = check_config(with_(config, train__micro_batch_size=33, train__updates_per_batch=4))

    assert problem.hint == "use 32; any smaller size works"
    assert check_config(with_(config, train__micro_batch_size=5)) == []


def test_combinations_that_cannot_work_are_refused(config):
    bad = with_(
        config,
        queue__min_valid_samples=9,
        queue__on_partial_timeout="finish",
        train__warmup_steps=101,
        rollout__min_replicas=5,
        eval__every=5,
    )

    text = text_of(check_config(bad))

    assert "`queue.min_valid_samples` is 9, but a group has only 8 samples" in text
    assert "`train.warmup_steps` is 101, more than run.steps, which is 100" in text
    assert "`rollout.min_replicas` is 5, more than rollout.replicas, which is" in text
    assert "`eval.every` needs eval.path" in text
    assert "`queue.on_partial_timeout` is `finish`, but no tokens of an unfinished sample are put" in text


def test_short_runs_are_fine(config):
    assert check_config(with_(config, run__steps=1, run__max_staleness=4)) == []
    assert check_config(with_(config, run__steps=3, run__max_staleness=0)) == []


def test_a_model_folder_that_is_not_whole_is_refused(config, model_folder):
    (model_folder / "model.safetensors").unlink()
    (model_folder / "tokenizer.json").unlink()

    text = text_of(check_config(config))

    assert "has no *.safetensors" in text
    assert "has no tokenizer" in text


def test_a_checkpoint_to_start_from_must_be_whole(config, tmp_path):
    whole = CheckpointStore(tmp_path / "checkpoints").save(3, lambda folder: (folder / "w").touch(), {})

    assert check_config(with_(config, run__resume=str(whole))) == []
    (problem,) = check_config(with_(config, run__resume=str(tmp_path)))
    assert problem.where == "run.resume"
    assert "is no whole checkpoint" in problem.fact


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[]", "config.json is not a JSON object"),
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", None, "config.json: No such file"),
        ("config.json", "[" * 100_000, "config.json is not JSON"),
        ("config.json", '{"text_config": [1]}', "`text_config` is not an object"),
        ("config.json", '{"num_hidden_layers": "two"}', "`num_hidden_layers` is no whole number: 'two'"),
        ("model.safetensors", "", "model.safetensors is not a whole safetensors file"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "part-2"}}', "lacks part-2"),
        ("model.safetensors.index.json", "{}", "model.safetensors.index.json has no `weight_map`"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 2}}', "has no `weight_map` of file names"),
        ("model.safetensors.index.json", "{", "model.safetensors.index.json is not JSON"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "."}}', "Is a directory"),
    ],
)
def test_what_a_model_folder_lacks_is_said(config, model_folder, name, content, message):
    (model_folder / name).unlink(missing_ok=True)
    if content is not None:
        (model_folder / name).write_text(content)

    assert message in text_of(check_config(config))


def test_the_size_of_a_model_is_read_from_its_headers(model_folder):
    shape = model_shape(model_folder)

    assert (shape.parameters, shape.layers, shape.context_tokens) == (1000, 3, 64)
    assert shape.kv_values_per_token == 2 * 3 * 8


def test_shards_are_those_of_the_index_and_the_text_model_counts(model_folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (model_folder / "other.safetensors").touch()
    (model_folder / "config.json").write_text('{"x": 1, "text_config": {"num_hidden_layers": 9}}')

    assert weight_files(model_folder) == [model_folder / "model.safetensors"]
    assert model_config(model_folder)["num_hidden_layers"] == 9


@pytest.mark.parametrize("content", [b"", b"\x05", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 9])
def test_a_torn_weight_file_is_no_model(model_folder, content):
    (model_folder / "model.safetensors").write_bytes(content)

    with pytest.raises(ValueError, match="not a whole safetensors file"):
        model_shape(model_folder)


def test_a_weight_file_that_was_copied_halfway_is_refused(config, model_folder):
    file = model_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])

    assert "it ends before its last tensor" in text_of(check_config(config))


def test_a_model_of_text_takes_no_images(config, model_folder, dataset):
    dataset.write_text('{"prompt": "a", "label": "b", "image": {"pixels": [1, 2]}}')
    seeing = with_(config, data__media_key="image")

    (problem,) = check_config(seeing)
    assert (problem.where, "reads text only" in problem.fact) == ("data.media_key", True)

    (model_folder / "config.json").write_text('{"vision_config": {}, "text_config": null}')
    assert check_config(seeing) == []


def test_every_bad_row_is_named_with_file_line_and_field(config, dataset):
    rows = [
        '{"prompt": "a", "label": "b"}',
        '{"label": "x"}',
        '{"prompt": null, "label": "x"}',
        '{"prompt": 3}',
    ]
    dataset.write_text("\n".join(rows))

    problems = check_config(config)

    assert [problem.where for problem in problems] == [f"{dataset}:{line}" for line in (2, 3, 4)]
    assert "has no field `prompt`; it has: `label`" in problems[0].fact
    assert problems[0].hint


def test_many_bad_rows_end_in_a_number(config, dataset):
    dataset.write_text('{"prompt": "a", "label": "b"}\n' + "{}\n" * 15)

    problems = check_config(config)

    assert len(problems) == 11
    assert problems[-1].fact == "has 5 more bad rows"


def test_bad_rows_may_be_skipped_but_some_row_must_be_left(config, dataset):
    lenient = with_(config, data__on_bad_row="skip")
    dataset.write_text('{"prompt": "a", "label": "b"}\n{}\n')
    assert check_config(lenient) == []

    dataset.write_text("{}\n")
    (problem,) = check_config(lenient)
    assert (problem.where, "no usable row" in problem.fact) == ("data.path", True)


def test_files_that_are_named_must_be_there(config, tmp_path):
    bad = with_(
        config, data__prefix_path="/no/prefix", eval__path="/no/eval", run__user_path=str(tmp_path / "no")
    )

    text = text_of(check_config(bad))

    assert "`data.prefix_path` cannot be read as text" in text
    assert "`eval.path` cannot be used" in text
    assert "`run.user_path` is no folder" in text


def test_a_prefix_and_an_evaluation_set_that_are_there_are_fine(config, dataset, tmp_path):
    (tmp_path / "prefix.txt").write_text("1+1=2\n")
    good = with_(
        config, data__prefix_path=str(tmp_path / "prefix.txt"), eval__path=str(dataset), eval__every=1
    )

    assert check_config(good) == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mathz", "must be `math`"),
        ("a b:c", "is not of the form module:function"),
        ("nowhere:reward", "neither installed or in"),
        ("mine.deep:reward", "names module `mine.deep`"),
        ("mine:rewrad", "did you mean `reward`?"),
        ("mine:zzz", "does not define"),
        ("broken:reward", "is not a Python module"),
    ],
)
def test_a_reward_function_that_is_not_there_is_refused(config, tmp_path, function, message):
    (tmp_path / "mine.py").write_text(
        "raise SystemExit\ndef reward(): ...\nother = 1\nfrom os import path as p\n"
    )
    (tmp_path / "broken.py").write_text("def (")

    bad = with_(config, reward__function=function, run__user_path=str(tmp_path))

    (problem,) = check_config(bad)
    assert message in report(problem)


@pytest.mark.parametrize(
    "function", ["exact", "mine:reward", "mine:p", "mine:other.method", "package.inner:f", "math:sqrt"]
)
def test_a_reward_function_is_found_without_importing_it(config, tmp_path, function):
    (tmp_path / "mine.py").write_text(
        "raise SystemExit\ndef reward(): ...\nother = 1\nfrom os import path as p\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("async def g(): ...\nclass f: ...\n")
    good = with_(config, reward__function=function, run__user_path=str(tmp_path))

    assert check_config(good) == []


@pytest.fixture
def need(config, model_folder) -> Estimate:
    return estimate(config, model_shape(model_folder))


def test_memory_is_estimated_from_parameters(config, need):
    assert need.parameters == 1000
    assert need.trainer_bytes == 16_000 + 2_000
    assert need.policy_bytes == POLICY_COPIES * 2_000
    assert need.queue_bytes == 2 * 2**30
    assert need.rollout_bytes == 2_000 + 64 * (64 + 256) * 48 * 2
    float32 = estimate(
        with_(config, model__dtype="float32", data__max_prompt_tokens=10),
        model_shape(Path(config.model.path)),
    )
    assert (float32.trainer_bytes, float32.policy_bytes) == (16_000, 12_000)
    assert float32.rollout_bytes == 4_000 + 64 * (10 + 256) * 48 * 4


def test_a_machine_with_room_is_fine(config, need, tmp_path):
    small = msgspec.structs.replace(need, queue_bytes=1)

    assert check_machine(config, tmp_path / "runs" / "x", small) == []
    assert check_machine(with_(config, queue__storage_path=str(tmp_path)), tmp_path, small) == []


def test_too_little_shared_memory_is_refused_with_need_and_have(config, need, tmp_path):
    huge = msgspec.structs.replace(need, queue_bytes=2**50)

    (problem,) = check_machine(config, tmp_path, huge)

    assert re.search(r"has [\d.]+ GiB free, but the run needs 1048576.\d\d GiB", problem.fact)
    assert "lower queue.max_size_gb (now 2)" in problem.hint


def test_policy_versions_too_large_for_shared_memory_are_refused(config, need, tmp_path):
    huge = msgspec.structs.replace(need, policy_bytes=2**50, queue_bytes=1)
    elsewhere = with_(config, queue__storage_path=str(tmp_path))

    (problem,) = check_machine(elsewhere, tmp_path, huge)

    assert problem.where == f"queue.storage_path = {tmp_path}"  # where they are, and nowhere else
    assert "1048576.00 GiB for policy versions" in problem.fact


def test_a_storage_path_that_is_not_there_is_refused(config, need, tmp_path):
    (problem,) = check_machine(with_(config, queue__storage_path="/nowhere"), tmp_path, need)

    assert "No such file or directory: /nowhere" in problem.fact


def test_a_run_folder_that_cannot_be_made_is_refused(config, need, tmp_path):
    small = msgspec.structs.replace(need, queue_bytes=1)
    (tmp_path / "file").touch()

    (problem,) = check_machine(config, tmp_path / "file" / "run", small)

    assert problem.where == "run.dir"


def test_a_name_too_long_for_any_file_is_refused(config, need, tmp_path):
    name, small = "a" * 300, msgspec.structs.replace(need, queue_bytes=1)
    paths = {"model__path": name, "data__path": name, "run__user_path": name, "data__prefix_path": name}

    found = {problem.where for problem in check_config(with_(config, **paths))}
    (problem,) = check_machine(config, tmp_path / name, small)

    assert found == {"model.path", "data.path", "run.user_path", "data.prefix_path"}
    assert (problem.where, "too long" in problem.fact) == ("run.dir", True)


def test_a_machine_without_a_temporary_folder_is_refused(config, need, tmp_path, monkeypatch):
    def missing() -> str:
        raise FileNotFoundError(2, "No usable temporary directory")

    monkeypatch.setattr(machine_checks.tempfile, "gettempdir", missing)
    small = msgspec.structs.replace(need, queue_bytes=1)

    (problem,) = check_machine(config, tmp_path, small)

    assert problem.where == "TMPDIR"


def test_problems_are_errors_of_ours(config):
    (problem,) = check_config(with_(config, run__steps=0))

    assert isinstance(problem, RelaxError)
    assert os.linesep not in problem.fact


def with_experts(config: Config, **fields: object) -> Config:
    """Make the model one with experts, and replay wanted."""
    path = Path(config.model.path) / "config.json"
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | experts | fields))
    return with_(config, train__use_r3=True)


def test_routing_replay_of_a_known_model_with_experts_is_fine(config):
    assert check_config(with_experts(config)) == []


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"num_experts": 0}, "`train.use_r3` cannot be: a model of type `qwen3_moe` has no experts"),
        ({"model_type": "other_moe"}, "routes in a way that is not known here"),
        ({"vision_config": {}}, "is not there for models that read images"),
    ],
)
def test_routing_replay_is_refused_where_the_model_cannot(config, fields, fact):
    assert fact in text_of(check_config(with_experts(config, **fields)))


def test_routing_replay_is_refused_where_the_engine_records_nothing(config):
    problems = check_config(with_(with_experts(config), rollout__engine="scripted"))
    assert "the engine `scripted` records none" in text_of(problems)


def test_routing_replay_says_nothing_of_a_model_that_is_not_whole(config):
    (Path(config.model.path) / "config.json").write_text("{")
    assert len(check_config(with_(config, train__use_r3=True))) == 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rollout__tensor_parallel": 2}, "is 2, but rollout.engine is transformers"),
        ({"rollout__spares": 1}, "is 1, but rollout.engine is transformers"),
        ({"rollout__hosts_per_replica": 2}, "is 2, but rollout.engine is transformers"),
        ({"rollout__engine": "sglang", "data__media_key": "images"}, "takes text only"),
        (
            {"rollout__engine": "sglang", "rollout__chunk_tokens": 8, "train__use_r3": True},
            "tells the experts of a sample",
        ),
    ],
)
def test_what_only_some_engines_can_do_is_refused_of_others(config, values, says):
    assert says in text_of(check_config(with_(config, **values)))


def sglang(config, **values):
    return with_(config, rollout__engine="sglang", **values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rollout__tensor_parallel": 4, "rollout__hosts_per_replica": 2}, ""),
        (
            {"rollout__tensor_parallel": 4, "rollout__hosts_per_replica": 3},
            "is 3, which does not divide rollout.tensor_parallel, 4",
        ),
        (
            {"rollout__tensor_parallel": 2, "rollout__hosts_per_replica": 2, "rollout__spares": 1},
            "is 2, but rollout.spares is 1",
        ),
        (
            {
                "rollout__tensor_parallel": 2,
                "rollout__hosts_per_replica": 2,
                "run__colocate": True,
                "run__max_staleness": 0,
                "run__mode": "async_on_policy",
            },
            "is 2, but trainer and rollouts take turns",
        ),
    ],
)
def test_a_replica_over_hosts_that_cannot_be_is_refused(config, values, says):
    found = text_of(check_config(sglang(config, **values)))
    assert says in found
    assert bool(found) is bool(says)


def test_an_interpreter_without_sglang_is_named(config, tmp_path):
    python = tmp_path / "python"
    for script, says in (("exit 1", "has no SGLang"), ("exit 0", "")):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        found = text_of(list(sglang_problems(sglang(config, rollout__sglang_python=str(python)), str)))
        assert says in found
    missing = sglang(config, rollout__sglang_python=str(tmp_path / "nowhere"))
    assert "cannot be run" in text_of(list(sglang_problems(missing, str)))


@pytest.mark.parametrize(
    ("gpus", "values", "says"),
    [
        (0, {}, ""),
        (0, {"rollout__deterministic": True}, "needs a GPU"),
        (4, {"rollout__tensor_parallel": 2}, ""),
        (2, {"rollout__tensor_parallel": 4}, "is 4, and this machine has 2 GPUs"),
        (2, {"rollout__tensor_parallel": 4, "rollout__hosts_per_replica": 2}, ""),
        (
            1,
            {"rollout__tensor_parallel": 4, "rollout__hosts_per_replica": 2},
            "is 4 over 2 hosts, and this machine has 1 GPUs",
        ),
        (3, {"rollout__spares": 1}, ""),
        (3, {"rollout__spares": 1, "rollout__replicas": 2}, "there is room for 0 beside 2 replicas"),
        (2, {"rollout__spares": 2, "rollout__device": "cuda:1"}, ""),
        (2, {"rollout__deterministic": True, "rollout__chunk_tokens": 8}, "does not go on with a sample"),
    ],
)
def test_gpus_that_are_not_there_are_named(config, monkeypatch, gpus, values, says):
    monkeypatch.setattr("launcher.sglang_checks.host_gpus", lambda: gpus)
    values = {"rollout__sglang_python": "true", **values}
    found = text_of(list(sglang_problems(sglang(config, **values), str)))
    assert says in found
    assert bool(found) is bool(says)


def test_another_engine_needs_no_sglang(config):
    assert not list(sglang_problems(config, str))


def test_streaming_is_refused_where_the_whole_batch_must_be_known(config):
    streams = with_(config, train__stream_micro_batches=True, queue__on_short_batch="skip")
    assert check_config(streams) == []
    (problem,) = check_config(with_(streams, train__filter_groups="zero_variance"))
    assert "on_short_batch" in str(problem)
    (problem,) = check_config(
        with_(config, train__stream_micro_batches=True, train__updates_per_batch=2, train__micro_batch_size=1)
    )
    assert "updates_per_batch to 1" in str(problem)
