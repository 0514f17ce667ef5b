"""extract: samples + verifier -> hidden-state store.

Shards are planned from the lengths before the verifier runs, and batches never cross a shard: the bytes of a
shard depend on nothing else, so a killed run loses the shard in flight and repeats it to the same bytes.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.progress import Meter, progress
from draftsmith.recipe import ExtractRecipe, VerifierRecipe
from draftsmith.store.manifest import StageFolder
from draftsmith.store.plan import ShardPlan, is_written, plan_shards
from draftsmith.store.samples import Sample, SampleTable
from draftsmith.store.shard_writer import write_shard
from draftsmith.verifier.boundaries import aux_boundaries
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.head import read_head
from draftsmith.verifier.run import RunningVerifier, check_capture, load_verifier

CAPTURE_CHECK_TOKENS = 64


def run_extract(
    folder: StageFolder,
    samples_folder: Path,
    facts: VerifierFacts,
    recipe: ExtractRecipe,
    verifier_recipe: VerifierRecipe,
) -> dict[str, Any]:
    """Write the store for all samples; go on where an interrupted run stopped. Returns the counts."""
    samples = SampleTable(samples_folder)
    boundaries = [*aux_boundaries(recipe.aux_boundaries, facts.num_layers), facts.num_layers]
    plan = plan_shards(samples.lengths, samples.splits, len(boundaries) * facts.hidden_size * 2, recipe.shard_mib << 20)
    folder.begin(
        {
            "boundaries": boundaries,
            "hidden_size": facts.hidden_size,
            "codec": "none",
            "shards": [shard.as_json() for shard in plan],
        }
    )
    _write_missing_shards(folder.path, plan, samples, boundaries, facts, recipe, verifier_recipe)
    counts = {
        "shards": len(plan),
        "samples": len(samples),
        "tokens": sum(samples.lengths),
        "supervised_tokens": sum(int(samples[row].loss_mask.sum()) for row in range(len(samples))),
    }
    folder.finish(counts, [shard.file for shard in plan])
    return counts


def _write_missing_shards(
    folder: Path,
    plan: list[ShardPlan],
    samples: SampleTable,
    boundaries: list[int],
    facts: VerifierFacts,
    recipe: ExtractRecipe,
    verifier_recipe: VerifierRecipe,
) -> None:
    missing = [shard for shard in plan if not is_written(folder / shard.file, shard)]
    if not missing:
        return
    verifier = load_verifier(facts, verifier_recipe)
    first = torch.from_numpy(samples[missing[0].rows[0]].input_ids[:CAPTURE_CHECK_TOKENS].astype(np.int64))
    check_capture(verifier, facts, read_head(facts), first)
    total = sum(samples.lengths)
    done = total - sum(shard.tokens for shard in missing)
    with progress("extract", total, "tokens", done) as meter, ThreadPoolExecutor(1) as disk:
        writing: Future[None] | None = None
        for shard in missing:
            members = [samples[row] for row in shard.rows]
            planes = _states(verifier, members, boundaries, facts, recipe.batch_tokens, meter)
            if writing is not None:
                writing.result()
            writing = disk.submit(write_shard, folder / shard.file, shard.rows, members, planes)
        if writing is not None:
            writing.result()


def _states(
    verifier: RunningVerifier,
    samples: list[Sample],
    boundaries: list[int],
    facts: VerifierFacts,
    batch_tokens: int,
    meter: Meter,
) -> dict[int, Tensor]:
    """Run the verifier over one shard's samples; return its planes [n, H] bfloat16 by boundary."""
    lengths = [len(sample.input_ids) for sample in samples]
    starts = np.cumsum([0, *lengths])
    planes = {b: torch.empty(int(starts[-1]), facts.hidden_size, dtype=torch.bfloat16) for b in boundaries}
    for batch in batches_of_similar_length(lengths, batch_tokens):
        width = max(lengths[i] for i in batch)
        ids_BT = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, i in enumerate(batch):
            ids_BT[row, : lengths[i]] = torch.from_numpy(samples[i].input_ids.astype(np.int64))
        states = verifier.states(ids_BT, boundaries)
        for row, i in enumerate(batch):
            for boundary in boundaries:
                planes[boundary][starts[i] : starts[i + 1]] = states[boundary][row, : lengths[i]]
            _refuse_non_finite(planes, boundaries, slice(starts[i], starts[i + 1]), samples[i].id)
        meter.advance(sum(lengths[i] for i in batch))
    return planes


def _refuse_non_finite(planes: dict[int, Tensor], boundaries: list[int], rows: slice, name: str) -> None:
    for boundary in boundaries:
        low, high = torch.aminmax(planes[boundary][rows])
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise DraftsmithError(
                f"sample {name!r}: the verifier produced NaN or Inf at boundary {boundary}. Nothing of this "
                "shard was written. Check the verifier's weights, or set verifier.dtype = 'float32'."
            )


def batches_of_similar_length(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Group samples by length so that each batch, padded to its longest, has at most `batch_tokens`.

    A longer sample is a batch of its own.

    >>> batches_of_similar_length([5, 2, 9, 2], 6)
    [[1, 3], [0], [2]]
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
