"""What a running SGLang server can do, out of its own answer to `/server_info`. Pure."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

SPANS_SINCE = (0, 5, 19)
SESSIONS_SINCE = (0, 5, 21)


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What depends on SGLang's version and on how the server was started."""

    version: tuple[int, ...]
    tp: int = 1
    version_spans: bool = False
    """Whether it says of every token which weights sampled it, so that a request may cross an update."""
    weight_sessions: bool = False
    """Whether an update is between `/begin_weight_update` and `/end_weight_update`."""
    retract: bool = False
    """Whether requests can be sent back to the queue, and the cache flushed, while it is paused."""
    routed_experts: bool = False
    deterministic: bool = False
    memory_saver: bool = False
    device: str = "cuda"
    kv_tokens: int = 0  # of prompts and responses that fit into its cache together; 0 is not known


def capabilities(info: Mapping[str, Any]) -> Capabilities:
    """Read `/server_info`."""
    version = version_of(str(info.get("version", "")))
    return Capabilities(
        version=version,
        tp=int(info.get("tp_size", 1)),
        version_spans=version >= SPANS_SINCE,
        weight_sessions=version >= SESSIONS_SINCE,
        retract=version >= SESSIONS_SINCE,
        routed_experts=bool(info.get("enable_return_routed_experts", False)),
        deterministic=bool(info.get("enable_deterministic_inference", False)),
        memory_saver=bool(info.get("enable_memory_saver", False)),
        device=str(info.get("device") or "cuda"),
        kv_tokens=_kv_tokens(info),
    )


def version_of(text: str) -> tuple[int, ...]:
    """Return `0.5.23` of `0.5.23.post1` as numbers; those of a version nobody can read are none."""
    numbers = re.sub(r"[^\d.].*", "", text, flags=re.DOTALL).split(".")
    return tuple(int(number) for number in numbers if number)[:3]


def _kv_tokens(info: Mapping[str, Any]) -> int:
    states = info.get("internal_states") or [{}]
    places = (info, *(state for state in states if isinstance(state, Mapping)))
    for place in places:
        for name in ("max_total_num_tokens", "memory_usage"):
            value = place.get(name)
            value = value.get("token_capacity") if isinstance(value, Mapping) else value
            if isinstance(value, int) and value > 0:
                return value
    return 0
