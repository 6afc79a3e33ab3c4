"""The engine `sglang`: a server beside this process, its samples, and its weights.

The server samples by itself; `step` hands over what has finished and returns at once. Any doubt about the
server or its weights ends the engine: the server is killed, every call raises, and the actor with it is
started anew (see `states`).
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from relax_actor.engines.base import Completion, Request
from relax_actor.engines.errors import EngineNotReadyError, RequestError
from relax_actor.engines.running import admitted, check_token_ids
from relax_actor.engines.sglang.around import Surroundings
from relax_actor.engines.sglang.capabilities import Capabilities
from relax_actor.engines.sglang.client import Client
from relax_actor.engines.sglang.errors import DeadlineError, EngineDownError, ServerError, ServerGoneError
from relax_actor.engines.sglang.generation import Generation
from relax_actor.engines.sglang.health import Health, ask_for_a_token
from relax_actor.engines.sglang.requests import GenerationSettings
from relax_actor.engines.sglang.server import START_S, Server
from relax_actor.engines.sglang.settings import SPARE_TOKENS, ServerSettings
from relax_actor.engines.sglang.states import EngineState, EngineTrigger, move
from relax_actor.engines.sglang.updating import Collected, MakeUpdater, update_mode_of
from relax_actor.engines.sglang.weights import MemoryTag, ServerMemory, UpdateMode
from relax_actor.errors import RelaxError
from relax_actor.ids import GroupId, PolicyVersion, SampleIndex

if TYPE_CHECKING:
    from torch import Tensor

LAST_WORDS_S = 0.5
"""How long a closed connection waits for the word of which process has died."""


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
        self._state = EngineState.DOWN
        self._down_reason, self._death = "", ""
        self._has_died = threading.Event()
        self._version: PolicyVersion | None = None
        self._lowest_version = PolicyVersion(0)
        self._server = Server(server, log, remember=around.remember)
        self._client = Client(self._server.url)
        self._move(EngineTrigger.START)
        try:
            self.capabilities = self._start()
            self._mode = update_mode_of(update_mode, self.capabilities)
            self._generation = Generation(
                self._client,
                generation,
                spans=self.capabilities.version_spans,
                late_by_a_step=self._mode is not UpdateMode.RETRACT,
                on_ready=around.wake,
            )
            self._health = Health(self._client, every_s=health_s, on_ready=around.wake)
            self._updater = make_updater(self._client, self.capabilities)
            self._memory = ServerMemory(self._client, is_supported=self.capabilities.memory_saver)
        except BaseException:
            self._kill()
            raise
        self._move(EngineTrigger.UP)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Where the server and its weights are."""
        return self._state

    @property
    def version(self) -> PolicyVersion | None:
        """The installed policy version; None where none is, or the engine is down."""
        return self._version if self._state is EngineState.READY else None

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
        self._check_up()
        self._move(EngineTrigger.UPDATE)
        try:
            self._update(version, weights)
        except BaseException as error:
            if self._updater.is_torn or isinstance(error, ServerGoneError | DeadlineError | ServerError):
                self._fail(error)
            self._move(EngineTrigger.UNTOUCHED)
            raise

    def weights(self, names: Iterable[str]) -> "Iterator[tuple[str, Tensor]]":  # noqa: ARG002 - of all engines
        """Refuse: SGLang shows no weights of most models.

        Raises:
            EngineNotReadyError: always.
        """
        raise EngineNotReadyError

    def invalidate(self) -> None:
        """Take the installed weights for torn."""
        self._check_up()
        self._move(EngineTrigger.INVALID)

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
        self._check_up()
        if self.in_flight:
            raise ValueError(f"an engine with {self.in_flight} requests in flight cannot sleep")
        frees = self.capabilities.memory_saver or self.capabilities.device != "cpu"
        with self._failing():
            self._health.settle()
            if frees:
                self._memory.release(tags, in_flight=0)
        if self._state is not EngineState.ASLEEP:
            self._move(EngineTrigger.SLEEP)
        return frees

    def wake(self, tags: Iterable[MemoryTag] = tuple(MemoryTag)) -> None:
        """Take memory back. The weights are undefined, so an install has to follow.

        Args:
            tags: which memory; the server is awake when all of it is back.

        Raises:
            SglangUpdateError: it failed. The engine is down.
        """
        self._check_up()
        with self._failing():
            self._memory.resume(tags)
        if self._state is EngineState.ASLEEP and not self._memory.released:
            self._move(EngineTrigger.WAKE)
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
            self._fail(error)
        return finished

    def check(self) -> None:
        """Ask whether the server lives.

        Raises:
            Exception: it does not. The engine is down.
        """
        self._check_up()
        try:
            self._look_after()
        except RelaxError as error:
            self._fail(error)

    def refused(self) -> list[RequestError]:
        """Return what the server would not sample."""
        return self._generation.refused()

    def lengths(self) -> dict[tuple[GroupId, SampleIndex], int]:
        """Return how many tokens every request in flight is known to have."""
        with self._failing():
            return self._generation.lengths()

    def peek(self, keys: Iterable[tuple[GroupId, SampleIndex]]) -> list[Completion]:
        """Return the tokens that are known of requests that go on.

        A token that came first after an update may be said to be of the version before.
        """
        with self._failing():
            return self._generation.peek(keys)

    def abort(self, keys: Iterable[tuple[GroupId, SampleIndex]]) -> list[Completion]:
        """Stop requests; return their tokens so far. Waits for the server to bring them."""
        with self._failing():
            return self._generation.abort(keys)

    def close(self) -> None:
        """Kill the server. Idempotent."""
        self._go_down("it was closed")

    # -- the server ----------------------------------------------------------------------------------

    def _start(self) -> Capabilities:
        found = self._server.await_serving(self._client, progress=self._around.progress)
        self._server.watch(self._died)
        since = time.monotonic()
        # With weights that mean nothing; whatever compiles at the first token has been compiled then.
        ask_for_a_token(self._client, deadline_s=START_S).result()
        took = self._server.phases() | {"first_token": round(time.monotonic() - since, 2)}
        self._around.emit(
            "engine_started",
            seconds=round(time.time() - self._server.started_at, 3),
            phases=took,
            sglang=".".join(map(str, found.version)),
            server_pid=self._server.pid,
            url=self._server.url,
            tp=found.tp,
            device=found.device,
            log=self._server.log.name,
        )
        return found

    def _died(self, what: str) -> None:
        """Learn, in another thread, that a process of the server has ended."""
        self._death = what
        self._has_died.set()
        self._client.fail(ServerGoneError(what))
        self._around.gone(what)
        self._around.wake()

    def _look_after(self) -> None:
        if self._has_died.is_set():
            raise ServerGoneError(self._death)
        if self._state is EngineState.ASLEEP:  # it has nothing to compute a token with
            return
        if self._health.look(self._generation.progress):
            self._around.progress(f"SGLang has answered {self._generation.progress} times")

    def _update(self, version: PolicyVersion, weights: "Iterable[tuple[str, Tensor]]") -> None:
        collected = Collected(self._generation, self._mode)
        report = self._updater.update(
            version, self._known(weights), mode=self._mode, on_pause=collected.collect
        )
        self._move(EngineTrigger.WHOLE)
        self._version = self._lowest_version = version
        replayed, read = self._generation.resume(version), self._generation.prompts_read()
        self._health.ask_now()
        self._around.emit(
            "engine_updated",
            version=version,
            mode=report.mode,
            route=report.route,
            seconds=report.seconds,
            stopped_s=round(collected.stopped_s or report.paused_s, 4),
            nbytes=report.nbytes,
            buckets=report.buckets,
            checksum_s=report.checksum_s,
            in_flight=self.in_flight,
            aborted=collected.samples,
            replayed_tokens=replayed,
            prompt_tokens=read.tokens,
            cached_tokens=read.cached,
        )

    def _known(self, weights: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
        for name, tensor in weights:
            if self._names and name not in self._names:
                raise KeyError(f"the model has no weight `{name}`")
            yield name, tensor

    # -- its end -------------------------------------------------------------------------------------

    def _ready_version(self) -> PolicyVersion:
        self._check_up()
        if self._state is not EngineState.READY or self._version is None:
            raise EngineNotReadyError
        return self._version

    def _check_up(self) -> None:
        if self._state is EngineState.DOWN:
            raise EngineDownError(self._down_reason)

    def _failing(self) -> "_Failing":
        return _Failing(self._fail)

    def _fail(self, error: BaseException) -> NoReturn:
        """Go down, and say why: by the name of the process that died, where one did."""
        died = any(isinstance(each, ServerGoneError) for each in _causes(error))
        if died and self._has_died.wait(LAST_WORDS_S):
            self._go_down(self._death)
            raise ServerGoneError(self._death) from error
        self._go_down(str(error).partition("\n")[0])
        raise error

    def _go_down(self, reason: str) -> None:
        if self._state is EngineState.DOWN:
            return
        self._down_reason = reason
        self._move(EngineTrigger.DOUBT)
        self._kill()

    def _kill(self) -> None:
        self._client.fail(ServerGoneError(self._down_reason or "the server did not come up"))
        self._around.closing()
        self._server.kill()
        if hasattr(self, "_updater"):
            self._updater.close()
        self._client.close()

    def _move(self, trigger: EngineTrigger) -> None:
        self._state = move(self._state, trigger)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


class _Failing:
    """Takes the engine down with an error of a block."""

    def __init__(self, fail: Callable[[BaseException], NoReturn]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RelaxError) and not isinstance(error, EngineNotReadyError):
            self._fail(error)
