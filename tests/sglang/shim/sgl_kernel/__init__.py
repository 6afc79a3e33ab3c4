"""Stands in for SGLang's kernels on a CPU, for which no wheel exists.

SGLang imports names of them while it is loaded, and on a CPU without AMX calls none for dense and MoE text
models. So each name is a function that says it is missing when it is called.

SGLang also has CUDA lock the memory into which it writes routed experts; here there is nothing to lock.
"""

import torch

__version__ = "0.0.0+stand-in"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPUs")

    return missing


class _Cudart:
    """What SGLang calls of the CUDA runtime."""

    class cudaError:  # noqa: N801 - its name
        success = 0

    @staticmethod
    def cudaHostRegister(*_args):  # noqa: N802 - its name
        return 0

    @staticmethod
    def cudaHostUnregister(*_args):  # noqa: N802 - its name
        return 0


if not torch.cuda.is_available():
    torch.cuda.cudart = lambda: _Cudart
