"""The rollout: leases prompts, samples them, streams every sample out as it finishes.

`step` is one decode step, between messages. A newer policy version is pulled and installed between two decode
steps (`dcs.replica`), without dropping the samples in flight; the trainer takes no part.
"""

from collections.abc import Sequence
from pathlib import Path

from relax_actor.config import Config
from relax_actor.data.template import text_of
from relax_actor.dcs.disk import DiskSource
from relax_actor.dcs.loans import Lender
from relax_actor.dcs.peer import PeerSource
from relax_actor.dcs.receiver import PolicyReceiver
from relax_actor.dcs.replica import LOOK_S, Replica
from relax_actor.dcs.source import PolicySource, SharedMemorySource
from relax_actor.dcs.turns import InstallTurns
from relax_actor.devices import CPU
from relax_actor.engines.base import Completion, Request
from relax_actor.engines.errors import RequestError
from relax_actor.engines.stop_strings import StopStrings
from relax_actor.faults import point
from relax_actor.homes import LoopHosts
from relax_actor.ids import GroupId, LeaseId, SampleIndex
from relax_actor.protocol import FinishReason, Leased, PromptLease, Purpose, SampleChunk
from relax_actor.roles.busy import BusySpans
from relax_actor.roles.chunking import Chunks, prefixes, sample_chunk, sample_ready, write_rows
from relax_actor.roles.engine_choice import make_rollout_engine, route_layout, sampling_params
from relax_actor.roles.lending import ActorPeers, LendingActor
from relax_actor.roles.prompt_loans import PromptLoans
from relax_actor.roles.putting import Putting
from relax_actor.roles.queue import TransferQueue
from relax_actor.roles.rows import rows_of
from relax_actor.roles.sleeping import Sleeping, first_turn, goes_on
from relax_actor.roles.staging import gpu_sources
from transport.shm import SegmentMissingError, SegmentSpaceError, ShmSpace


