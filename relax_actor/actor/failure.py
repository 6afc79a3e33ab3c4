"""Errors across processes: text first, the original type where the caller knows it, no pickle."""

import builtins
import contextlib
import sys
import traceback

from relax_actor.actor.wire import Failed
from relax_actor.errors import ActorError, CallRefused, MailboxFull, RemoteError, SerializationError

TEXT_CHARACTERS = 65_536
"""What is told of a message and of a traceback."""

_REFUSALS: dict[str, type[ActorError]] = {
    "refused": CallRefused,
    "full": MailboxFull,
    "unserializable": SerializationError,
}


def describe(call_id: int, error: BaseException) -> Failed:
    """Turn an exception into a record; this cannot fail, whatever the exception is."""
    kind = type(error)
    return Failed(
        id=call_id,
        kind="remote",
        type_name=f"{kind.__module__}.{kind.__qualname__}",
        message=_text(error),
        traceback=_traceback(error),
    )


def rebuild(actor: str, failed: Failed) -> ActorError:
    """Turn the record back into an exception to raise at the caller."""
    if failed.kind != "remote":
        return _REFUSALS[failed.kind](f"{actor}: {failed.message}")
    original = _known_type(failed.type_name)
    error = _blank(original) if original else RemoteError.__new__(RemoteError)
    RemoteError.__init__(error, actor, failed.type_name, failed.message, failed.traceback)
    return error


def _text(error: BaseException) -> str:
    try:
        return _bounded(str(error))
    except Exception as broken:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<its text raised {type(broken).__name__}>"


def _traceback(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as broken:  # noqa: BLE001 - as above, for causes and notes
        text = f"<its traceback raised {type(broken).__name__}>"
    return _bounded(text)


def _bounded(text: str) -> str:
    """Keep both ends of a text that is too long: what it is, and where it was raised."""
    surplus = len(text) - TEXT_CHARACTERS
    if surplus > 0:
        half = TEXT_CHARACTERS // 2
        text = f"{text[:half]}\n... {surplus:,} characters left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def _known_type(type_name: str) -> type[Exception] | None:
    """Find the class without importing anything: a name off the wire must not run code."""
    module, _, name = type_name.rpartition(".")
    found = getattr(builtins if module == "builtins" else sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _blank(original: type[Exception]) -> RemoteError:
    """Make an instance without calling the original's own __init__, whose arguments are not known here."""
    cls = _dual(original)
    for make in (cls.__new__, BaseException.__new__):  # the second for MemoryError, whose own is refused
        with contextlib.suppress(TypeError):
            return make(cls)
    return RemoteError.__new__(RemoteError)  # a __new__ that wants arguments


def _dual(original: type[Exception]) -> type[RemoteError]:
    """Make a class that is both RemoteError and the original, where their layouts allow it."""
    if issubclass(original, RemoteError):
        return RemoteError
    try:
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__}  # for the next hop
        return type(original.__name__, (RemoteError, original), {"__str__": RemoteError.__str__} | names)
    except TypeError:
        return RemoteError
