"""What is wrong with a run, found before any process starts; all of it, not only the first.

Whether the request makes sense and names what exists; `machine_checks` asks whether this machine can serve it
now. Each problem names its option and, where a file says it, file:line.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from launcher.fields import SECTIONS
from launcher.modelfolder import TOKENIZER_FILES, model_config, model_shape, takes_images
from launcher.modules import why_not_importable
from launcher.ranges import RANGES
from launcher.settings import is_no_path
from launcher.spread_checks import spread_problems
from launcher.turn_checks import turns
from relax_actor.config import Config
from relax_actor.data.dataset import load_dataset
from relax_actor.errors import ConfigError, DatasetError, UnsupportedRoutingError
from relax_actor.rl.routing import layout_of
from relax_actor.trainers.checkpoint import CheckpointError, CheckpointStore

Where = Callable[[str], str]
"""Turns `section.key` into what an error calls it; `Settings.where`, or `str` for the option alone."""

SHOWN_ROWS = 10
"""Bad rows of one file that are reported one by one."""


def check_config(config: Config, where: Where = str) -> list[ConfigError]:
    """Return what is wrong with a configuration and the files it names.

    Args:
        config: as `settings.read` returns it, paths absolute.
        where: what errors call an option.
    """
    ranges = list(_ranges(config, where))
    if ranges:  # divisibility of nonsense is more nonsense
        return ranges + list(_files(config, where))
    return [*_batches(config, where), *_combinations(config, where), *_files(config, where)]


def _ranges(config: Config, where: Where) -> Iterator[ConfigError]:
    for section, fields in SECTIONS.items():
        for key in fields:
            option, value = f"{section}.{key}", getattr(getattr(config, section), key)
            if isinstance(value, float) and not math.isfinite(value):
                yield ConfigError(where(option), f"must be finite, got {value}")
            elif type(value) is int and abs(value) >= 2**31:
                yield ConfigError(where(option), f"must be below 2147483648, got {value}")
            elif option in RANGES and not RANGES[option].holds(value):
                yield ConfigError(where(option), f"must be {RANGES[option].words}, got {value}")
    for pattern in config.train.frozen:
        try:
            re.compile(pattern)
        except re.error as error:
            yield ConfigError(where("train.frozen"), f"has {pattern!r}, not a regular expression: {error}")


def _batches(config: Config, where: Where) -> Iterator[ConfigError]:
    samples, batch = config.rollout.samples_per_prompt, config.train.global_batch_size
    updates, micro = config.train.updates_per_batch, config.train.micro_batch_size
    if batch % samples:
        fact = f"is {batch}, not a multiple of rollout.samples_per_prompt, which is {samples}"
        below = batch - batch % samples
        near = [str(size) for size in (below, below + samples) if size]
        hint = f"use {' or '.join(near)}, or samples_per_prompt {_or(_divisors_near(batch, samples))}"
        yield ConfigError(where("train.global_batch_size"), fact, hint)
    if batch % updates:
        fact = f"is {updates}, which does not divide train.global_batch_size, which is {batch}"
        yield ConfigError(
            where("train.updates_per_batch"), fact, f"use {_or(_divisors_near(batch, updates))}"
        )
    elif micro > batch // updates:
        fact = f"is {micro}, more than the {batch // updates} samples of one update"
        hint = f"use {_or(_divisors_near(batch // updates, micro))}; any smaller size works"
        yield ConfigError(where("train.micro_batch_size"), fact, hint)


def _streaming(config: Config, where: Where) -> Iterator[ConfigError]:
    if not config.train.stream_micro_batches:
        return
    option = where("train.stream_micro_batches")
    if config.train.updates_per_batch > 1:
        fact = f"needs the whole batch to deal it to {config.train.updates_per_batch} updates"
        yield ConfigError(option, fact, "set train.updates_per_batch to 1, or do not stream")
    if config.train.filter_groups != "none" and config.queue.on_short_batch == "skip":
        fact = (
            "trains on a batch before it is known whether it comes short, and queue.on_short_batch is `skip`"
        )
        yield ConfigError(option, fact, "use `train`, or do not stream")


def _combinations(config: Config, where: Where) -> Iterator[ConfigError]:
    samples, valid = config.rollout.samples_per_prompt, config.queue.min_valid_samples
    if valid > samples:
        fact = f"is {valid}, but a group has only {samples} samples (rollout.samples_per_prompt)"
        yield ConfigError(where("queue.min_valid_samples"), fact, f"use 1 to {samples}")
    if config.rollout.min_replicas > config.rollout.replicas:
        least, replicas = config.rollout.min_replicas, config.rollout.replicas
        fact = f"is {least}, more than rollout.replicas, which is {replicas}"
        yield ConfigError(where("rollout.min_replicas"), fact)
    if 0 < config.rollout.max_replicas < config.rollout.replicas:
        most, replicas = config.rollout.max_replicas, config.rollout.replicas
        fact = f"is {most}, fewer than rollout.replicas, which is {replicas}"
        yield ConfigError(where("rollout.max_replicas"), fact, "0 sets no bound")
    if config.queue.on_partial_timeout == "finish" and not config.rollout.chunk_tokens:
        yield ConfigError(
            where("queue.on_partial_timeout"),
            "is `finish`, but no tokens of an unfinished sample are put (rollout.chunk_tokens is 0)",
            "set rollout.chunk_tokens, for example 256, or use `drop`",
        )
    if config.train.warmup_steps > config.run.steps:
        fact = f"is {config.train.warmup_steps}, more than run.steps, which is {config.run.steps}"
        yield ConfigError(where("train.warmup_steps"), fact)
    yield from _engine(config, where)
    yield from _streaming(config, where)
    yield from turns(config, where)
    if config.eval.every and not config.eval.path:
        yield ConfigError(where("eval.every"), "needs eval.path", "give the held-out prompts, or every = 0")


def _engine(config: Config, where: Where) -> Iterator[ConfigError]:
    if config.rollout.engine != "sglang":
        for option in ("tensor_parallel", "hosts_per_replica", "spares"):
            value = getattr(config.rollout, option)
            if value != SECTIONS["rollout"][option].default:
                fact = f"is {value}, but rollout.engine is {config.rollout.engine}"
                yield ConfigError(where(f"rollout.{option}"), fact, "only the engine `sglang` has it")
        return
    yield from spread_problems(config, where)
    if config.data.media_key:
        fact = "is set, but the engine `sglang` takes text only"
        yield ConfigError(where("data.media_key"), fact, "use `transformers`")
    if config.train.use_r3 and config.rollout.chunk_tokens:
        fact = "is above 0, but SGLang tells the experts of a sample (train.use_r3) at its end only"
        yield ConfigError(where("rollout.chunk_tokens"), fact, "use 0, or `transformers`")


def _routing(config: Config, where: Where) -> Iterator[ConfigError]:
    """Ask whether model and engine have routed experts, if they are to be replayed."""
    if not config.train.use_r3:
        return
    option, off = where("train.use_r3"), "leave it out, or train one of the known models with experts"
    if config.rollout.engine == "scripted":
        yield ConfigError(option, "needs routed experts, and the engine `scripted` records none", off)
    try:
        layout_of(model_config(Path(config.model.path)))
        if takes_images(Path(config.model.path)):
            yield ConfigError(option, "is not there for models that read images", off)
    except UnsupportedRoutingError as error:
        yield ConfigError(option, f"cannot be: {error.what} {error.fact}", off)
    except ValueError:
        return  # no whole model: `_model` says so


def _files(config: Config, where: Where) -> Iterator[ConfigError]:
    yield from _model(config, where)
    yield from _routing(config, where)
    yield from _texts(config, where)
    yield from _rows(config, config.data.path, "data.path", where)
    if config.eval.path:
        yield from _rows(config, config.eval.path, "eval.path", where)
    if why := why_not_importable(config.reward.function, config.run.user_path):
        yield ConfigError(where("reward.function"), *why)


def _model(config: Config, where: Where) -> Iterator[ConfigError]:
    folder, option = Path(config.model.path), where("model.path")
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises where a name is too long
        yield ConfigError(
            option, f"is no folder: {folder}", "give a Hugging Face model folder on this machine"
        )
        return
    try:
        model_shape(folder)
        if config.data.media_key and not takes_images(folder):
            fact = f"is `{config.data.media_key}`, but the model reads text only: {folder}"
            yield ConfigError(where("data.media_key"), fact, "leave it out, or train a vision language model")
    except ValueError as error:
        yield ConfigError(option, f"is not a whole model, {folder}: {error}")
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        yield ConfigError(option, f"has no tokenizer, {folder}: none of {', '.join(TOKENIZER_FILES)}")


def _texts(config: Config, where: Where) -> Iterator[ConfigError]:
    if config.data.prefix_path:
        try:
            Path(config.data.prefix_path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            yield ConfigError(where("data.prefix_path"), f"cannot be read as text: {error}")
    if not is_no_path(config.run.resume):
        yield from _checkpoint(Path(config.run.resume), where)
    if config.run.user_path and not os.path.isdir(config.run.user_path):  # noqa: PTH112 - as above
        yield ConfigError(where("run.user_path"), f"is no folder: {config.run.user_path}")


def _checkpoint(path: Path, where: Where) -> Iterator[ConfigError]:
    try:
        CheckpointStore(path.parent).open(path)
    except CheckpointError as error:
        yield ConfigError(
            where("run.resume"), f"is no whole checkpoint: {error}", "`auto` finds the newest one"
        )


def _rows(config: Config, path: str, option: str, where: Where) -> Iterator[ConfigError]:
    """Read every row; report the bad ones one by one, and those beyond `SHOWN_ROWS` as a number."""
    lenient = msgspec.structs.replace(config.data, on_bad_row="skip")
    try:
        skipped = load_dataset(lenient, path=path).skipped
    except DatasetError as error:
        yield ConfigError(where(option), f"cannot be used: {error}")
        return
    if config.data.on_bad_row == "error":
        yield from (_row_problem(reason) for reason in skipped[:SHOWN_ROWS])
        if len(skipped) > SHOWN_ROWS:
            fact = f"has {len(skipped) - SHOWN_ROWS} more bad rows"
            yield ConfigError(path, fact, "data.on_bad_row=skip leaves bad rows out")


def _row_problem(reason: str) -> ConfigError:
    text, _, hint = reason.partition("\n\nhint: ")
    place, _, fact = text.removeprefix("`").partition("` ")
    return ConfigError(place, fact, hint)


def _divisors_near(number: int, wish: int) -> list[int]:
    """Return the divisors of `number` next below and above `wish`."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    below = [divisor for divisor in divisors if divisor <= wish][-1:]
    return below + [divisor for divisor in divisors if divisor > wish][:1]


def _or(values: Iterable[int]) -> str:
    return " or ".join(map(str, values))