class Rollout(LendingActor):
    """One replica of the policy that samples.

    Args:
        config: the run's.
        stop_token_ids: what ends a sample.
        stop_strings: what else does, in its text.
        hosts: of the run.
    """

    def __init__(
        self,
        config: Config,
        stop_token_ids: tuple[int, ...],
        stop_strings: tuple[str, ...] = (),
        hosts: LoopHosts = LoopHosts(),  # noqa: B008 - frozen
    ) -> None:
        self._config, self._stop_token_ids, self._hosts = config, stop_token_ids, hosts
        self._turn = first_turn(config, self.ctx)
        keep_fds = () if self._turn is None else (self._turn.fd,)
        self._stop_strings = (
            StopStrings(stop_strings, text_of(Path(config.model.path))) if stop_strings else None
        )
        self._engine, self._device = make_rollout_engine(
            config, stop_token_ids, self.ctx, reads_text=bool(stop_strings), keep_fds=keep_fds
        )
        self._busy = BusySpans("generate", self.ctx.events)
        self._is_active = False  # whether this incarnation has ever had a whole version
        if not self.ctx.is_spare:
            self._join()

    def on_promoted(self) -> None:
        """Begin: only now is it known whose place this is."""
        self._engine.check()
        self._join()

    def _join(self) -> None:
        config = self._config
        self._rows = rows_of(self.ctx, self._hosts, self._say_full)
        self._routes = route_layout(config)
        self.lender = Lender(self._engine)
        self._weights = self._replica(ShmSpace(self.ctx.run_id, self.ctx.shm_root))
        self._sleeping = Sleeping(self._turn, self._engine, self._weights, self.ctx, config)
        self._queue = self.ctx.ref("queue", TransferQueue)
        self._leases: dict[tuple[GroupId, SampleIndex], LeaseId] = {}
        self._prompts = PromptLoans(self._queue, self._rows, self.ctx)
        self._putting = Putting(self._queue, self._rows, self.ctx)
        self._chunks = Chunks(config.rollout.chunk_tokens)
        self._is_leaving = False

    def step(self) -> float | None:
        """Install what is newer, take prompts, decode one token of every sample in flight."""
        self._engine.check()
        is_awake = self._sleeping.is_awake(self._park)
        if is_awake:
            self._refresh_weights()
            if not self._sleeping.is_wanted:
                self._take_prompts()
        self._stop_unwanted(self._putting.settle())
        if self._is_leaving and self._has_nothing:
            self.ctx.finish()
            return None
        if not is_awake:
            return self._sleeping.look_s
        if not self._engine.in_flight or not self._weights.can_sample or self._rows.is_crowded:
            self._busy.end()
            waits_s = LOOK_S if self._weights.is_behind else self._engine.idle_s
            return min((s for s in (waits_s, self._sleeping.look_s) if s is not None), default=None)
        self._busy.begin()
        finished = self._engine.step()
        point("first_token")
        self._put(finished)
        self._reject(self._engine.refused())
        self._put_chunks()
        self._busy.go_on()
        return 0.0 if finished else min(self._engine.nap_s, LOOK_S)

    def on_drain(self) -> None:
        """Take no prompts any more, and finish the samples in flight; see `step`."""
        self._is_leaving = True
        self._prompts.stop_asking()

    def on_stop(self, reason: str) -> None:  # noqa: ARG002 - the hook\'s signature
        """Report the last stretch of work."""
        self._busy.end()
        self._engine.close()

    # -- weights --------------------------------------------------------------------------------

    def _replica(self, space: ShmSpace) -> Replica:
        receiver, replicas = PolicyReceiver(space), self._config.rollout.replicas
        sources: list[PolicySource] = [
            SharedMemorySource(receiver),
            PeerSource(ActorPeers(self.ctx, replicas)),
            DiskSource(self.ctx.run_dir / "checkpoints"),
        ]
        if self._device != CPU and self._config.rollout.engine != "scripted":
            sources += gpu_sources(self.ctx, space, self._hosts.store(self.ctx.host))
        return Replica(
            self._engine,
            sources,
            announced=receiver.latest,
            lender=self.lender,
            turns=InstallTurns(space, self._hosts.rollouts_on(self.ctx.host, replicas)),
            max_staleness=self._config.run.max_staleness,
            events=self.ctx.events,
        )

    def _refresh_weights(self) -> None:
        was_active = self._is_active
        self._weights.refresh()
        self._is_active = was_active or self._weights.can_sample
        if self._is_active and not was_active:
            self.ctx.events.emit(
                "child_active",
                child=self.ctx.name,
                incarnation=self.ctx.incarnation,
                policy_version=self._engine.version,
            )

    # -- prompts --------------------------------------------------------------------------------

    def _take_prompts(self) -> None:
        if (leased := self._prompts.arrived()) is not None:
            self._start(leased)
        slots = self._engine.free_slots
        if self._prompts.is_idle and not self._is_leaving and slots > 0 and not self._weights.is_behind:
            held = list(dict.fromkeys([*self._leases.values(), *self._putting.leases]))
            self._prompts.ask(self._engine.version, held, slots)

    @property
    def _has_nothing(self) -> bool:
        """Whether every sample is put, and confirmed."""
        return self._prompts.is_idle and not self._engine.in_flight and self._putting.is_done

    def _start(self, leased: Leased) -> None:
        if leased.policy_version is not None:
            self._weights.told(leased.policy_version)
        for lease in leased.prompts:
            point("leased")
            self._forget(lease)
            try:
                point("submitted")
                self._engine.submit(self._requests(lease))
            except SegmentMissingError:  # it has ended: the queue takes back what we do not hold
                continue
            except ValueError as error:  # can never be sampled: another prompt takes its place
                self._queue.tell(TransferQueue.reject, lease.group.group_id, str(error))
                continue
            for index in lease.missing:
                self._leases[lease.group.group_id, index] = lease.lease_id
            self._say_continued(lease)

    def _requests(self, lease: PromptLease) -> list[Request]:
        group = lease.group
        prompt = tuple(self._rows.read(group.tokens).tolist())
        media = {name: self._rows.read(ref) for name, ref in group.media.items()} or None
        is_eval = group.purpose is Purpose.EVAL
        params = sampling_params(self._config, self._stop_token_ids, self._stop_strings, is_eval=is_eval)
        return [
            Request(
                group_id=group.group_id,
                sample_index=index,
                prompt=prompt,
                params=params,
                media=media,
                prefix=prefix,
            )
            for index, prefix in prefixes(lease, self._rows, self._routes).items()
        ]

    def _forget(self, lease: PromptLease) -> None:
        """Abort what is in flight under an older lease: a new one voids it, as after a trainer's restart."""
        keys = [(lease.group.group_id, index) for index in lease.missing]
        self._engine.abort([key for key in keys if self._leases.pop(key, None) is not None])

    def _park(self) -> int:
        """Give up what is in flight, before a sleep: it is leased anew and goes on from its tokens."""
        self._busy.end()
        self._prompts.stop_asking()
        parked = self._engine.abort(list(self._engine.lengths()))
        cut_off = [each for each in parked if each.finish_reason is FinishReason.ABORT]
        self._put([each for each in parked if each.finish_reason is not FinishReason.ABORT])
        if goes_on(self._config):
            self._hand_over_chunks([each for each in cut_off if len(each.tokens)])
        for each in cut_off:
            del self._leases[each.request.key]
        return len(cut_off)

    # -- samples --------------------------------------------------------------------------------

    def _put(self, completions: list[Completion]) -> None:
        finished = [done for done in completions if not point("finished")]
        if not finished:
            return
        rows = write_rows(self._rows, finished, self._routes)
        point("tensors_written")
        samples = [
            sample_ready(done, row, self._leases.pop(done.request.key))
            for done, row in zip(finished, rows, strict=True)
        ]
        self._putting.send(samples)
        point("ready_sent")

    def _reject(self, refused: Sequence[RequestError]) -> None:
        """Give up the groups of samples that the engine found to be impossible."""
        for error in refused:
            group_id = error.key[0]
            self._queue.tell(TransferQueue.reject, group_id, str(error))
            keys = [key for key in self._leases if key[0] == group_id]
            for key in keys:
                del self._leases[key]
            self._engine.abort(keys)

    def _put_chunks(self) -> None:
        """Hand over what there is of long samples, so that nobody has to begin them again."""
        self._hand_over_chunks(self._engine.peek(self._chunks.due(self._engine.lengths())))

    def _hand_over_chunks(self, unfinished: Sequence[Completion]) -> None:
        if not unfinished:
            return
        rows = write_rows(self._rows, unfinished, self._routes)
        point("chunk_written")
        self._putting.send(
            [
                sample_chunk(each, row, self._leases[each.request.key])
                for each, row in zip(unfinished, rows, strict=True)
            ]
        )
        point("chunk_sent")

    def _say_full(self, error: SegmentSpaceError) -> None:
        self.ctx.events.emit("put_waits", reason=str(error))

    def _stop_unwanted(self, refused: Sequence[SampleChunk]) -> None:
        """Sample no further where the lease has ended."""
        leases = {(chunk.group_id, chunk.sample_index): chunk.lease_id for chunk in refused}
        unwanted = [key for key, lease_id in leases.items() if self._leases.get(key) == lease_id]
        for key in unwanted:
            del self._leases[key]
        self._engine.abort(unwanted)

    def _say_continued(self, lease: PromptLease) -> None:
        if lease.chunks:
            self.ctx.events.emit(
                "samples_continued",
                group_id=lease.group.group_id,
                samples=len(lease.chunks),
                tokens=sum(chunk.length for chunk in lease.chunks),
            )
