"""Models and servers for tests and benchmarks of the engine `sglang`, on GPUs or rehearsed on a CPU.

Where SGLang is comes from the environment: RELAX_ACTOR_SGLANG_PYTHON (the interpreter), _ARGS (more words for
the server), _ENV (JSON, added to its environment) and _QUICK (0: a plain start).
"""

import importlib.util
import json
import os
import shlex
from pathlib import Path
from typing import Any

import msgspec
from qwen3 import SIZES, Size

from relax_actor.engines.base import Request, SamplingParams
from relax_actor.engines.sglang.around import Surroundings
from relax_actor.engines.sglang.engine import SglangEngine
from relax_actor.engines.sglang.requests import GenerationSettings
from relax_actor.engines.sglang.settings import ServerSettings
from relax_actor.engines.sglang.weights import Updater, UpdateRoute, UpdateSettings, WeightPlacement

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {"tiny": SIZES["tiny"], "0.6b": SIZES["0.6b"], "tiny-moe": SIZES["tiny"]} | {
    "small-moe": Size(1024, 3072, 4, 16, 8)
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}


def python() -> str:
    return os.environ.get("RELAX_ACTOR_SGLANG_PYTHON", "")


def server_options() -> dict[str, Any]:
    """Return the settings of `[rollout]` that lead to SGLang."""
    return {
        "engine": "sglang",
        "sglang_python": python(),
        "sglang_args": tuple(shlex.split(os.environ.get("RELAX_ACTOR_SGLANG_ARGS", ""))),
        "sglang_env": json.loads(os.environ.get("RELAX_ACTOR_SGLANG_ENV", "{}")),
        "sglang_quick_start": os.environ.get("RELAX_ACTOR_SGLANG_QUICK", "1") == "1",
    }


def model_folder(folder: Path, shape: str, *, context: int = 4096, seed: int = 0) -> Any:
    """Write a random Qwen3 with a character tokenizer; return it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    spec = importlib.util.spec_from_file_location(
        "char_model", ROOT / "examples" / "spell_backward" / "char_model.py"
    )
    char_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(char_model)
    tokenizer = char_model.char_tokenizer()
    size = SHAPES[shape]
    is_moe = shape.endswith("moe")
    config = (Qwen3MoeConfig if is_moe else Qwen3Config)(
        **(EXPERTS if is_moe else {}),
        vocab_size=128,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=1.2 / size.hidden**0.5,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        made = (Qwen3MoeForCausalLM if is_moe else Qwen3ForCausalLM)(config)
        model = made.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
    char_model.save(folder, model, tokenizer)
    return model


def weights(model: Any, scale: float = 1.0) -> list[tuple[str, Any]]:
    """Return a model's weights; `scale` of the output layer tells versions apart."""
    return [
        (name, value.detach() * scale if name == "lm_head.weight" else value.detach())
        for name, value in model.named_parameters()
    ]


def logprobs(model: Any, prompt: Any, tokens: Any, scale: float = 1.0) -> Any:
    """Return the model's log-probs of tokens after a prompt, float32 [tokens]."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *map(int, tokens)]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() * scale
        return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()


class Told:
    """What an engine told its actor."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def last(self, kind: str) -> dict[str, Any]:
        return next(event for event in reversed(self.events) if event["kind"] == kind)


def start_engine(folder: Path, log: Path, *, told: Told | None = None, gpu: str = "0", **changes: Any) -> Any:
    """Start a server and the engine round it.

    `changes` are of the server's settings, but for `seed`, `stream`, `update_mode` and `verify`.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    rollout = server_options()
    config = json.loads((folder / "config.json").read_text())
    seed, stream = changes.pop("seed", 11), changes.pop("stream_tokens", 0)
    mode, verify = changes.pop("update_mode", "auto"), changes.pop("verify", False)
    server = ServerSettings(
        model=str(folder),
        python=rollout["sglang_python"],
        context_tokens=config["max_position_embeddings"],
        slots=changes.pop("slots", 32),
        seed=seed,
        dtype="bfloat16" if on_gpu else "float32",
        gpus=(gpu,) if on_gpu else (),
        stream_tokens=stream,
        args=rollout["sglang_args"],
        env=rollout["sglang_env"],
        quick_start=rollout["sglang_quick_start"],
    )
    device = f"cuda:{gpu}" if on_gpu else "cpu"
    placement = WeightPlacement(device=device, server_devices=(device,), ranks=1)
    settings = UpdateSettings(
        verify=verify, digests=log.parent / "digests", routes=(UpdateRoute.IPC,), scratch=log.parent
    )
    told = told or Told()
    return SglangEngine(
        msgspec.structs.replace(server, **changes),
        GenerationSettings(
            seed=seed,
            deterministic=server.deterministic or changes.get("deterministic", False),
            stream=stream > 0,
        ),
        lambda client, found: Updater(client, found, settings, placement=placement),
        vocabulary=config["vocab_size"],
        log=log,
        update_mode=mode,
        around=Surroundings(emit=told.emit),
    )


def requests(count: int, *, prompt_tokens: int, new_tokens: int, first: int = 0) -> list[Request]:
    """Return requests that no stop token ends."""
    params = SamplingParams(max_new_tokens=new_tokens)
    return [
        Request(
            group_id=first + index,
            sample_index=0,
            prompt=tuple(4 + (7 * place + 13 * (first + index)) % 90 for place in range(prompt_tokens)),
            params=params,
        )
        for index in range(count)
    ]
