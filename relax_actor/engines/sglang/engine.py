"""The engine `sglang`: a server beside this process, its samples, and its weights.

The server samples by itself; `step` hands over what has finished and returns at once. Any doubt about the
server or its weights ends the engine: the server is killed, every call raises, and the actor with it is
started anew (see `life`).
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_actor.engines.base import Completion, Request
from relax_actor.engines.errors import EngineNotReadyError, RequestError, require_idle
from relax_actor.engines.running import admitted, check_token_ids
from relax_actor.engines.sglang.around import Surroundings
from relax_actor.engines.sglang.errors import DeadlineError, ServerError, ServerGoneError
from relax_actor.engines.sglang.generation import Generation
from relax_actor.engines.sglang.health import Health
from relax_actor.engines.sglang.life import Life
from relax_actor.engines.sglang.requests import GenerationSettings
from relax_actor.engines.sglang.settings import SPARE_TOKENS, ServerSettings
from relax_actor.engines.sglang.states import EngineState, EngineTrigger
from relax_actor.engines.sglang.updating import MakeUpdater, Update, known, update_mode_of
from relax_actor.engines.sglang.weights import MemoryTag, ServerMemory, UpdateMode
from relax_actor.errors import RelaxError
from relax_actor.ids import GroupId, PolicyVersion, SampleIndex

if TYPE_CHECKING:
    from torch import Tensor


class SglangEngine:
    """See `relax_actor.engines.base.Engine`. Its constructor returns when the server serves.

    Args:
        server: how the server is started.
        generation: how requests are made.
        make_updater: of weights.
        vocabulary: how many tokens the model has.
        names: of its weights; SGLang passes over others in silence. None: not known.
        log: where the server's output goes.
        update_mode: `auto`, or which of `in_place`, `retract` and `abort`.
        health_s: how long no token may come before one is asked for; see `Health`.
        around: the actor.

    Raises:
        StartError: the server did not come up.
    """

    can_read_back = False

    def __init__(
        self,
        server: ServerSettings,
        generation: GenerationSettings,
        make_updater: MakeUpdater,
        *,
        vocabulary: int,
        names: frozenset[str] = frozenset(),
        log: Path,
        update_mode: str = "auto",
        health_s: float = 15.0,
        around: Surroundings = Surroundings(),  # noqa: B008 - frozen
    ) -> None:
        self._settings, self._vocabulary, self._around = server, vocabulary, around
        self._names = names
        self._version: PolicyVersion | None = None
        self._lowest_version = PolicyVersion(0)
        self._life = Life(server, log, around)
        client = self._life.client
        with self._life.starting() as self.capabilities:
            self._mode = update_mode_of(update_mode, self.capabilities)
            self._generation = Generation(
                client,
                generation,
                spans=self.capabilities.version_spans,
                late_by_a_step=self._mode is not UpdateMode.RETRACT,
                on_ready=around.wake,
            )
            self._health = Health(client, every_s=health_s, on_ready=around.wake)
            self._updater = make_updater(client, self.capabilities)
            self._life.owns(self._updater.close)
            self._memory = ServerMemory(client, is_supported=self.capabilities.memory_saver)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Where the server and its weights are."""
        return self._life.state

    @property
    def version(self) -> PolicyVersion | None:
        """The installed policy version; None where none is, or the engine is down."""
        return self._version if self.state is EngineState.READY else None

    @property
    def free_slots(self) -> int:
        """How many more requests fit now."""
        return self._settings.slots - self.in_flight

    @property
    def in_flight(self) -> int:
        """How many requests have been submitted and not returned."""
        return len(self._generation.keys)

    @property
    def nap_s(self) -> float:
        """Until the server is asked whether it lives."""
        return self._health.next_s

    @property
    def idle_s(self) -> float | None:
        """The same: a server can die while nothing is asked of it."""
        return self._health.next_s

    @property
    def context_tokens(self) -> int:
        """Of prompt and response together: what the model takes, and the cache holds."""
        wanted, cache = self._settings.context_tokens, self.capabilities.kv_tokens
        return min(wanted, cache - SPARE_TOKENS) if cache else wanted

    # -- weights -------------------------------------------------------------------------------------

    def install(self, version: PolicyVersion, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Replace the weights; requests in flight go on by the server's own means, or are sent again.

        Raises:
            ValueError: a lower version; nothing has changed.
            KeyError: a name that the model does not have.
            Exception: whatever went wrong. The engine is down, unless only the source failed, before
                the server was touched: then it has no version until the next install.
        """
        if version < self._lowest_version:
            raise ValueError(f"policy version {version} is lower than {self._lowest_version}")
        self._life.check_up()
        self._life.move(EngineTrigger.UPDATE)
        try:
            self._update(version, weights)
        except BaseException as error:
            if self._updater.is_torn or isinstance(error, ServerGoneError | DeadlineError | ServerError):
                self._life.fail(error)
            self._life.move(EngineTrigger.UNTOUCHED)
            raise

    def weights(self, names: Iterable[str]) -> "Iterator[tuple[str, Tensor]]":  # noqa: ARG002 - of all engines
        """Refuse: SGLang shows no weights of most models.

        Raises:
            EngineNotReadyError: always.
        """
        raise EngineNotReadyError

    def invalidate(self) -> None:
        """Take the installed weights for torn."""
        self._life.check_up()
        self._life.move(EngineTrigger.INVALID)

    def sleep(self, tags: Iterable[MemoryTag] = tuple(MemoryTag)) -> bool:
        """Give GPU memory to somebody else; there is no version until `wake` and the next install.

        A server on a CPU, where there is no memory saver, keeps its memory and only rests.

        Args:
            tags: which memory; what stays, stays with the server.

        Returns:
            Whether memory was freed.

        Raises:
            ValueError: requests are in flight, or the server has no memory saver; nothing has changed.
            SglangUpdateError: it failed. The engine is down.
        """
        self._life.check_up()
        require_idle(self.in_flight)
        frees = self.capabilities.memory_saver or self.capabilities.device != "cpu"
        with self._life.failing():
            self._health.settle()
            if frees:
                self._memory.release(tags, in_flight=0)
        if self.state is not EngineState.ASLEEP:
            self._life.move(EngineTrigger.SLEEP)
        return frees

    def wake(self, tags: Iterable[MemoryTag] = tuple(MemoryTag)) -> None:
        """Take memory back. The weights are undefined, so an install has to follow.

        Args:
            tags: which memory; the server is awake when all of it is back.

        Raises:
            SglangUpdateError: it failed. The engine is down.
        """
        self._life.check_up()
        with self._life.failing():
            self._memory.resume(tags)
        if self.state is EngineState.ASLEEP and not self._memory.released:
            self._life.move(EngineTrigger.WAKE)
            self._health.ask_now()

    # -- samples -------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests, all or none; they start at once.

        Raises:
            EngineNotReadyError: no version is installed.
            ValueError: more than `free_slots`.
            RequestError: one can never be sampled; the server never sees it.
        """
        version = self._ready_version()
        for request in requests:
            check_token_ids(request, self._vocabulary)
            if request.media:
                raise RequestError(request.key, "has images, which the engine sglang does not take yet")
        samples = admitted(
            requests,
            free_slots=self.free_slots,
            taken=self._generation.keys,
            context_tokens=self.context_tokens,
        )
        self._generation.send(samples, version)

    def step(self) -> list[Completion]:
        """Return what has finished; it does not wait.

        Raises:
            EngineNotReadyError: no version is installed.
            Exception: the server is gone, hung or broken. The engine is down.
        """
        version = self._ready_version()
        try:
            finished = self._generation.take(version)
            self._look_after()
        except (RelaxError, ArithmeticError) as error:
            self._life.fail(error)
        return finished

    def check(self) -> None:
        """Ask whether the server lives.

        Raises:
            Exception: it does not. The engine is down.
        """
        self._life.check_up()
        try:
            self._look_after()
        except RelaxError as error:
            self._life.fail(error)

    def refused(self) -> list[RequestError]:
        """Return what the server would not sample."""
        return self._generation.refused()

    def lengths(self) -> dict[tuple[GroupId, SampleIndex], int]:
        """Return how many tokens every request in flight is known to have."""
        with self._life.failing():
            return self._generation.lengths()

    def peek(self, keys: Iterable[tuple[GroupId, SampleIndex]]) -> list[Completion]:
        """Return the tokens that are known of requests that go on.

        A token that came first after an update may be said to be of the version before.
        """
        with self._life.failing():
            return self._generation.peek(keys)

    def abort(self, keys: Iterable[tuple[GroupId, SampleIndex]]) -> list[Completion]:
        """Stop requests; return their tokens so far. Waits for the server to bring them."""
        with self._life.failing():
            return self._generation.abort(keys)

    def close(self) -> None:
        """Kill the server. Idempotent."""
        self._life.end("it was closed")

    # -- parts ---------------------------------------------------------------------------------------

    def _update(self, version: PolicyVersion, weights: "Iterable[tuple[str, Tensor]]") -> None:
        update = Update(self._generation, self._mode)
        update.replace(self._updater, version, known(weights, self._names))
        self._life.move(EngineTrigger.WHOLE)
        self._version = self._lowest_version = version
        took = update.resume(version)
        self._health.ask_now()
        self._around.emit("engine_updated", version=version, **took)

    def _look_after(self) -> None:
        self._life.check_alive()
        if self.state is EngineState.ASLEEP:  # it has nothing to compute a token with
            return
        if self._health.look(self._generation.progress):
            self._around.progress(f"SGLang has answered {self._generation.progress} times")

    def _ready_version(self) -> PolicyVersion:
        self._life.check_up()
        if self.version is None:
            raise EngineNotReadyError
        return self.version
