"""Datasets: what is read, and how a row that cannot be used is named."""

import contextlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actor.config import DataConfig
from relax_actor.data.dataset import load_dataset
from relax_actor.errors import DatasetError

GOOD = b'{"prompt": "1 + 1 =", "label": "2"}\n'


@pytest.fixture
def load(tmp_path):
    """Load bytes as a dataset."""

    def load(content, **options):
        (tmp_path / "rows.jsonl").write_bytes(content)
        return load_dataset(DataConfig(path=str(tmp_path / "rows.jsonl"), **options))

    return load


@pytest.fixture
def refusal(load, tmp_path):
    """Load bytes that must be refused; return the message without the folder."""

    def refusal(content, **options):
        with pytest.raises(DatasetError) as caught:
            load(content, **options)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return refusal


def test_a_row_keeps_prompt_label_other_columns_and_origin(load, tmp_path):
    (row,) = load(b'{"prompt": "p", "label": "l", "level": [1, {"a": null}]}\n').rows

    assert (row.prompt, row.label, row.extra) == ("p", "l", {"level": [1, {"a": None}]})
    assert row.origin == f"{tmp_path}/rows.jsonl:1"


def test_field_names_are_configurable_and_a_label_is_not_needed(load):
    (row,) = load(b'{"question": "q", "answer": "a"}', prompt_key="question", label_key="").rows

    assert (row.prompt, row.label, row.extra) == ("q", "", {"answer": "a"})


@pytest.mark.parametrize(
    ("text", "label"), [("2", "2"), ("-2.5", "-2.5"), ("100000000000000000000", "1" + "0" * 20)]
)
def test_a_label_that_is_a_number_becomes_its_json_text(load, text, label):
    assert load(f'{{"prompt": "p", "label": {text}}}'.encode()).rows[0].label == label


def test_byte_order_mark_crlf_and_blank_lines_are_fine(load, tmp_path):
    rows = load(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b"\r\n  \n" + GOOD.rstrip()).rows

    assert [row.origin.removeprefix(f"{tmp_path}/") for row in rows] == ["rows.jsonl:1", "rows.jsonl:4"]


@pytest.mark.parametrize(
    "text", ["\\ud83d", "a\\u0000b", "\\u202ertl", "\U0001f600", "\u2028line\u0085separators", "x" * 2**20]
)
def test_any_text_is_kept_as_it_is(load, text):
    """BUGCASES 9: half a surrogate pair, NUL, right-to-left marks, emoji, a megabyte."""
    content = f'{{"prompt": "<{text}>", "label": "l"}}\n'.encode()

    expected = text.replace("\\ud83d", "\ud83d").replace("\\u0000", "\0").replace("\\u202e", "\u202e")
    assert load(content).rows[0].prompt == f"<{expected}>"


def test_a_missing_prompt_names_line_field_and_what_is_there(refusal):
    """BUGCASES 7."""
    assert refusal(GOOD + GOOD + b'{"promt": "x", "label": "1"}') == (
        "`rows.jsonl:3` has no field `prompt`; it has: `promt`, `label`\n\n"
        "hint: set data.prompt_key to the name of the field, such as `promt`"
    )


