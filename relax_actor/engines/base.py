"""What a rollout needs of an inference engine. Every engine passes tests/contract/test_engine.py."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from relax_actor.engines.errors import RequestError
from relax_actor.engines.stop_strings import StopStrings
from relax_actor.ids import GroupId, PolicyVersion, SampleIndex
from relax_actor.protocol import FinishReason

if TYPE_CHECKING:
    from torch import Tensor


PLACEHOLDER_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
"""Fields of a vision model's config.json: ids that stand for media in a prompt and are never sampled."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. Log-probs are always those of logits / temperature, before top-p and top-k."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy; its log-probs are those of temperature 1
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    stop_token_ids: tuple[int, ...] = ()  # any of them ends the sample and is its last token
    stop_strings: StopStrings | None = None  # the token that makes one whole is the sample's last
    forbidden_token_ids: tuple[int, ...] = ()  # never sampled: multimodal placeholders, pad


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled of a response before, by whichever replica; the response goes on after it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # one a token
    versions: tuple[PolicyVersion, ...]  # one a token
    routed_experts: npt.NDArray[np.int32] | None = None  # [prompt + tokens - 1, layers, top_k], as sampled


NO_PREFIX = Prefix(tokens=(), logprobs=(), versions=())


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to sample."""

    group_id: GroupId
    sample_index: SampleIndex
    prompt: tuple[int, ...]  # token ids, never padded
    params: SamplingParams
    media: Mapping[str, npt.NDArray[np.number]] | None = None  # what the prompt's placeholders stand for
    prefix: Prefix = NO_PREFIX  # its tokens count for max_new_tokens, and are a part of the completion

    @property
    def key(self) -> tuple[GroupId, SampleIndex]:
        """What identifies the sample across engines and replicas."""
        return (self.group_id, self.sample_index)


class Completion(msgspec.Struct, kw_only=True):
    """A finished sample."""

    request: Request
    tokens: npt.NDArray[np.int32]  # [n], the stop token included
    logprobs: npt.NDArray[np.float32]  # [n], natural log
    versions: npt.NDArray[np.int32]  # [n], policy version that sampled each token
    finish_reason: FinishReason
    routed_experts: npt.NDArray[np.int32] | None = None
    """[prompt + n - 1, layers, top_k], by every token that went through the model; of an engine that records
    them, see `relax_actor.rl.routing`."""


class Lockstep:
    """What is the same for all engines that sample in `step`, in this process."""

    can_read_back = True

    nap_s = 0.0
    idle_s: float | None = None

    def check(self) -> None:
        """Nothing runs elsewhere."""

    def refused(self) -> list[RequestError]:
        """Everything is known at `submit`."""
        return []

    def close(self) -> None:
        """Nothing runs elsewhere."""


class Engine(Protocol):
    """Samples many requests at once, one decode step a call.

    A sample's randomness depends on (seed, group id, sample index, position) only: never on the
    replica, the batch or the moment. So a request with a prefix goes on as the one it was cut from would
    have: to the last bit where the engine computes every sample alone.
    """

    @property
    def version(self) -> PolicyVersion | None:
        """The installed policy version; None before the first install, and while the weights are torn.

        They are torn from the beginning of an install that fails until one that succeeds, and after
        `invalidate`. Meanwhile `submit`, `step` and `weights` refuse; requests in flight wait with their
        tokens.
        """
        ...

    @property
    def free_slots(self) -> int:
        """How many more requests fit now."""
        ...

    @property
    def in_flight(self) -> int:
        """How many requests have been submitted and not returned."""
        ...

    @property
    def can_read_back(self) -> bool:
        """Whether `weights` can show what is installed; such an engine is probed, and lends its weights."""
        ...

    def install(self, version: PolicyVersion, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Replace the weights between two decode steps; requests in flight keep their tokens and go on.

        Args:
            version: not lower than the current one.
            weights: Hugging Face names and tensors; copied before this returns. Names that are
                absent keep their values.

        Raises:
            KeyError: a name the model does not have.
            ValueError: a lower version, or a shape that does not fit.
            Exception: whatever `weights` raises; as after any failure but a lower version, the weights
                are torn.
        """
        ...

    def weights(self, names: Iterable[str]) -> "Iterator[tuple[str, Tensor]]":
        """Read installed weights back, in the engine's own element type.

        Args:
            names: of weights that were installed.

        Yields:
            Names and tensors on any device, not to be written to; they change with the next install.

        Raises:
            EngineNotReadyError: no whole version is installed, or the engine cannot read back.
            KeyError: no weight of this name was installed.
        """
        ...

    def invalidate(self) -> None:
        """Take the installed weights for torn: what was read back is not what was published."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; they start at the next `step`.

        Raises:
            ValueError: more than `free_slots`, a key already in flight, an empty prompt, a prompt
                that leaves no room for a token within the context, or a prefix that has come to its end.
        """
        ...

    def step(self) -> list[Completion]:
        """Sample one token for every request in flight; return those that finished.

        An engine that samples by itself only returns those. Whichever it is, this does not wait.
        """
        ...

    @property
    def nap_s(self) -> float:
        """How long nobody need call `step`, unless woken, while requests are in flight."""
        ...

    @property
    def idle_s(self) -> float | None:
        """How long nobody need call `check` while none are; None: until there is one."""
        ...

    def check(self) -> None:
        """See to it that the engine can go on, also where nothing is in flight.

        Raises:
            Exception: it cannot.
        """
        ...

    def refused(self) -> list[RequestError]:
        """Return requests that turned out impossible after `submit`, each once; in flight no more."""
        ...

    def close(self) -> None:
        """End what runs beside this process. Idempotent."""
        ...

    def sleep(self) -> bool:
        """Give the memory of weights and cache to somebody else; there is no version then.

        Between this and `wake` nothing but `check` and `close` is asked of the engine.

        Returns:
            Whether memory was freed; an engine that has none that matters only rests.

        Raises:
            ValueError: requests are in flight; nothing has changed.
        """
        ...

    def wake(self) -> None:
        """Take the memory back. The weights are undefined: an install has to follow, of any version.

        Raises:
            Exception: there is none. The engine is of no use any more.
        """
        ...

    def lengths(self) -> dict[tuple[GroupId, SampleIndex], int]:
        """Return how many response tokens, the prefix included, every request in flight has."""
        ...

    def peek(self, keys: Iterable[tuple[GroupId, SampleIndex]]) -> list[Completion]:
        """Return what `abort` would, of requests that go on."""
        ...

    def abort(self, keys: Iterable[tuple[GroupId, SampleIndex]]) -> list[Completion]:
        """Stop these requests; return their tokens so far (finish reason `abort`), or what has finished."""
        ...
