"""Prompts and text: encoding, decoding and the tokens that end a sample, on a real tokenizer."""

import json
import shutil

import pytest

from relax_actor.config import DataConfig, RolloutConfig
from relax_actor.data.dataset import Dataset, Row
from relax_actor.data.template import PromptEncoder, text_of
from relax_actor.errors import ConfigError, DatasetError

NEWLINE, END = 99, 2
ROLES = (100, 101)  # "user\n" and "assistant\n"


def row(prompt, origin="rows.jsonl:7"):
    return Row(prompt=prompt, label="", extra={}, origin=origin)


@pytest.fixture
def make(tiny_model):
    """Make an encoder of the tiny model."""

    def make(folder=None, **options):
        return PromptEncoder(folder or tiny_model.path, DataConfig(path="rows.jsonl", **options))

    return make


@pytest.fixture
def changed(tiny_model, tmp_path):
    """Copy the tiny model with values of a JSON file changed (None removes)."""

    def changed(name, **values):
        folder = tmp_path / "model"
        if not folder.exists():
            shutil.copytree(tiny_model.path, folder)
        content = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
        return folder

    return changed


def test_text_is_encoded_as_it_is_and_comes_back(make):
    encoder = make()

    tokens = encoder.encode(row("reverse abc\n"))

    assert len(tokens) == len("reverse abc\n")
    assert tokens[-1] == NEWLINE
    assert encoder.decode(tokens) == "reverse abc\n"


def test_a_prefix_file_opens_every_prompt(make, tmp_path):
    (tmp_path / "prefix.txt").write_bytes(b"1 + 1 = 2\r\n")
    encoder = make(prefix_path=str(tmp_path / "prefix.txt"))

    assert len(encoder.encode(row("2 + 2 ="))) == len("1 + 1 = 2\r\n2 + 2 =")
    assert encoder.decode(encoder.encode(row("2 + 2 ="))).startswith("1 + 1 = 2")


def test_chat_puts_one_user_turn_through_the_template(make):
    tokens = make(template="chat").encode(row("hi"))

    assert tokens == [
        1,
        100,
        76,
        77,
        2,
        NEWLINE,
        1,
        101,
    ]  # <|im_start|> user\n h i <|im_end|> \n <|im_start|> assistant\n


def test_a_system_prompt_comes_first_unless_the_row_has_its_own(make):
    encoder = make(template="chat", system_prompt="be brief")
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]

    assert encoder.decode(encoder.encode(row("hi"))).startswith("system\nbe brief\nuser\nhi")
    assert encoder.decode(encoder.encode(row(own))).startswith("system\nmine\nuser\nhi")


def test_a_prefix_opens_the_first_user_turn_of_a_chat(make, tmp_path):
    (tmp_path / "prefix.txt").write_text("PRE ")
    encoder = make(template="chat", prefix_path=str(tmp_path / "prefix.txt"))
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]

    assert encoder.decode(encoder.encode(row(turns))) == "user\nPRE a\nassistant\nb\nuser\nc\nassistant\n"
    assert turns[0]["content"] == "a"


@pytest.mark.parametrize("text", ["\ud83d", "a\0b", "\u202e", "\U0001f600", "x\ude00\ud83dy"])
def test_no_text_stops_the_encoder(make, text):
    """BUGCASES 9."""
    assert make().encode(row(text))


def test_special_tokens_are_left_out_of_text(make):
    assert make().decode([1, 69, 70, END, 0]) == "ab"


def test_a_prompt_that_is_too_long_is_refused_with_lengths_and_origin(make):
    """BUGCASES 4 and 8: the context must have room for one new token."""
    encoder = make()

    assert len(encoder.encode(row("x" * 511))) == 511
    with pytest.raises(DatasetError) as caught:
        encoder.encode(row("x" * 512))
    assert str(caught.value) == (
        "`rows.jsonl:7` has a prompt of 512 tokens, more than 511 (context 512, data.max_prompt_tokens 0)"
    )


def test_a_limit_beyond_the_context_is_the_context(make):
    assert make(max_prompt_tokens=10).max_prompt_tokens == 10
    assert make(max_prompt_tokens=9999).max_prompt_tokens == 511


def test_rows_that_do_not_fit_are_bad_rows(make):
    dataset = Dataset(rows=[row("abc"), row("x" * 30, "f:2"), row("d")], skipped=["before"])

    kept = make(max_prompt_tokens=10, on_bad_row="skip").encodable(dataset)

    assert [r.prompt for r in kept.rows] == ["abc", "d"]
    assert [reason.split(",")[0] for reason in kept.skipped] == ["before", "`f:2` has a prompt of 30 tokens"]
    with pytest.raises(DatasetError, match="f:2"):
        make(max_prompt_tokens=10).encodable(dataset)
    with pytest.raises(DatasetError, match="no usable row"):
        make(max_prompt_tokens=1, on_bad_row="skip").encodable(Dataset(rows=[row("abc")], skipped=[]))


