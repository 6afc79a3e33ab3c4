"""AdamW on float32 master weights, for a model that computes in a shorter format.

At the learning rates of reinforcement learning most updates are smaller than the spacing of bfloat16
numbers: without masters they would round away.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from relax_actor.config import TrainConfig


def freeze(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """Freeze what matches and return the rest, by name.

    Raises:
        ValueError: a pattern matches nothing, or nothing is left.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(f"`train.frozen` pattern {pattern!r} matches none of {len(names)} parameters")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, name) for pattern in patterns))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError("`train.frozen` freezes every parameter")
    return trained


class MasterOptimizer:
    """Gathers gradients in float32, clips, steps, and copies the result into the model.

    A float32 parameter is its own master.

    Args:
        parameters: those that are trained, by name; the order is kept.
        config: rates of AdamW and the bound of the gradient's norm.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig) -> None:
        self._parameters = dict(parameters)
        self._masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        self._max_norm = config.max_grad_norm
        self._adamw = torch.optim.AdamW(
            list(self._masters.values()),
            lr=config.learning_rate,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def clear(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def gather(self) -> None:
        """Add the gradients of one backward pass to the masters'."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the gradient."""
        for master in self._masters.values():
            if master.grad is not None:
                master.grad.mul_(factor)

    def clip(self) -> float:
        """Scale the gradient to at most `max_grad_norm` (0: leave it); return its norm before."""
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._max_norm > 0 and torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._max_norm, norm)
        return norm.item()

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradient and refresh the model."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._refresh_model()

    def state(self) -> dict[str, Tensor]:
        """Return masters and moments by `kind/parameter name`; the tensors are the live ones."""
        state = {f"master/{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for kind, value in self._adamw.state.get(master, {}).items():
                state[f"{kind}/{name}"] = value
        return state

    def tensors(self) -> Iterator[Tensor]:
        """Yield masters and moments, the live ones."""
        for master in self._masters.values():
            yield master
            yield from (value for value in self._adamw.state.get(master, {}).values())

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned.

        Raises:
            ValueError: it is of other parameters.
        """
        expected = {f"master/{name}" for name in self._masters}
        found = {key for key in state if key.startswith("master/")}
        if expected != found:
            raise ValueError(f"the optimizer state is of other parameters: {sorted(expected ^ found)[:4]}")
        self._adamw.state.clear()
        for name, master in self._masters.items():
            master.copy_(state[f"master/{name}"])
            self._load_moments(name, master, state)
        self._refresh_model()

    def _load_moments(self, name: str, master: Tensor, state: Mapping[str, Tensor]) -> None:
        if f"step/{name}" not in state:  # this parameter was never stepped
            return
        moments = {kind: state[f"{kind}/{name}"].to(master.device) for kind in ("exp_avg", "exp_avg_sq")}
        self._adamw.state[master] = {"step": state[f"step/{name}"].to(master.device), **moments}

    def _refresh_model(self) -> None:
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())
