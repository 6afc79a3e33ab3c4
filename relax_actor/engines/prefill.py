"""What prompts have in common, and which of them are prefilled together. Pure."""

from collections.abc import Iterator, Sequence

from relax_actor.engines.running import RunningSample

_MAX_TOKENS = 4096  # of one forward, padding included; bounds its activations
_MAX_PADDING_FRAC = 0.25

Prompt = tuple[int, ...]


def distinct(
    samples: Sequence[RunningSample],
) -> tuple[list[Prompt], list[RunningSample], list[RunningSample]]:
    """Tell a text's first sample from its others; a text is a prompt and what its response has already.

    Returns:
        The distinct texts, shortest first; the first sample of each, in that order; all other samples.
    """
    first: dict[Prompt, RunningSample] = {}
    others = [s for s in samples if first.setdefault(s.text, s) is not s]
    prompts = sorted(first, key=len)
    return prompts, [first[prompt] for prompt in prompts], others


def common_prefix(prompts: Sequence[Prompt]) -> Prompt:
    """Return the longest prefix of all prompts."""
    low, high = min(prompts), max(prompts)  # all others sort between them and share what these share
    for i, (a, b) in enumerate(zip(low, high, strict=False)):
        if a != b:
            return low[:i]
    return low


def prefill_batches(lengths: Sequence[int]) -> Iterator[slice]:
    """Cut ascending lengths into batches of bounded size and little padding.

    Args:
        lengths: tokens to compute of each prompt, shortest first.

    Yields:
        Consecutive slices of `lengths`, all of them together.
    """
    start = used = 0
    for i, length in enumerate(lengths):
        padded = length * (i + 1 - start)
        wasteful = padded - used - length > _MAX_PADDING_FRAC * padded
        if i > start and (padded > _MAX_TOKENS or wasteful):
            yield slice(start, i)
            start, used = i, 0
        used += length
    yield slice(start, len(lengths))
