"""What `/generate` answers, checked field by field. Pure."""

import base64
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from relax_actor.engines.errors import LogitsError
from relax_actor.engines.sglang.settings import UNINIT
from relax_actor.errors import PartialRolloutFormatError
from relax_actor.ids import GroupId, PolicyVersion, SampleIndex
from relax_actor.protocol import FinishReason

Key = tuple[GroupId, SampleIndex]

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}

_NUMBERS = {float, int}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens of an answer some weights have sampled."""

    version: str
    start: int
    end: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or an event of one that is a stream."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason | None  # None in the middle of a stream
    weight_version: str  # of the server when it said this
    spans: tuple[Span, ...] = ()  # of all tokens of the request, at its end
    cached_tokens: int = 0  # of prompt and prefix, how many were not computed
    message: str = ""  # why it was aborted
    routes: str = ""  # base64 of int32 [prompt + tokens - 1, layers, top_k]


def parse(answer: Any, key: Key, *, is_event: bool = False) -> Answer:
    """Check an answer.

    Args:
        answer: as it came.
        key: whose it is.
        is_event: whether it is one of a stream, which need not be the last.

    Raises:
        PartialRolloutFormatError: something is missing, or does not fit together.
        LogitsError: a log-prob is not a number; its row is the token's place.
    """
    tokens = _field(answer, "output_ids", key)
    meta = _field(answer, "meta_info", key)
    finish = meta.get("finish_reason") if isinstance(meta, Mapping) else None
    if not isinstance(meta, Mapping) or not isinstance(tokens, Sequence):
        raise PartialRolloutFormatError(key, "meta_info", f"is {meta!r:.80}, output_ids {tokens!r:.80}")
    if finish is None and not is_event:
        raise PartialRolloutFormatError(key, "meta_info.finish_reason", "is missing")
    return Answer(
        tokens=tuple(tokens),
        logprobs=_logprobs(meta, tokens, key),
        finish=None if finish is None else _finish(finish, key),
        weight_version=str(meta.get("weight_version", "")),
        spans=_spans(meta.get("weight_versions"), key),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        message=str(finish.get("message", "")) if isinstance(finish, Mapping) else "",
        routes=str(meta.get("routed_experts") or ""),
    )


def token_versions(spans: Sequence[Span], tokens: int, key: Key) -> list[PolicyVersion]:
    """Return the policy version of every token.

    Args:
        spans: in order, without gaps.
        tokens: how many there are.
        key: whose they are.

    Raises:
        PartialRolloutFormatError: a gap, an overlap, a wrong end, or weights that are no policy's.
    """
    versions: list[PolicyVersion] = []
    for span in spans:
        if span.start != len(versions) or span.end < span.start:
            raise PartialRolloutFormatError(
                key,
                "meta_info.weight_versions",
                f"goes on at {span.start} to {span.end} after {len(versions)}",
            )
        versions += [policy_version(span.version, key)] * (span.end - span.start)
    if len(versions) != tokens:
        raise PartialRolloutFormatError(
            key, "meta_info.weight_versions", f"ends at {len(versions)} of {tokens} tokens"
        )
    return versions


def policy_version(text: str, key: Key) -> PolicyVersion:
    """Return the policy version that a server names.

    Raises:
        PartialRolloutFormatError: its weights are no policy's.
    """
    if text == UNINIT or not text.isdigit():
        raise PartialRolloutFormatError(key, "meta_info.weight_version", f"is {text!r}, no policy version")
    return PolicyVersion(int(text))


def unpack_routes(text: str, shape: tuple[int, int], key: Key) -> npt.NDArray[np.int32]:
    """Return int32 [tokens, layers, top_k] of their base64.

    Args:
        text: the base64.
        shape: layers and experts a token.
        key: whose they are.

    Raises:
        PartialRolloutFormatError: it is not whole tokens.
    """
    raw = np.frombuffer(base64.b64decode(text), np.int32)
    if raw.size % (shape[0] * shape[1]):
        fact = f"has {raw.size} numbers, not a multiple of {shape[0]} layers of {shape[1]}"
        raise PartialRolloutFormatError(key, "meta_info.routed_experts", fact)
    return raw.reshape(-1, *shape)


def _field(answer: Any, name: str, key: Key) -> Any:
    if not isinstance(answer, Mapping) or name not in answer:
        raise PartialRolloutFormatError(key, name, f"is missing in {str(answer)[:120]}")
    return answer[name]


def _logprobs(meta: Mapping[str, Any], tokens: Sequence[int], key: Key) -> tuple[float, ...]:
    entries = meta.get("output_token_logprobs") or []
    if not isinstance(entries, list) or len(entries) != len(tokens):
        fact = f"does not have one entry for each of {len(tokens)} tokens: {str(entries)[:80]}"
        raise PartialRolloutFormatError(key, "meta_info.output_token_logprobs", fact)
    with contextlib.suppress(TypeError, LookupError):
        logprobs, named = [entry[0] for entry in entries], [entry[1] for entry in entries]
        if named == [*tokens] and {*map(type, logprobs)} <= _NUMBERS:
            return tuple(map(float, logprobs))
    raise _first_wrong(entries, tokens, key)


def _first_wrong(entries: list[Any], tokens: Sequence[int], key: Key) -> Exception:
    """Return what is wrong with the first entry that does not say its token's log-prob."""
    for place, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        match entry:
            case [logprob, named, *_] if named == token and type(logprob) in _NUMBERS:
                continue
            case [None, named, *_] if named == token:  # what JSON has for NaN
                return LogitsError([place])
        break
    fact = f"has {str(entry)[:80]} at {place}, where the token is {str(token)[:80]}"
    return PartialRolloutFormatError(key, "meta_info.output_token_logprobs", fact)


def _finish(finish: Any, key: Key) -> FinishReason:
    kind = finish.get("type") if isinstance(finish, Mapping) else finish
    if kind not in _REASONS:
        raise PartialRolloutFormatError(key, "meta_info.finish_reason", f"is {finish!r:.120}")
    return _REASONS[kind]


def _spans(spans: Any, key: Key) -> tuple[Span, ...]:
    try:
        return msgspec.convert(spans or (), tuple[Span, ...])
    except msgspec.ValidationError as error:
        raise PartialRolloutFormatError(key, "meta_info.weight_versions", str(error)) from error