def test_padding_never_is_in_a_prompt(make):
    """BUGCASES 19."""
    encoder = make()

    assert 0 not in encoder.encode(row("a")) + encoder.encode(row("a" * 300))
    with pytest.raises(DatasetError, match=r"padding token `<\|pad\|>`"):
        encoder.encode(row("a<|pad|>b"))


def test_padding_that_is_also_an_end_token_is_legal_in_a_chat(make, changed):
    """BUGCASES 17: models whose pad is their end token close every turn with it."""
    folder = changed("tokenizer_config.json", pad_token="<|im_end|>")  # noqa: S106 - no password

    assert END in make(folder, template="chat").encode(row("hi"))


def test_all_end_tokens_of_the_model_end_a_sample(make, changed):
    changed("generation_config.json", eos_token_id=[2, 50])
    folder = changed("config.json", eos_token_id=51)

    assert make(folder).stop_token_ids(RolloutConfig()) == (2, 50, 51)


def test_configured_strings_and_ids_end_a_sample_too(make):
    """A letter does in whichever token it is."""
    config = RolloutConfig(stop=("\n", "<|im_start|>"), stop_token_ids=(7,))

    assert make().stop_token_ids(config) == (1, END, 7, NEWLINE, *ROLES)
    assert make().stop_strings(config) == ()


def test_a_string_that_may_be_spread_over_tokens_is_looked_for_in_the_text(make):
    config = RolloutConfig(stop=("ab", "\n", "<|im_end|>", "c", " "))

    assert make().stop_strings(config) == ("ab", " ")
    assert make().stop_token_ids(config) == (END, *make().encode(row("c")), NEWLINE, *ROLES)


@pytest.mark.parametrize(
    ("stop", "fact"),
    [("", "empty text, which would end every sample"), ("\u00e4", "has 'ä', which the tokenizer has no")],
)
def test_a_stop_string_that_no_text_has_is_refused(make, stop, fact):
    with pytest.raises(ConfigError, match=fact):
        make().stop_strings(RolloutConfig(stop=("a", stop)))


def test_more_strings_than_sglang_takes_are_refused_for_it_alone(make):
    stop = tuple(f"a{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456")
    assert make().stop_strings(RolloutConfig(stop=stop)) == stop
    with pytest.raises(ConfigError, match=r"has 33 strings .* SGLang takes 32"):
        make().stop_strings(RolloutConfig(stop=stop, engine="sglang"))


@pytest.mark.parametrize(("token", "fact"), [(102, "has 102, but ids end at 101"), (-1, "has -1")])
def test_a_stop_token_outside_the_vocabulary_is_refused(make, token, fact):
    with pytest.raises(ConfigError, match=fact):
        make().stop_token_ids(RolloutConfig(stop_token_ids=(token,)))


def test_the_text_of_tokens_has_the_special_ones(tiny_model):
    assert text_of(tiny_model.path)([1, 76, 2]) == "<|im_start|>h<|im_end|>"


def test_values_of_a_model_with_several_modalities_are_found_in_its_text_model(make, changed):
    folder = changed(
        "config.json",
        max_position_embeddings=None,
        text_config={"max_position_embeddings": 64},
        eos_token_id=None,
    )

    assert make(folder).context == 64


def test_a_prompt_without_tokens_is_refused(make):
    with pytest.raises(DatasetError, match="without any token"):
        make().encode(row(""))


def test_what_a_chat_template_refuses_is_a_bad_row(make, changed):
    folder = changed("config.json")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")

    with pytest.raises(DatasetError, match="refused by the chat template: roles must alternate"):
        make(folder, template="chat").encode(row("hi"))


def test_chat_without_a_chat_template_is_a_configuration_error(make, changed):
    folder = changed("config.json")
    (folder / "chat_template.jinja").unlink()

    with pytest.raises(ConfigError, match="has no chat template"):
        make(folder, template="chat")


def test_a_folder_without_tokenizer_or_prefix_is_a_configuration_error(make, tmp_path, changed):
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        make(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.prefix_path. cannot be read"):
        make(prefix_path=str(tmp_path / "none.txt"))
    folder = changed("config.json")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken generation_config\.json"):
        make(folder)
    (folder / "generation_config.json").unlink()
    assert make(folder).stop_token_ids(RolloutConfig()) == (END,)
