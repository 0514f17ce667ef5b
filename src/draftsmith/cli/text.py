"""The text of a sample as a person reads it: what is supervised is green on a terminal, in ⟦ ⟧ elsewhere."""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

if TYPE_CHECKING:
    from draftsmith.pipeline import Pipeline


def print_text(where: str, tokens: Any, mask: Any, tokenizer: Any) -> None:
    """Print one sample, special tokens included."""
    console = Console(markup=False, highlight=False, emoji=False)
    print(f"{where}: {len(tokens):,} tokens, {int(np.count_nonzero(mask)):,} supervised")
    edges = [0, *(np.flatnonzero(np.diff(mask != 0)) + 1).tolist(), len(mask)]
    for start, end in pairwise(edges):
        text = tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False)
        if console.is_terminal:
            console.print(text, style="green" if mask[start] else "dim", end="", soft_wrap=True)
        else:
            print(f"⟦{text}⟧" if mask[start] else text, end="")
    print()


def print_samples(pipeline: "Pipeline", count: int) -> None:
    """Print the first samples that `prepare` made."""
    from draftsmith.store.samples import SampleTable
    from draftsmith.verifier.tokens import load_tokenizer

    samples = SampleTable(pipeline.samples.path)
    tokenizer = load_tokenizer(pipeline.facts.folder)
    for row in range(min(count, len(samples))):
        sample = samples[row]
        print_text(sample.id, sample.input_ids, sample.loss_mask, tokenizer)


def print_stored_sample(path: Path, number: int, verifier: str | None) -> None:
    """Print the sample with this number of some hidden states; raise BadInput if there is none that can be read."""
    from draftsmith.errors import BadInput
    from draftsmith.interop.formats import open_data
    from draftsmith.verifier.locate import locate
    from draftsmith.verifier.tokens import load_tokenizer

    data = open_data(path)
    name = verifier or data.layout.verifier
    if name is None:
        raise BadInput(f"{path}: the files do not name their verifier; name it with --verifier")
    for file in range(len(data)):
        for sample in data.open(file).samples:
            if sample.number == number:
                with sample.content.open() as opened:
                    tokens, mask = sample.read_tables(opened)
                print_text(sample.where, tokens, mask, load_tokenizer(locate(name)))
                return
    raise BadInput(f"{path}: no readable sample with the number {number}")
