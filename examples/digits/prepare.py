"""Write what `digits.toml` needs: a tiny Qwen3-VL that has begun to read handwritten digits.

Nothing is downloaded: the 1,797 pictures of 8x8 pixels come with scikit-learn (UCI's test set of Alpaydin
and Kaynak, 1998), the model is built and warmed up here.

    pip install "relax-actor[examples]"
    python examples/digits/prepare.py          # about 8 s on one core, 22 MB
    relax-actor launch examples/digits/digits.toml

400 pictures are held out. The warm-up sees the right answers of 100 others only, and stops when 30 % of the
sampled answers to held-out pictures are right: enough signal for RL to start from.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import vision_model

HELD_OUT = 400
LABELLED = 100
ENOUGH = 0.3  # share of held-out pictures read right
MOST_STEPS = 60
BATCH = 32
LEARNING_RATE = 2e-3

Row = dict[str, Any]


def main() -> None:
    """Prepare the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = Path(__file__).parent / "prepared"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; default: %(default)s")
    parser.add_argument("--steps", type=int, default=MOST_STEPS, help="at most; default: %(default)s")
    arguments = parser.parse_args()
    rows = digits()
    heldout, train = rows[:HELD_OUT], rows[HELD_OUT:]
    write_rows(arguments.folder, train=train, heldout=heldout)
    print(f"pictures: {len(train)} to train on, {len(heldout)} held out, in {arguments.folder}")
    model = warmed_up(train[:LABELLED], heldout, seed=arguments.seed, steps=arguments.steps)
    vision_model.save(arguments.folder, model, vision_model.word_tokenizer())
    print(f"model: {arguments.folder}")


def digits() -> list[Row]:
    """List scikit-learn's pictures as rows, in a fixed random order."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - takes a second, and `--help` needs none of it

    data = load_digits()
    rows = [_row(image, int(label)) for image, label in zip(data["images"], data["target"], strict=True)]
    random.Random(5).shuffle(rows)
    return rows


def write_rows(folder: Path, **sets: list[Row]) -> None:
    """Write each set to its JSONL file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def warmed_up(labelled: list[Row], heldout: list[Row], *, seed: int, steps: int) -> Any:
    """Build a model and train it on right answers until it has begun to read."""
    import torch  # noqa: PLC0415 - takes seconds, and `--help` needs none of it

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    chance, started = random.Random(seed), time.monotonic()
    model = vision_model.tiny_qwen3_vl(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    for step in range(1, steps + 1):
        loss = _step(model, optimizer, chance.choices(labelled, k=BATCH))
        if step % 5 == 0:
            right = _share_right(model, heldout[:200])
            print(f"step {step}: loss {loss:.2f}, {right:.0%} right, {time.monotonic() - started:.0f} s")
            if right >= ENOUGH:
                break
    return model


def _row(image: Any, label: int) -> Row:
    pixels = [[round(value, 4) for value in patch] for patch in vision_model.patches(image).tolist()]
    media = {"pixel_values": pixels, "image_grid_thw": vision_model.GRID}
    return {"prompt": vision_model.PROMPT, "label": str(label), "image": media}


def _step(model: Any, optimizer: Any, batch: list[Row]) -> float:
    """Take one optimizer step on the right answers; return the loss, in nats."""
    import torch  # noqa: PLC0415 - loaded by now

    targets = torch.tensor([vision_model.WORDS.index(row["label"]) for row in batch])
    loss = torch.nn.functional.cross_entropy(_logits(model, batch), targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _share_right(model: Any, rows: list[Row]) -> float:
    """Sample an answer to each picture at temperature 1; return the share that is right."""
    import torch  # noqa: PLC0415 - loaded by now

    with torch.inference_mode():
        chosen = torch.multinomial(_logits(model, rows).softmax(-1), 1)[:, 0].tolist()
    right = [vision_model.WORDS[token] == row["label"] for token, row in zip(chosen, rows, strict=True)]
    return sum(right) / len(rows)


def _logits(model: Any, rows: list[Row]) -> Any:
    """Return the logits of the answers, float32 [rows, vocabulary]; the special tokens are no answers."""
    import torch  # noqa: PLC0415 - loaded by now

    ids = torch.tensor([[vision_model.WORDS.index(word) for word in row["prompt"].split()] for row in rows])
    images = [row["image"] for row in rows]
    logits = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=torch.tensor([patch for image in images for patch in image["pixel_values"]]),
        image_grid_thw=torch.tensor([grid for image in images for grid in image["image_grid_thw"]]),
        mm_token_type_ids=(ids == vision_model.IMAGE).long(),
        use_cache=False,
        logits_to_keep=1,
    ).logits[:, 0]
    return logits.index_fill(-1, torch.arange(vision_model.VIDEO + 1), -torch.inf)


if __name__ == "__main__":
    main()
