"""The life of one engine and its server: it starts, somebody looks whether it lives, and any doubt ends it.

Nothing is repaired. What may be wrong with the server, or with its weights, has it killed; why is what every
later call raises. The moves are a table, in `states`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from relax_actor.engines.errors import EngineNotReadyError
from relax_actor.engines.sglang.around import Surroundings
from relax_actor.engines.sglang.capabilities import Capabilities
from relax_actor.engines.sglang.client import Client
from relax_actor.engines.sglang.errors import EngineDownError, ServerGoneError
from relax_actor.engines.sglang.health import ask_for_a_token
from relax_actor.engines.sglang.server import START_S, Server
from relax_actor.engines.sglang.settings import ServerSettings
from relax_actor.engines.sglang.states import EngineState, EngineTrigger, move
from relax_actor.errors import RelaxError

LAST_WORDS_S = 0.5
"""How long a closed connection waits for the word of which process has died."""


class Life:
    """Starts a server, and ends it for good.

    Args:
        settings: how the server is started.
        log: where its output goes.
        around: the actor.

    Attributes:
        client: of the server.
    """

    def __init__(self, settings: ServerSettings, log: Path, around: Surroundings) -> None:
        self._around = around
        self._state = EngineState.DOWN
        self._down_reason, self._death = "", ""
        self._has_died = threading.Event()
        self._owned = ExitStack()
        self._server = Server(settings, log, remember=around.remember)
        self.client = Client(self._server.url)
        self.move(EngineTrigger.START)

    @property
    def state(self) -> EngineState:
        """Where the server and its weights are."""
        return self._state

    def move(self, trigger: EngineTrigger) -> None:
        """Go where the table says.

        Raises:
            IllegalEngineMoveError: it says nothing of this.
        """
        self._state = move(self._state, trigger)

    # -- its beginning -------------------------------------------------------------------------------

    @contextmanager
    def starting(self) -> Iterator[Capabilities]:
        """Wait until the server serves; it is up after the block, or killed if that fails.

        Yields:
            What it can do.

        Raises:
            StartError: it did not come up.
        """
        try:
            yield self._start()
        except BaseException:
            self._kill()
            raise
        self.move(EngineTrigger.UP)

    def owns(self, close: Callable[[], None]) -> None:
        """Have something closed once the server is killed."""
        self._owned.callback(close)

    def _start(self) -> Capabilities:
        found = self._server.await_serving(self.client, progress=self._around.progress)
        self._server.watch(self._died)
        since = time.monotonic()
        # With weights that mean nothing; whatever compiles at the first token has been compiled then.
        ask_for_a_token(self.client, deadline_s=START_S).result()
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

    # -- whether it lives ----------------------------------------------------------------------------

    def check_up(self) -> None:
        """Refuse whatever is asked of an engine that is down.

        Raises:
            EngineDownError: it is, and why.
        """
        if self._state is EngineState.DOWN:
            raise EngineDownError(self._down_reason)

    def check_alive(self) -> None:
        """Look whether a process of the server has ended.

        Raises:
            ServerGoneError: one has, and which.
        """
        if self._has_died.is_set():
            raise ServerGoneError(self._death)

    def _died(self, what: str) -> None:
        """Learn, in another thread, that a process of the server has ended."""
        self._death = what
        self._has_died.set()
        self.client.fail(ServerGoneError(what))
        self._around.gone(what)
        self._around.wake()

    # -- its end -------------------------------------------------------------------------------------

    @contextmanager
    def failing(self) -> Iterator[None]:
        """End with an error of the block, unless it only says that the engine is not ready."""
        try:
            yield
        except EngineNotReadyError:
            raise
        except RelaxError as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """End, and say why: by the name of the process that died, where one did.

        Raises:
            ServerGoneError: a process died.
            BaseException: `error`, otherwise.
        """
        died = any(isinstance(each, ServerGoneError) for each in _causes(error))
        if died and self._has_died.wait(LAST_WORDS_S):
            self.end(self._death)
            raise ServerGoneError(self._death) from error
        self.end(str(error).partition("\n")[0])
        raise error

    def end(self, reason: str) -> None:
        """Kill the server. Idempotent: the first reason stays."""
        if self._state is EngineState.DOWN:
            return
        self._down_reason = reason
        self.move(EngineTrigger.DOUBT)
        self._kill()

    def _kill(self) -> None:
        self.client.fail(ServerGoneError(self._down_reason or "the server did not come up"))
        self._around.closing()
        self._server.kill()
        self._owned.close()
        self.client.close()


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