@pytest.mark.parametrize(
    ("row", "fact"),
    [
        (b"{}", "has no field `prompt`; it has: none"),
        (b"[1]", "is a list, not an object"),
        (b'"text"', "is text, not an object"),
        (b"3", "is a number, not an object"),
        (b"{'prompt': 1}", "is not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b'{"prompt": "p", "label": NaN}', "is not JSON: NaN is no JSON number"),
        (b'{"prompt": "\xff"}', "is not UTF-8: byte 12 is 0xff"),
        (b'{"prompt": ' + b"[" * 100_000, "is nested too deeply"),
        (b'{"prompt": null, "label": "1"}', "has null in field `prompt`, where text is wanted"),
        (b'{"prompt": 6, "label": "1"}', "has a number in field `prompt`, where text is wanted"),
        (b'{"prompt": {}, "label": "1"}', "has an object in field `prompt`, where text is wanted"),
        (b'{"prompt": ["a"], "label": "1"}', "has a list in field `prompt`, where text is wanted"),
        (b'{"prompt": " \\n", "label": "1"}', "has an empty prompt in field `prompt`"),
        (b'{"prompt": "p"}', "has no field `label`; it has: `prompt`"),
        (
            b'{"prompt": "p", "label": null}',
            "has null in field `label`, where text or a finite number is wanted",
        ),
        (b'{"prompt": "p", "label": true}', "has a boolean in field `label`"),
        (b'{"prompt": "p", "label": 1e999}', "has a number in field `label`, where text or a finite number"),
        (
            b'{"prompt": "p", "label": "", "n": [{"m": 18446744073709551616}]}',
            "integer beyond 64 bits in field `n`",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(refusal, row, fact):
    message = refusal(GOOD + row + b"\n")

    assert message.startswith("`rows.jsonl:2` ")
    assert fact in message


def test_bad_rows_are_skipped_with_a_reason_each_where_that_is_configured(load):
    dataset = load(GOOD + b"oops\n" + GOOD + b'{"prompt": null}\n', on_bad_row="skip")

    assert [row.origin.rsplit(":")[-1] for row in dataset.rows] == ["1", "3"]
    assert [
        "rows.jsonl:2` is not JSON" in dataset.skipped[0],
        "rows.jsonl:4` has null" in dataset.skipped[1],
    ] == [True] * 2
    assert len(dataset.skipped) == 2


def test_a_file_without_a_usable_row_is_an_error(refusal):
    assert "`rows.jsonl` is empty" in refusal(b"\n \r\n")
    assert "`rows.jsonl` has no usable row: all 2 were skipped, the first because" in refusal(
        b"1\n2\n", on_bad_row="skip"
    )


@pytest.mark.parametrize(("name", "fact"), [("none.jsonl", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path, name, fact):
    with pytest.raises(DatasetError, match=f"cannot be read: {fact}"):
        load_dataset(DataConfig(path="unused"), path=str(tmp_path / name))


def test_a_chat_row_may_bring_messages_or_text(load):
    content = b'{"prompt": [{"role": "user", "content": "hi", "name": "x"}], "label": ""}\n' + GOOD

    rows = load(content, template="chat").rows

    assert [row.prompt for row in rows] == [[{"role": "user", "content": "hi"}], "1 + 1 ="]


@pytest.mark.parametrize(
    ("messages", "fact"),
    [
        (b"[]", "has an empty list of messages"),
        (b'[{"role": "user"}]', "has no message in `prompt[0]`"),
        (b'[{"role": "user", "content": "a"}, 3]', "has no message in `prompt[1]`"),
        (b'[{"role": "user", "content": ["a"]}]', "has no message in `prompt[0]`"),
        (b'[{"role": "assistant", "content": "a"}]', "has nothing to answer"),
        (b"5", "has a number in field `prompt`, where text or a list of messages is wanted"),
    ],
)
def test_messages_that_cannot_be_a_prompt_are_named(refusal, messages, fact):
    assert fact in refusal(b'{"prompt": ' + messages + b', "label": ""}', template="chat")


@given(content=st.binary(max_size=200))
def test_no_content_raises_anything_else(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)

    with contextlib.suppress(DatasetError):
        assert load_dataset(DataConfig(path=str(path), on_bad_row="skip")).rows


def test_reading_a_dataset_imports_neither_torch_nor_transformers():
    code = (
        "import sys, relax_actor.data.dataset; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_media_are_arrays_and_no_extra_column(load):
    image = b'{"pixel_values": [[0.5, 1]], "image_grid_thw": [[1, 1, 1]]}'
    line = b'{"prompt": "p", "label": "1", "image": ' + image + b"}"
    (row,) = load(line, media_key="image").rows
    assert row.extra == {}
    assert row.media["pixel_values"].dtype == "float32"
    assert row.media["pixel_values"].tolist() == [[0.5, 1.0]]
    assert row.media["image_grid_thw"].dtype == "int64"
    assert load(GOOD).rows[0].media == {}


@pytest.mark.parametrize(
    ("media", "fact"),
    [
        (b"3", "has a number in field `image`, where an object is wanted"),
        (b'{"a": [[1], [1, 2]]}', "has no array in `image.a`"),
        (b'{"a": "text"}', "has no array in `image.a`"),
        (b'{"a": [null]}', "has no array in `image.a`"),
    ],
)
def test_media_that_are_no_arrays_are_named(refusal, media, fact):
    assert fact in refusal(b'{"prompt": "p", "label": "1", "image": ' + media + b"}", media_key="image")
