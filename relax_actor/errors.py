"""What can go wrong in actors and in the loop. Facts are attributes; the text is built from them."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Self


class RelaxError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(RelaxError):
    """The configuration cannot be run; exit code 2.

    Args:
        where: the option, or file:line, that is wrong.
        fact: what is wrong with it.
        hint: what to do about it, or nothing.
    """

    def __init__(self, where: str, fact: str, hint: str = "") -> None:
        self.where, self.fact, self.hint = where, fact, hint
        super().__init__(f"`{where}` {fact}" + (f"\n\nhint: {hint}" if hint else ""))


class DatasetError(ConfigError):
    """A dataset row cannot be used; names file, line and field."""


class Executed(StrEnum):
    """What is known of a call that failed: did its method run?"""

    NO = "no"
    MAYBE = "maybe"
    DONE = "done"


class ActorError(RelaxError):
    """Base of what a call to an actor can raise; `executed` says whether the method ran."""

    executed = Executed.NO


class RemoteError(ActorError):
    """The method raised. Also an instance of the original type where this process knows it.

    Args:
        actor: who raised.
        type_name: `module.Class` of the original exception.
        message: its text.
        remote_traceback: the callee's traceback, formatted.
    """

    executed = Executed.DONE

    def __init__(self, actor: str, type_name: str, message: str, remote_traceback: str) -> None:
        self.actor, self.type_name = actor, type_name
        self.message, self.remote_traceback = message, remote_traceback
        Exception.__init__(self, actor, type_name, message, remote_traceback)

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}\n\n  in {self.actor}:\n{self.remote_traceback}"


class ActorDied(ActorError):  # noqa: N818 - the vocabulary of the field: a fact, not a mistake
    """The callee died while the call was on its way or running."""

    def __init__(self, actor: str, incarnation: int, reason: str, executed: Executed) -> None:
        self.actor, self.incarnation, self.reason, self.executed = actor, incarnation, reason, executed
        super().__init__(f"{actor} (incarnation {incarnation}) died: {reason} (executed: {executed})")


class ActorRestarted(ActorError):  # noqa: N818 - as above
    """A pinned ref's incarnation is no longer the current one."""

    def __init__(self, actor: str, pinned: int, current: int) -> None:
        self.actor, self.pinned, self.current = actor, pinned, current
        super().__init__(f"{actor} is at incarnation {current}; this ref is pinned to {pinned}")


class CallTimeout(ActorError):  # noqa: N818 - as above
    """The caller's deadline passed; the callee's answer, if any, will be dropped."""

    def __init__(self, actor: str, method: str, timeout_s: float, executed: Executed, detail: str) -> None:
        self.actor, self.method, self.timeout_s, self.executed = actor, method, timeout_s, executed
        super().__init__(f"{actor}.{method} did not answer within {timeout_s:g} s: {detail}")


class MailboxFull(ActorError):  # noqa: N818 - as above
    """The callee's mailbox has no room; the message was not taken."""


class CallRefused(ActorError):  # noqa: N818 - as above
    """The callee would not start the method: unknown, expired, or addressed to an older incarnation."""


class DeadlockError(ActorError):
    """Actors wait for one another in a circle: each one's main thread is in `.result()`.

    Args:
        chain: the names, from who learned of it round to itself.
    """

    executed = Executed.MAYBE

    def __init__(self, chain: tuple[str, ...]) -> None:
        self.chain = chain
        super().__init__(
            f"actors wait for one another: {' -> '.join(chain)}"
            "\n\nhint: await the reply in an async endpoint, which keeps the mailbox open"
        )


class SerializationError(ActorError, TypeError):
    """An argument or a result is not plain data, a typed record or an array."""


class GangAborted(ActorError):  # noqa: N818 - as above
    """A rank of the gang was lost, so the group of all is broken: no result of its collectives counts.

    Args:
        epoch: which group it was.
        reason: who was lost, and how.
    """

    executed = Executed.MAYBE

    def __init__(self, epoch: int, reason: str) -> None:
        self.epoch, self.reason = epoch, reason
        super().__init__(f"the gang's group {epoch} is broken: {reason}")


