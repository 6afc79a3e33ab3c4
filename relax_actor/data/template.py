"""Rows to token ids and back: the tokenizer, the prompt template and the tokens that end a sample.

Token ids are the truth of a run. A prompt is made of tokens once, here; nobody pads it and nobody makes
tokens of it again.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from relax_actor.config import DataConfig, RolloutConfig
from relax_actor.data.dataset import Dataset, Row
from relax_actor.errors import ConfigError, DatasetError

# A tokenizer is written in Rust, whose strings cannot hold half of a surrogate pair.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"

SGLANG_STOPS = 32
"""Strings that a request to SGLang may have."""

Messages = list[dict[str, str]]


class PromptEncoder:
    """Makes prompts of rows, and text of samples.

    Template `text` is the prefix file and the prompt, without special tokens. Template `chat` puts one
    user turn, or the row's messages, through the tokenizer's chat template; the system prompt comes
    first unless the row brings its own, and the prefix file opens the first user turn.

    Args:
        model_folder: a Hugging Face model folder.
        config: template, prefix, system prompt and the longest prompt.

    Attributes:
        context: tokens the model can attend to, prompt and response together.
        max_prompt_tokens: longer prompts are bad rows; leaves room for one token at least.
        vocab_size: token ids are below it.

    Raises:
        ConfigError: no usable tokenizer, no chat template where one is wanted, or no prefix file.
    """

    def __init__(self, model_folder: Path, config: DataConfig) -> None:
        self._folder, self._config = model_folder, config
        self._tokenizer = _load_tokenizer(model_folder)
        self._model = _read_json(model_folder / "config.json")
        self._prefix = _read_prefix(config.prefix_path)
        self.vocab_size = max(len(self._tokenizer), self._model_value("vocab_size", 0))
        self.context: int = self._model_value("max_position_embeddings", self._tokenizer.model_max_length)
        self.max_prompt_tokens = min(config.max_prompt_tokens or self.context - 1, self.context - 1)
        self._eos = self._end_tokens()
        if config.template == "chat" and not self._tokenizer.chat_template:
            raise ConfigError(
                "data.template",
                f"is `chat`, but the tokenizer of {model_folder} has no chat template",
                "use `text`, or a model tuned for chat",
            )

    def encode(self, row: Row) -> list[int]:
        """Return the prompt's token ids, never padded, at least one.

        Raises:
            DatasetError: too long for the model or the limit, not accepted by the chat template, or
                with a padding token in it; names the row's origin.
        """
        tokens: list[int] = self._tokenizer.encode(_encodable(self._text(row)), add_special_tokens=False)
        if not tokens:
            raise DatasetError(row.origin, "has a prompt without any token")
        if len(tokens) > self.max_prompt_tokens:
            raise DatasetError(row.origin, self._too_long(len(tokens)))
        self._check_padding(tokens, row.origin)
        return tokens

    def encodable(self, dataset: Dataset) -> Dataset:
        """Keep the rows that `encode` accepts; the others are bad rows as `data.on_bad_row` has it.

        Raises:
            DatasetError: a bad row and `on_bad_row` is `error`, or none is left.
        """
        rows, skipped = [], list(dataset.skipped)
        for row in dataset.rows:
            try:
                self.encode(row)
                rows.append(row)
            except DatasetError as error:
                if self._config.on_bad_row == "error":
                    raise
                skipped.append(str(error))
        if not rows:
            raise DatasetError(self._config.path, f"has no usable row; the last because {skipped[-1]}")
        return Dataset(rows=rows, skipped=skipped)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special tokens; bytes that are no character become U+FFFD."""
        text: str = self._tokenizer.decode(
            list(map(int, tokens)), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def stop_token_ids(self, config: RolloutConfig) -> tuple[int, ...]:
        """Return the tokens that end a sample: the model's own end tokens and the configured ones.

        The model's own are those of generation_config.json, config.json and the tokenizer together. A
        stop string is among them as the special token that it is, or as all tokens with it in their text if
        it cannot be spread over several; `stop_strings` are the others.

        Raises:
            ConfigError: an id outside the vocabulary.
        """
        strings = [token for text in config.stop for token in self._tokens_with(text)]
        for token in config.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ConfigError(
                    "rollout.stop_token_ids", f"has {token}, but ids end at {self.vocab_size - 1}"
                )
        return tuple(sorted({*self._eos, *strings, *config.stop_token_ids}))

    def stop_strings(self, config: RolloutConfig) -> tuple[str, ...]:
        """Return the stop strings that are looked for in the text of samples.

        Raises:
            ConfigError: a stop string that is empty, or that no text of this model has, or too many.
        """
        for text in config.stop:
            self._check_stop(text)
        found = tuple(text for text in config.stop if not self._tokens_with(text))
        if config.engine == "sglang" and len(found) > SGLANG_STOPS:
            fact = f"has {len(found)} strings of more than a token, and SGLang takes {SGLANG_STOPS}"
            raise ConfigError("rollout.stop", fact)
        return found

    def _text(self, row: Row) -> str:
        if self._config.template == "text":
            return self._prefix + str(row.prompt)
        try:
            text = self._tokenizer.apply_chat_template(
                self._messages(row.prompt), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's author: it raises what it likes
            raise DatasetError(row.origin, f"is refused by the chat template: {error}") from error
        return str(text)

    def _messages(self, prompt: str | Messages) -> Messages:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = _prefixed(messages, self._prefix)
        if self._config.system_prompt and messages[0]["role"] != "system":
            return [{"role": "system", "content": self._config.system_prompt}, *messages]
        return messages

    def _too_long(self, tokens: int) -> str:
        return (
            f"has a prompt of {tokens} tokens, more than {self.max_prompt_tokens} "
            f"(context {self.context}, data.max_prompt_tokens {self._config.max_prompt_tokens})"
        )

    def _check_padding(self, tokens: list[int], origin: str) -> None:
        """Refuse padding written out in a prompt; where it is also an end token it is legal in a chat."""
        pad = self._tokenizer.pad_token_id
        if pad is not None and pad not in self._eos and pad in tokens:
            raise DatasetError(origin, f"has the padding token `{self._tokenizer.pad_token}` in its prompt")

    def _check_stop(self, text: str) -> None:
        tokens = self._tokenizer.encode(_encodable(text), add_special_tokens=False)
        if not text:
            raise ConfigError("rollout.stop", "has an empty text, which would end every sample at once")
        if not tokens or self._tokenizer.unk_token_id in tokens:
            raise ConfigError("rollout.stop", f"has {text!r}, which the tokenizer has no tokens for")

    def _tokens_with(self, text: str) -> Collection[int]:
        """Return all tokens that bring a text; none where several may bring it together."""
        if text in self._special:
            return (self._special[text],)
        if len(text) != 1 or not text.isascii() or text == " ":  # some tokenizers drop a first space
            return ()
        return [token for token, piece in enumerate(self._pieces) if text in piece]

    @cached_property
    def _special(self) -> dict[str, int]:
        return {str(piece): token for token, piece in self._tokenizer.added_tokens_decoder.items()}

    @cached_property
    def _pieces(self) -> list[str]:
        """The text of every token."""
        pieces: list[str] = self._tokenizer.batch_decode(
            [[token] for token in range(len(self._tokenizer))], clean_up_tokenization_spaces=False
        )
        return pieces

    def _end_tokens(self) -> frozenset[int]:
        generation = _read_json(self._folder / "generation_config.json")
        found: set[int] = set()
        for value in (
            generation.get("eos_token_id"),
            self._model_value("eos_token_id", None),
            self._tokenizer.eos_token_id,
        ):
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        return frozenset(found)

    def _model_value(self, key: str, default: Any) -> Any:
        """Read from config.json; models of several modalities keep the text model's values one deeper."""
        value = self._model.get(key)
        if value is None:
            value = (self._model.get("text_config") or {}).get(key)
        return default if value is None else value


def text_of(model_folder: Path) -> Callable[[Sequence[int]], str]:
    """Return what makes text of tokens, special ones included.

    Raises:
        ConfigError: no usable tokenizer.
    """
    tokenizer = _load_tokenizer(model_folder)
    return lambda tokens: str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes a second, and a dry run does without

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model.path", f"has no usable tokenizer in {folder}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; a file that is not there has no keys."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError("model.path", f"has a broken {path.name}: {error}") from error
    return value


def _read_prefix(path: str) -> str:
    try:
        return Path(path).read_bytes().decode() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("data.prefix_path", f"cannot be read: {error}") from error


def _prefixed(messages: Messages, prefix: str) -> Messages:
    done = list(messages)
    for index, message in enumerate(messages if prefix else []):
        if message["role"] == "user":
            done[index] = {**message, "content": prefix + message["content"]}
            break
    return done


def _encodable(text: str) -> str:
    return _LONE_SURROGATE.sub(_REPLACEMENT, text)
