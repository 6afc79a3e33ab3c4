"""Which software a host has: looked up in its environment, nothing of it imported."""

import hashlib
import platform
import re
import sys
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTIONS = ("torch", "sglang", "megatron-core", "transformers")
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
PACKAGES = ("launcher", "relax_actor", "transport")
_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)
_DRIVER = Path("/sys/module/nvidia/version")


def versions() -> dict[str, str]:
    """Return the versions of what a run uses, `cuda` and `nccl` among them; what is not there is left out."""
    found = {name: version for name in DISTRIBUTIONS if (version := _version(name))}
    if nccl := next(filter(None, map(_version, NCCL)), ""):
        found["nccl"] = nccl
    if cuda := _cuda_of_torch():
        found["cuda"] = cuda
    return found


def python() -> str:
    """Return this interpreter's version."""
    return platform.python_version()


def code_digest() -> str:
    """Return a digest of the names and contents of this installation's own files."""
    digest = hashlib.blake2b(digest_size=6)
    for package in PACKAGES:
        spec = find_spec(package)
        root = Path(spec.origin).parent if spec is not None and spec.origin else None
        for file in sorted(root.rglob("*.py")) if root is not None else ():
            digest.update(f"{package}/{file.relative_to(root or file)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def driver() -> str:
    """Return the version of NVIDIA's driver; empty where there is none."""
    with suppress(OSError):
        return _DRIVER.read_text().strip()
    return ""


def _version(distribution: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return ""


def _cuda_of_torch() -> str:
    """Return the CUDA version that torch was built for, from the file that says it."""
    with suppress(OSError, ValueError, ImportError):
        spec = find_spec("torch") if "torch" not in sys.modules else sys.modules["torch"].__spec__
        if spec is not None and spec.origin:
            match = _CUDA.search((Path(spec.origin).parent / "version.py").read_text())
            return match[1] if match else ""
    return ""