class StartFailed(ActorError):  # noqa: N818 - as above
    """The tree could not be started, or a child of it."""


class MeshError(ExceptionGroup[Exception], ActorError):
    """Some of several actors that were asked the same failed; one error for all that failed alike.

    Attributes:
        ranks: for each of `exceptions`, which of the refs failed so, by their positions.
        earliest: the position of the ref that was heard to fail first.
    """

    executed = Executed.MAYBE
    ranks: tuple[tuple[int, ...], ...]
    earliest: int

    def __new__(cls, message: str, errors: Sequence[Exception], ranks: Sequence[Sequence[int]]) -> Self:
        """Group errors, earliest first, each with the ranks it stands for."""
        group = super().__new__(cls, message, errors)
        group.ranks = tuple(tuple(sorted(each)) for each in ranks)
        group.earliest = ranks[0][0]
        return group

    def __init__(self, *_args: object) -> None:
        """Everything was done by `__new__`, as in every exception group."""

    def derive(self, errors: Sequence[Exception]) -> "MeshError":  # type: ignore[override]  # no BaseException
        """Keep the ranks of a part of the group; see `ExceptionGroup.derive`."""
        ranks_of = {id(error): ranks for error, ranks in zip(self.exceptions, self.ranks, strict=True)}
        ranks = [ranks_of.get(id(error), (self.earliest,)) for error in errors]
        return MeshError(self.message, errors, ranks)


class PartialRolloutFormatError(RelaxError):
    """An inference server's answer is not what a sample can be made of, so none of it is used.

    Args:
        sample: group and sample index.
        field: of the answer.
        fact: what is wrong with it.
    """

    def __init__(self, sample: tuple[int, int], field: str, fact: str) -> None:
        self.sample, self.field, self.fact = sample, field, fact
        super().__init__(f"the answer for sample {sample[1]} of group {sample[0]}: `{field}` {fact}")


class UnsupportedRoutingError(RelaxError):
    """Routed experts are wanted of something that has none, or that is not known to give them right.

    Args:
        what: a model folder, an engine, a model type.
        fact: why not.
    """

    def __init__(self, what: str, fact: str) -> None:
        self.what, self.fact = what, fact
        super().__init__(
            f"{what} {fact}\n\nhint: without `train.use_r3` every model and engine can be trained"
        )


class RoutedExpertsError(RelaxError, ValueError):
    """The routed experts of a sample are not those of its tokens.

    Args:
        sample: group and sample index.
        fact: what is wrong with them.
    """

    def __init__(self, sample: tuple[int, int], fact: str) -> None:
        self.sample, self.fact = sample, fact
        super().__init__(f"the routed experts of sample {sample[1]} of group {sample[0]} {fact}")


class RoutingMismatchError(RelaxError):
    """The trainer's routers choose other experts than the rollout's did, too often.

    Args:
        sample: group and sample index of the first difference.
        token: its position, prompt included.
        layer: its layer, dense ones counted.
        recorded: the experts of the rollout.
        own: the experts of the trainer.
        differing_frac: share of tokens and layers that differ.
        tolerance_frac: how many may.
    """

    def __init__(
        self,
        sample: tuple[int, int],
        *,
        token: int,
        layer: int,
        recorded: Sequence[int],
        own: Sequence[int],
        differing_frac: float,
        tolerance_frac: float,
    ) -> None:
        self.sample, self.token, self.layer = sample, token, layer
        self.recorded, self.own = tuple(recorded), tuple(own)
        self.differing_frac, self.tolerance_frac = differing_frac, tolerance_frac
        super().__init__(
            f"the trainer routes {differing_frac:.2%} of all tokens and layers to other experts than the "
            f"rollout (tolerated: {tolerance_frac:.2%}); the first is token {token}, layer {layer} of "
            f"sample {sample[1]} of group {sample[0]}: {list(recorded)} recorded, {list(own)} now\n\n"
            "hint: a few per cent are rounding in bfloat16 and a newer policy version; much more is another "
            "model, another order of layers or experts, or an engine that records something else"
        )
