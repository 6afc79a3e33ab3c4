"""Write what `spell.toml` needs: a tiny Qwen3 that has begun to spell English words backwards.

Nothing is downloaded: the words come with reasoning-gym, the model is built and warmed up here.

    pip install "relax-actor[examples]"
    python examples/spell_backward/prepare.py          # about 15 s on one core, 4 MB
    relax-actor launch examples/spell_backward/spell.toml

A fifth of the words, chosen by a checksum of the prompt, is held out. The warm-up is supervised and stops
when a fifth of the sampled answers to held-out words is right: enough signal for RL to start from.
"""

import argparse
import json
import random
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import char_model

SHORTEST, LONGEST = 3, 5  # letters
ENOUGH = 0.2  # share of held-out words spelled right
MOST_STEPS = 200
BATCH = 32
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20

Row = dict[str, str]


def main() -> None:
    """Prepare the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = Path(__file__).parent / "prepared"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    arguments = parser.parse_args()
    train, heldout = split(words())
    write_rows(arguments.folder, train=train, heldout=heldout)
    print(f"prompts: {len(train)} to train on, {len(heldout)} held out, in {arguments.folder}")
    if (arguments.folder / "tokenizer_config.json").exists():  # the last file to be written
        print(f"model: {arguments.folder} is already there")
        return
    model, tokenizer = warmed_up(train, heldout, seed=arguments.seed, threads=arguments.threads)
    char_model.save(arguments.folder, model, tokenizer)
    print(f"model: {arguments.folder}")


def words() -> list[str]:
    """List the words of reasoning-gym's `spell_backward`, lower case, in alphabetical order."""
    import reasoning_gym  # noqa: PLC0415 - takes seconds, and `--help` needs none of it

    dataset = reasoning_gym.create_dataset(
        "spell_backward", seed=0, size=1, min_word_len=SHORTEST, max_word_len=LONGEST
    )
    return sorted({word.lower() for word in dataset.words if word.isascii()})


def split(all_words: list[str]) -> tuple[list[Row], list[Row]]:
    """Make rows of words and part them into training and held-out ones."""
    rows = [{"prompt": f"reverse {word}", "label": word[::-1]} for word in all_words]
    random.Random(1).shuffle(rows)  # so that the first n are a fair sample
    held = [zlib.crc32(row["prompt"].encode()) % 5 == 0 for row in rows]
    train = [row for row, is_held in zip(rows, held, strict=True) if not is_held]
    return train, [row for row, is_held in zip(rows, held, strict=True) if is_held]


def write_rows(folder: Path, **sets: list[Row]) -> None:
    """Write each set to its JSONL file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def warmed_up(train: list[Row], heldout: list[Row], *, seed: int, threads: int) -> tuple[Any, Any]:
    """Build a model and train it on right answers until it has begun to spell."""
    import torch  # noqa: PLC0415 - takes seconds, and `--help` needs none of it

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = char_model.char_tokenizer()
    model = char_model.tiny_qwen3(len(tokenizer), seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.monotonic()
    for step, batch in enumerate(_batches(train, seed), start=1):
        loss = _step(model, tokenizer, optimizer, batch, step)
        if step % 20 == 0:
            right = _share_right(model, tokenizer, heldout[:200])
            print(f"step {step}: loss {loss:.2f}, {right:.0%} right, {time.monotonic() - started:.0f} s")
            if right >= ENOUGH or step >= MOST_STEPS:
                break
    return model, tokenizer


def _batches(rows: list[Row], seed: int) -> Iterator[list[Row]]:
    chance = random.Random(seed)
    while True:
        yield chance.sample(rows, BATCH)


def _step(model: Any, tokenizer: Any, optimizer: Any, batch: list[Row], step: int) -> float:
    """Take one optimizer step on the right answers; return the loss, in nats a token."""
    import torch  # noqa: PLC0415 - loaded by now

    prompts = [_encode(tokenizer, row["prompt"]) for row in batch]
    answers = [_answer(tokenizer, row["label"]) for row in batch]
    ids, mask = _padded([p + a for p, a in zip(prompts, answers, strict=True)])
    targets = torch.full_like(ids, -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        targets[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    loss = model(input_ids=ids, attention_mask=mask, labels=targets).loss
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _share_right(model: Any, tokenizer: Any, rows: list[Row]) -> float:
    """Sample an answer to each prompt at temperature 1; return the share that is right."""
    import torch  # noqa: PLC0415 - loaded by now

    sequences = [_encode(tokenizer, row["prompt"]) for row in rows]
    starts = [len(sequence) for sequence in sequences]
    with torch.inference_mode():
        for _ in range(LONGEST + 1):  # letters and the end token
            ids, mask = _padded(sequences)
            logits = model(input_ids=ids, attention_mask=mask).logits
            last = logits[torch.arange(len(rows)), mask.sum(1) - 1]
            chosen = torch.multinomial(last.softmax(-1), 1)[:, 0].tolist()
            sequences = [[*sequence, token] for sequence, token in zip(sequences, chosen, strict=True)]
    right = 0
    for sequence, start, row in zip(sequences, starts, rows, strict=True):
        answer = _answer(tokenizer, row["label"])
        right += sequence[start : start + len(answer)] == answer
    return right / len(rows)


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _answer(tokenizer: Any, label: str) -> list[int]:
    return [*tokenizer.encode(label, add_special_tokens=False), tokenizer.eos_token_id]


def _padded(sequences: list[list[int]]) -> tuple[Any, Any]:
    """Pad on the right; return ids and mask, int64 [sequences, longest]."""
    import torch  # noqa: PLC0415 - loaded by now

    longest = max(map(len, sequences))
    ids = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
    return ids, mask


if __name__ == "__main__":
    main()
