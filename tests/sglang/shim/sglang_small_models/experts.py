"""Qwen3 with a mixture of experts."""

from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM as EntryClass  # noqa: F401 - the same
