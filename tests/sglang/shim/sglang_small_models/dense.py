"""Qwen3."""

from sglang.srt.models.qwen3 import Qwen3ForCausalLM as EntryClass  # noqa: F401 - SGLang looks for this name
