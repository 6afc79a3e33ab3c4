"""Replicas compare what they have installed, by a digest that SGLang computes on its GPUs.

The first replica to install a version writes its digest down, the others must have the same. Digests can be
compared where model, SGLang and the number of ranks are the same, which is what a topology says. A file is
whole or not there, and never changes, whoever dies meanwhile.
"""

import contextlib
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_actor.engines.sglang.weights.errors import DigestError
from relax_actor.ids import PolicyVersion

KEEP_VERSIONS = 16
"""Digests of older versions are removed."""


class Digests:
    """What replicas have installed, as files of one folder.

    Args:
        folder: of one launch of a run: another launch may use a version's number again.
        topology: of this server; letters, digits, `.`, `_` and `-`.
    """

    def __init__(self, folder: Path, topology: str) -> None:
        self._folder, self._topology = folder, topology

    def agree(self, version: PolicyVersion, digest: str) -> None:
        """Write a digest down, or compare it with the one that is there.

        Raises:
            DigestError: they differ.
            OSError: the folder cannot be written to.
        """
        expected = self._recorded(version, digest)
        if expected != digest:
            raise DigestError(version, self._topology, expected, digest)
        self._forget(version)

    def _recorded(self, version: PolicyVersion, digest: str) -> str:
        """Return what is written down of a version: this, where there was nothing."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{version}.{self._topology}"
        fresh = self._folder / f".{path.name}.{uuid.uuid4().hex}"
        fresh.write_text(digest)
        try:
            os.link(fresh, path)  # fails where it exists, and is never half there
        except FileExistsError:
            return path.read_text()
        finally:
            fresh.unlink()
        return digest

    def _forget(self, newest: PolicyVersion) -> None:
        for path in self._folder.glob(f"*.{self._topology}"):
            number = path.name.partition(".")[0]
            if number.isdecimal() and int(number) <= newest - KEEP_VERSIONS:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()


def topology(version: tuple[int, ...], ranks: int, model_path: Path | None) -> str:
    """Return what servers have in common whose digests can be compared."""
    model = "" if model_path is None else model_path.name
    words = ("sglang", ".".join(map(str, version)), f"ranks{ranks}", model)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(filter(None, words)))


def digest_of(answer: Any) -> str:
    """Read the answer to `/weights_checker`.

    Raises:
        ValueError: it has no digest.
    """
    digest = answer.get("per_engine_checksum") if isinstance(answer, Mapping) else None
    if not isinstance(digest, str) or not digest:
        raise ValueError(f"the server tells no digest: {str(answer)[:200]}")
    return digest
