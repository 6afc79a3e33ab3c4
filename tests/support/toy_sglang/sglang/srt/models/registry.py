"""Knows which modules it was told to skip."""

import os

SKIPPED = os.environ.get("SGLANG_DISABLED_MODEL_ARCHS")
