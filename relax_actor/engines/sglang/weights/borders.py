"""Which policy version sampled a token, where SGLang's own word is too early by one. Pure.

With overlapped scheduling (SGLang's default) one decode step is under way whenever the server is paused. A
pause in place leaves its result for later, and what is counted later is counted as the new version's,
although the old weights have sampled it. Source: SGLang 0.5.23's scheduler, and log-probs of both versions.
"""

from collections.abc import Sequence

from relax_actor.ids import PolicyVersion


def as_sampled(versions: Sequence[PolicyVersion], submitted: PolicyVersion) -> list[PolicyVersion]:
    """Give the first token after each in-place update to the version before.

    A request that had no step under way when the server was paused (it was running while others were
    prefilled, or waited) loses one token of the new version to the old one; no token is said to be newer
    than it is.

    Args:
        versions: of each token, as SGLang says.
        submitted: the version that was installed when the request was submitted.
    """
    return [submitted, *versions[:-1]] if versions else []
