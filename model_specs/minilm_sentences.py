"""Batches of sentences of different lengths for minilm.yaml, as the model's own tokenizer pads them."""

from pathlib import Path

from transformers import AutoTokenizer

BATCHES = [
    [
        "How do I reset my password?",
        "The parcel was left with a neighbour on the second floor.",
        "Thanks!",
    ],
    [
        "A dimension was frozen, and the model answered every question of another length with nonsense.",
        "What time does the museum open on Sundays?",
    ],
    ["One sentence alone needs no padding."],
]


def batches(folder: Path) -> list[tuple[tuple[()], dict[str, object]]]:
    """``(args, kwargs)`` of each call; `folder` is where the model lies."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return [((), dict(tokenizer(batch, padding=True, return_tensors="pt"))) for batch in BATCHES]
