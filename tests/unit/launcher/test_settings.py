"""A configuration is read from file, overrides and flags, and every problem in it is named."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import RefusedError, report
from launcher.fields import SECTIONS, parse, wanted
from launcher.settings import load, read
from launcher.toml import to_toml
from relax_actor.config import Config, DataConfig, ModelConfig
from relax_actor.errors import ConfigError

NEEDED = ("model.path=m", "data.path=d.jsonl")


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str, *, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(*overrides: str, path: Path | None = None, **flags: str) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        load(path, [*NEEDED, *overrides] if path is None else overrides, flags)
    return caught.value


def test_defaults_stand_where_nothing_is_said():
    config = load(None, NEEDED)

    assert config.train.learning_rate == 1e-6
    assert config.rollout.samples_per_prompt == 8


def test_flags_win_over_overrides_and_overrides_over_the_file(toml):
    path = toml('[run]\nsteps = 1\n[model]\npath = "m"\n[data]\npath = "d"\n[train]\nlearning-rate = 1\n')

    assert load(path).run.steps == 1
    assert load(path, ["run.steps=2"]).run.steps == 2
    assert load(path, ["run.steps=2"], {"--steps": "3", "--mode": None}).run.steps == 3
    assert load(path).train.learning_rate == 1.0


def test_paths_of_a_file_are_relative_to_it_and_others_to_the_current_folder(toml, tmp_path, monkeypatch):
    path = toml('[model]\npath = "m"\n[data]\npath = "/abs/d"\n[run]\nresume = "auto"\n')
    monkeypatch.chdir("/")

    config = load(path, ["data.prefix-path=p.txt"], {"--resume": "old"})

    assert config.model.path == str(tmp_path / "m")
    assert config.data.path == "/abs/d"
    assert config.data.prefix_path == "/p.txt"
    assert config.run.resume == "/old"
    assert load(path).run.resume == "auto"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.learning_rate=1e-6", 1e-6),
        ("train.learning-rate= 3 ", 3.0),
        ("rollout.max_in_flight=16", 16),
        ("data.shuffle=false", False),
        ("data.shuffle=True", True),
        ("run.name=1", "1"),
        ('rollout.stop=["\\n", "a,b"]', ("\n", "a,b")),
        ("rollout.stop=x, y", ("x", "y")),
        ("rollout.stop=", ()),
        ("rollout.stop_token_ids=1,2", (1, 2)),
        ("rollout.stop_token_ids=[1]", (1,)),
        ("train.adam_betas=0.8,0.9", (0.8, 0.9)),
        ("train.frozen=^embed", ("^embed",)),
    ],
)
def test_an_override_is_typed_by_its_field(override, expected):
    config = load(None, [*NEEDED, override])

    section, _, rest = override.partition(".")
    assert getattr(getattr(config, section), rest.partition("=")[0].replace("-", "_")) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=abc", '`train.learning_rate` must be a number, got "abc"'),
        ("rollout.samples_per_prompt=2.5", '`rollout.samples_per_prompt` must be a whole number, got "2.5"'),
        ("data.shuffle=perhaps", '`data.shuffle` must be true or false, got "perhaps"'),
        ("train.adam_betas=0.9", "must be a list of 2 numbers"),
        ("rollout.stop_token_ids=[1.5]", "must be a list of whole numbers"),
        ("rollout.stop_token_ids=[", "must be a list of whole numbers"),
        ("run.mode=async_of_policy", "did you mean `async_off_policy`?"),
        ("run.max_stalness=1", "did you mean `run.max_staleness`?"),
        ("train.max_staleness=1", "did you mean `run.max_staleness`?"),
        (
            "train.samples_per_promt=1",
            "did you mean `rollout.samples_per_prompt` or `eval.samples_per_prompt`?",
        ),
        ("tran.learning_rate=1", "did you mean `train`?"),
        ("zzz.learning_rate=1", "the sections are run, model"),
        ("queue.zzzzzzzz=1", "[queue] has storage_path"),
        ("learning_rate=1", "for example train.learning_rate=VALUE"),
        ("max_stalness=1", "for example run.max_staleness=VALUE"),
        ("zzzzzzzz=1", "for example train.learning_rate=VALUE"),
        ("model.path=", '`model.path` must be a path, got ""'),
        ("queue.storage_path= ", '`queue.storage_path` must be a path, got " "'),
        ("data.prefix_path=a\0b", "`data.prefix_path` must be a path"),
        ("whatever", "is not of the form section.key=value"),
    ],
)
def test_a_wrong_override_is_refused_with_what_was_meant(override, message):
    assert message in report(refusal(override))


def test_every_problem_is_reported_with_file_and_line(toml):
    path = toml(
        "[run]\nsteps = 2.5\n\n[model]\npath = 3\n[trian]\nx = 1\n"
        '[train]\nlearning_rate = "1e-6"\nlearning_rat = 1\n[data]\n"max-prompt-tokens" = true\n'
    )

    text = report(refusal(path=path))

    assert f"`run.steps ({path}:2)` must be a whole number, got 2.5" in text
    assert f"`model.path ({path}:5)` must be text, got 3" in text
    assert f"`trian ({path}:6)` is not a section\n\nhint: did you mean `train`?" in text
    assert f"`train.learning_rate ({path}:9)` must be a number" in text
    assert "write it without quotes: 1e-6" in text
    assert f"`train.learning_rat ({path}:10)` is not a setting" in text
    assert f"`data.max_prompt_tokens ({path}:12)` must be a whole number, got true" in text
    assert "`data.path` is required\n\nhint: give --dataset PATH" in text
    assert text.count("error:") == 7


def test_dotted_keys_and_inline_tables_have_lines_too(toml):
    path = toml('model = {path = 3}\ndata.path = 4\nrun = 5\n[[train]]\nx = 1\n[eval]\nevery = "x"\n')

    text = report(refusal(path=path))

    assert f"`model.path ({path}:1)`" in text
    assert f"`data.path ({path}:2)`" in text
    assert f"`run ({path}:3)` is a section, not a value; got 5" in text
    assert f"`train ({path}:4)` is a section, not a value" in text


def test_text_that_is_not_toml_is_refused_with_its_place(toml, tmp_path):
    assert f"`{tmp_path}/run.toml:2:5` is not TOML: " in str(refusal(path=toml("[run]\nx = = 1\n")))


def test_a_missing_or_unreadable_file_is_refused(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"[run]\nname = '\xff'\n")

    assert f"`{tmp_path}/no.toml` does not exist" in str(refusal(path=tmp_path / "no.toml"))
    assert "cannot be read: Is a directory" in str(refusal(path=tmp_path))
    assert "is not TOML: 'utf-8'" in str(refusal(path=tmp_path / "latin.toml"))


def test_a_byte_order_mark_is_fine(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b'\xef\xbb\xbf[model]\r\npath = "m"\r\n[data]\r\npath = "d"\r\n')

    assert load(path).model.path == str(tmp_path / "m")


def test_on_policy_means_staleness_zero():
    assert load(None, [*NEEDED, "run.mode=async_on_policy"]).run.max_staleness == 0
    assert load(None, [*NEEDED, "run.mode=async_on_policy", "run.max_staleness=0"]).run.max_staleness == 0
    assert load(None, [*NEEDED, "run.max_staleness=4"]).run.max_staleness == 4


def test_mode_and_staleness_that_contradict_are_refused():
    on_policy = refusal("run.max_staleness=2", **{"--mode": "async_on_policy"})

    assert "`run.max_staleness` is 2, but `--mode` is async_on_policy, which means 0" in str(on_policy)
    assert "needs 1 or more" in str(refusal("run.max_staleness=0"))
    assert "needs 1 or more" in str(refusal("run.max_staleness=0", "run.mode=async_off_policy"))


def test_the_default_micro_batch_shrinks_to_a_small_batch_but_a_given_one_does_not():
    assert load(None, [*NEEDED, "train.global_batch_size=16"]).train.micro_batch_size == 16
    assert load(None, [*NEEDED, "train.global_batch_size=256"]).train.micro_batch_size == 32
    small = [*NEEDED, "train.global_batch_size=16", "train.updates_per_batch=4"]
    assert load(None, small).train.micro_batch_size == 4
    assert load(None, [*small, "train.micro_batch_size=64"]).train.micro_batch_size == 64


def test_a_reward_module_is_looked_for_beside_the_configuration(toml, tmp_path, monkeypatch):
    path = toml('[model]\npath = "m"\n[data]\npath = "d"\n[reward]\nfunction = "mine:reward"\n')
    monkeypatch.chdir("/")

    assert load(path).run.user_path == str(tmp_path)
    assert load(path, ["run.user_path=x"]).run.user_path == "/x"
    assert load(None, [*NEEDED, "reward.function=a:b"]).run.user_path == "/"
    assert load(None, NEEDED).run.user_path == ""


def test_who_said_what_is_remembered(toml):
    settings = read(toml('[model]\npath = "m"\n'), ["data.path=d"], {"--steps": "3"})

    assert settings.where("model.path").endswith("run.toml:2)")
    assert settings.where("data.path") == "data.path"
    assert settings.where("run.steps") == "--steps"
    assert settings.where("train.learning_rate") == "train.learning_rate"


def test_a_refusal_is_a_config_error_and_has_exit_code_2():
    error = refusal("run.steps=x")

    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    assert error.where == "run.steps"


def test_every_field_has_words_for_its_type():
    for section, fields in SECTIONS.items():
        for key, field in fields.items():
            assert "<class" not in wanted(field.type), f"{section}.{key}"


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.floats(allow_nan=False),
    st.lists(st.text(max_size=3)),
)
def test_a_written_configuration_reads_back_the_same(tmp_path_factory, name, rate, stop):
    stop = [text for text in stop if text.isprintable()]
    config = Config(model=ModelConfig(path="/m"), data=DataConfig(path="/d", system_prompt=name))
    train = msgspec.structs.replace(config.train, learning_rate=rate)
    rollout = msgspec.structs.replace(config.rollout, stop=tuple(stop))
    eval_ = msgspec.structs.replace(config.eval, path="/e")
    run = msgspec.structs.replace(config.run, dir="/runs/{name}")
    config = msgspec.structs.replace(config, train=train, rollout=rollout, eval=eval_, run=run)
    path = tmp_path_factory.mktemp("toml") / "resolved.toml"
    path.write_text(to_toml(config), encoding="utf-8", newline="")

    assert load(path) == config


def test_any_text_is_text():
    assert parse("  x ", str) == "  x "


def test_a_table_of_texts_is_read_from_a_file_and_from_an_override_and_written_back(toml, tmp_path):
    text = '[model]\npath = "m"\n[data]\npath = "d"\n[rollout]\nsglang_env = { A = "1", "b.c" = "x\\"y" }\n'
    config = load(toml(text))
    assert config.rollout.sglang_env == {"A": "1", "b.c": 'x"y'}
    assert load(toml(to_toml(config), name="again.toml")).rollout == config.rollout
    assert load(None, [*NEEDED, 'rollout.sglang_env={"A": "2"}']).rollout.sglang_env == {"A": "2"}
    assert "must be a table of texts" in report(refusal("rollout.sglang_env=A"))
