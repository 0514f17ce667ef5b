"""The samples of a benchmark: taken from a run's store, masked as asked, and written as files that every tool reads."""

import itertools
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from draftsmith.draft.vocabulary import choose_vocabulary, count_supervised
from draftsmith.interop.formats import open_data
from draftsmith.interop.source import SamplePlace, Source
from draftsmith.train.order import epoch_steps
from draftsmith.verifier.facts import VerifierFacts, read_facts
from draftsmith.verifier.head import read_head
from draftsmith.verifier.locate import locate
from draftsmith.verifier.tokens import end_of_turn_ids, load_tokenizer, special_ids

RECIPE = """run_dir = "run"

[verifier]
model = "{verifier}"

[prepare]
input = "{conversations}"
answers = "keep"
"""


def make_run(conversations: Path, verifier: str, folder: Path) -> Path:
    """Prepare and extract conversations under `folder`, unless that is done; return the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(verifier=verifier, conversations=conversations.resolve()))
    for stage in ("prepare", "extract"):
        subprocess.run([sys.executable, "-m", "draftsmith", stage, str(recipe)], check=True, stdout=sys.stderr)
    return folder / "run"


@dataclass(frozen=True)
class BenchmarkSamples:
    """Samples of the train split, written to `folder`; `supervised` is the share of their tokens that is."""

    folder: Path
    source: Source
    facts: VerifierFacts
    lengths: list[int]
    supervised: float

    def epochs(self, capacity: int, epochs: int, seed: int) -> list[list[int]]:
        """Return the packs of `epochs` epochs, in draftsmith's order."""
        steps = [epoch_steps(self.lengths, capacity, 1, seed, epoch) for epoch in range(epochs)]
        return [step[0] for step in itertools.chain.from_iterable(steps)]

    def packs(self, capacity: int, number: int) -> list[list[int]]:
        """Return `number` packs, full ones first: a half-empty one would say nothing about packs of that size."""
        packs = self.epochs(capacity, 1, 0)
        packs.sort(key=lambda pack: -sum(self.lengths[i] for i in pack))
        return list(itertools.islice(itertools.cycle(packs[: max(1, 2 * len(packs) // 3)]), number))


def write_samples(
    folder: Path,
    run: Path,
    verifier: str,
    draft_vocab: int,
    supervised: float | None,
    one_sequence: int | None,
) -> BenchmarkSamples:
    """Write the train split of a run's store; with `one_sequence`, its tokens as one sample of that many tokens."""
    facts = read_facts(locate(verifier))
    data = open_data(run / "store" if (run / "store").is_dir() else run)
    source = Source(data, data.layout.boundaries or [])
    places = source.split("train")
    folder.mkdir(parents=True)
    _write_vocabulary(folder, places, facts, draft_vocab)
    head = read_head(facts)
    written = [(place, source.read(place)) for place in places]
    if one_sequence is not None:
        written = [_joined(written, one_sequence)]
    masks = []
    for number, (place, states) in enumerate(written):
        mask = place.loss_mask.astype(np.int64)
        if supervised is not None:
            mask = (np.arange(len(mask)) >= round(len(mask) * (1 - supervised))).astype(np.int64)
        masks.append(mask)
        tensors = {
            "input_ids": torch.from_numpy(place.input_ids.astype(np.int64)),
            "loss_mask": torch.from_numpy(mask),
            "states": torch.stack(states, dim=1),
            "normed": head.normed(states[-1]),
        }
        save_file(tensors, folder / f"sample-{number}.safetensors")
    lengths = [len(mask) for mask in masks]
    return BenchmarkSamples(folder, source, facts, lengths, sum(int(mask.sum()) for mask in masks) / sum(lengths))


def _write_vocabulary(folder: Path, places: list[SamplePlace], facts: VerifierFacts, size: int) -> None:
    tokenizer = load_tokenizer(facts.folder)
    keep = sorted({*special_ids(tokenizer), *end_of_turn_ids(facts.folder, tokenizer)})
    counts = count_supervised(((place.input_ids, place.loss_mask) for place in places), facts.vocab_size)
    vocabulary = choose_vocabulary(counts, size, keep)
    save_file({"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}, folder / "vocabulary.safetensors")


def _joined(
    samples: list[tuple[SamplePlace, list[torch.Tensor]]], tokens: int
) -> tuple[SamplePlace, list[torch.Tensor]]:
    """Lay samples end to end, again and again, as one sample of `tokens` tokens."""
    total = sum(len(place) for place, _ in samples)
    samples = samples * -(-tokens // total)
    ids = np.concatenate([place.input_ids for place, _ in samples])[:tokens]
    mask = np.concatenate([place.loss_mask for place, _ in samples])[:tokens]
    planes = [torch.cat(parts)[:tokens] for parts in zip(*(states for _, states in samples), strict=True)]
    return replace(samples[0][0], input_ids=ids, loss_mask=mask), planes
