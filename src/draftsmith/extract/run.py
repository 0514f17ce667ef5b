"""extract: samples + verifier -> hidden-state store.

Shards are planned from the lengths before the verifier runs, and batches never cross a shard: the bytes of a
shard depend on nothing else, so a killed run loses the shard in flight and repeats it to the same bytes.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.extract.transformers_engine import transformers_engine
from draftsmith.extract.vllm_engine import vllm_engine
from draftsmith.progress import progress
from draftsmith.recipe import ExtractRecipe, VerifierRecipe
from draftsmith.store.manifest import StageFolder
from draftsmith.store.plan import ShardPlan, is_written, plan_shards
from draftsmith.store.samples import Sample, SampleTable
from draftsmith.store.shard_writer import write_shard
from draftsmith.verifier.boundaries import aux_boundaries
from draftsmith.verifier.facts import VerifierFacts

VLLM_LOG = "vllm.log"  # in the run's folder


def run_extract(
    folder: StageFolder,
    samples_folder: Path,
    facts: VerifierFacts,
    recipe: ExtractRecipe,
    verifier_recipe: VerifierRecipe,
) -> dict[str, Any]:
    """Write the store for all samples; go on where an interrupted run stopped. Returns counts and tokens/s."""
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
    speed = _write_missing_shards(folder.path, plan, samples, boundaries, facts, recipe, verifier_recipe)
    counts = {
        "shards": len(plan),
        "samples": len(samples),
        "tokens": sum(samples.lengths),
        "supervised_tokens": sum(int(samples[row].loss_mask.sum()) for row in range(len(samples))),
    }
    folder.finish(counts, [shard.file for shard in plan])
    return counts | speed  # not in the manifest, which is the same whatever machine wrote it


def _write_missing_shards(
    folder: Path,
    plan: list[ShardPlan],
    samples: SampleTable,
    boundaries: list[int],
    facts: VerifierFacts,
    recipe: ExtractRecipe,
    verifier_recipe: VerifierRecipe,
) -> dict[str, float]:
    """Write the shards that are not there; return tokens/s of the running engine, and the seconds it took to start."""
    missing = [shard for shard in plan if not is_written(folder / shard.file, shard)]
    if not missing:
        return {}
    began = time.perf_counter()
    if recipe.engine == "vllm":
        log, longest = folder.parent / VLLM_LOG, max(samples.lengths)
        engine: Any = vllm_engine(recipe, verifier_recipe, facts, boundaries, log, longest)
    else:
        first = samples[missing[0].rows[0]]
        engine = transformers_engine(first, boundaries, facts, recipe.batch_tokens, verifier_recipe)
    total = sum(samples.lengths)
    done = total - sum(shard.tokens for shard in missing)
    with engine as running, progress("extract", total, "tokens", done) as meter, ThreadPoolExecutor(1) as disk:
        started = time.perf_counter()
        writing: Future[None] | None = None
        for shard in missing:
            members = [samples[row] for row in shard.rows]
            planes = running.planes(members, meter)
            _refuse_non_finite(planes, members)
            if writing is not None:
                writing.result()
            writing = disk.submit(write_shard, folder / shard.file, shard.rows, members, planes)
        if writing is not None:
            writing.result()
        seconds = time.perf_counter() - started
    return {"tokens_per_second": round((total - done) / seconds, 1), "seconds_to_start": round(started - began, 1)}


def _refuse_non_finite(planes: dict[int, Tensor], members: list[Sample]) -> None:
    starts = np.cumsum([0, *(len(sample.input_ids) for sample in members)])
    for boundary, states in planes.items():
        low, high = torch.aminmax(states)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            row = int((~torch.isfinite(states)).any(-1).nonzero()[0])
            name = members[int(np.searchsorted(starts, row, "right")) - 1].id
            raise DraftsmithError(
                f"sample {name!r}: the verifier produced NaN or Inf at boundary {boundary}. Nothing of this "
                "shard was written. Check the verifier's weights, or set verifier.dtype = 'float32'."
            )
