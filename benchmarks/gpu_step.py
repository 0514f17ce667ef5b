"""The training step on one device: is it right there, how fast is it, and what share of the device's peak is that.

    python benchmarks/gpu_step.py                   # on a GPU, under 5 minutes
    python benchmarks/gpu_step.py --unroll 3 7 --json
    python benchmarks/gpu_step.py --small           # small sizes, also on CPU: under 20 seconds

1. Loss and every gradient, in float32, beside the plain dense reference of the tests (tests/dense_reference.py), for
   each way to compute attention and with a sliding window. What is wrong is not measured, and the exit code is 1.
2. The peak: the best rate of a large product of two matrices, in the dtype of the training step.
3. Optimizer steps on synthetic samples of which the last part is supervised, and a dense step beside them: the same
   attention, but every row in every step, and all logits at once, as speculators has it. `share` is of the measured
   peak, by the operations that the step needs (benchmarks/operations.py).
"""

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from operations import step_operations
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.draft.config import DraftConfig
from draftsmith.draft.flex_attention import AttentionBackend
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.rows import plan_rows
from draftsmith.draft.unroll import Pack, unroll
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.recipe import TrainRecipe
from draftsmith.train.data import TrainingPack
from draftsmith.train.optimizers import make_optimizers
from draftsmith.train.processes import Processes
from draftsmith.train.step import PackLoss, optimizer_step
from draftsmith.verifier.head import VerifierHead

TESTS = Path(__file__).resolve().parent.parent / "tests"
LIMIT = 1e-5  # relative error of loss and gradients in float32
DENSITIES = (1.0, 0.5, 0.15)


@dataclass(frozen=True)
class Size:
    """A draft: width, MLP width, heads, key-value heads, head width, vocabularies; and the samples of a pack."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocab: int
    vocab: int
    sample_tokens: int = 2048
    samples: int = 4

    def config(self) -> DraftConfig:
        """Return the draft's configuration: one Llama layer."""
        layer = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=1,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        )
        return DraftConfig(layer, self.draft_vocab, [2, 16, 29], True, self.name, ["LlamaForCausalLM"])


LARGE = (
    Size("Llama-3.1-8B", 4096, 14336, 32, 8, 128, 32000, 128256),
    # The draft's sizes as in SpecForge's configs/kimi-k25-eagle3.json.
    Size("Kimi-K2.5", 7168, 18432, 64, 64, 128, 32000, 163840),
)
SMALL = (Size("small", 192, 384, 4, 2, 64, 1024, 2048, sample_tokens=128, samples=2),)


def check(device: torch.device, backend: AttentionBackend) -> dict[str, float]:
    """Return the largest relative error of loss and gradients, without and with a window, or raise what went wrong."""
    sys.path.append(str(TESTS))
    small, compare = importlib.import_module("small"), importlib.import_module("compare_step")
    lengths = (260, 40, 130) if device.type == "cuda" else (40, 25)  # several tiles of 128 rows; a CPU has none
    samples = []
    for seed, length in enumerate(lengths):
        mask = [int(i % 9 > 3) for i in range(length)]
        samples.append(tuple(part.to(device) for part in small.small_sample(mask, seed)))
    worst = {}
    for name, window in (("no window", 0), ("window", 20)):
        draft = small.small_draft(head_dim=16, window=window).to(device)
        worst[name] = max(compare.step_errors(draft, samples, [1.0, 0.8, 0.64], backend=backend).values())
    return worst


def measure_peak(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Return the best rate of a product of two square matrices, in operations per second."""
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        best = min(best, timed(device, lambda: a @ b))
    return 2 * width**3 / best


def timed(device: torch.device, work: Any) -> float:
    """Return the seconds that `work` takes, the device's queue included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def make_draft(size: Size, device: torch.device) -> Eagle3Draft:
    """Return a draft with torch's own initial weights, made on the device."""
    with torch.device(device):
        draft = Eagle3Draft(size.config(), DraftVocabulary(torch.arange(size.draft_vocab), size.vocab))
    return draft.to(device)


def make_pack(size: Size, masks: list[np.ndarray[Any, np.dtype[np.uint8]]], steps: int, like: Tensor) -> TrainingPack:
    """Return a pack of random tokens and states."""
    plan = plan_rows(masks, steps)
    generator = torch.Generator(like.device).manual_seed(0)
    tokens = sum(map(len, masks))

    def random(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, device=like.device)

    ids = torch.randint(size.vocab, (tokens,), generator=generator, device=like.device)
    pack = Pack(ids, random(len(plan.prefix), 3 * size.hidden), plan)
    return TrainingPack(pack, random(len(plan.targets), size.hidden).bfloat16(), [], tokens)


def supervised_masks(size: Size, density: float) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return the loss masks of a pack: the last part of each sample is supervised."""
    mask = np.zeros(size.sample_tokens, np.uint8)
    mask[round(size.sample_tokens * (1 - density)) :] = 1
    return [mask] * size.samples


class DenseLoss(nn.Module):
    """The dense step with PackLoss's face: a pack of which everything is computed, and a mask [J] on its targets."""

    def __init__(self, like: PackLoss, counted_J: Tensor, precision: torch.dtype, backend: AttentionBackend) -> None:
        super().__init__()
        self.draft, self.step_weights = like.draft, like.step_weights
        self._head_D, self._counted_J, self._precision, self._backend = like._head_D, counted_J, precision, backend

    def forward(self, pack: TrainingPack, targets_in_step: int) -> tuple[Tensor, Tensor]:
        """Return the loss, and float64 [3, K] as PackLoss does, agreement left out."""
        plan, device = pack.pack.plan, self._counted_J.device
        with torch.autocast(device.type, self._precision, enabled=self._precision != torch.float32):
            steps = unroll(self.draft, pack.pack, self._backend)
            q_JD = self._head_D.logits(pack.target_JH).float().softmax(-1)
            logits = [self.draft.lm_head(rows_mH) for rows_mH in steps]
        sums = torch.zeros(3, len(steps), dtype=torch.float64)
        loss = torch.zeros((), device=device)
        for k, (step, logits_mD) in enumerate(zip(plan.steps, logits, strict=True)):
            aimed = torch.from_numpy(step.loss_targets).to(device)
            q_mD = q_JD[aimed]
            kl_m = (torch.special.xlogy(q_mD, q_mD) - q_mD * logits_mD.float().log_softmax(-1)).sum(-1)
            summed = (kl_m * self._counted_J[aimed]).sum()
            loss = loss + self.step_weights[k] * summed / targets_in_step
            sums[0, k], sums[2, k] = float(summed.detach()), int(self._counted_J[aimed].sum())
        return loss, sums


class Bench:
    """One draft on one device with its optimizer; measures steps."""

    def __init__(self, size: Size, device: torch.device, steps: int, backend: AttentionBackend, peak: float) -> None:
        self.size, self.device, self.steps, self.backend, self.peak = size, device, steps, backend, peak
        self.precision = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.draft = make_draft(size, device)
        norm_H = torch.ones(size.hidden, device=device)
        rows_DH = torch.randn(size.draft_vocab, size.hidden, device=device) * size.hidden**-0.5
        self.head = VerifierHead(norm_H, rows_DH, 1e-5, 1.0, None)
        self.recipe = TrainRecipe(step_weights=[1.0] * steps, lr=1e-6)
        self.optimizers = make_optimizers(self.draft, self.recipe)

    def ours(self, density: float, rounds: int) -> dict[str, Any]:
        """Measure draftsmith's step."""
        pack = make_pack(self.size, supervised_masks(self.size, density), self.steps, self.head.norm_H)
        return self._measure("draftsmith", density, self._pack_loss(), pack, len(pack.target_JH), rounds)

    def dense(self, density: float, rounds: int) -> dict[str, Any]:
        """Measure the dense step."""
        pack, counted_J = self._dense_pack(density)
        module = DenseLoss(self._pack_loss(), counted_J, self.precision, self.backend)
        return self._measure("dense", density, module, pack, int(counted_J.sum()), rounds)

    def disagreement(self, density: float) -> float:
        """Return the relative difference of the two steps' losses on the same samples, in float32."""
        everything, counted_J = self._dense_pack(density)
        plan = plan_rows(supervised_masks(self.size, density), self.steps)
        rows, places = (
            torch.from_numpy(np.searchsorted(of_all, own)).to(self.device)
            for of_all, own in (
                (everything.pack.plan.prefix, plan.prefix),
                (everything.pack.plan.targets, plan.targets),
            )
        )
        pack = TrainingPack(
            Pack(everything.pack.input_ids, everything.pack.aux[rows], plan),
            everything.target_JH[places],
            [],
            everything.tokens,
        )
        ours = PackLoss(self.draft, self.head, self.recipe.step_weights, "kl", torch.float32, self.backend)
        dense = DenseLoss(ours, counted_J, torch.float32, self.backend)
        targets = len(plan.targets)
        losses = [float(module(p, targets)[0].detach()) for module, p in ((ours, pack), (dense, everything))]
        return abs(losses[0] - losses[1]) / losses[1]

    def _pack_loss(self) -> PackLoss:
        return PackLoss(self.draft, self.head, self.recipe.step_weights, "kl", self.precision, self.backend)

    def _dense_pack(self, density: float) -> tuple[TrainingPack, Tensor]:
        pack = make_pack(self.size, supervised_masks(self.size, 1.0), self.steps, self.head.norm_H)
        wanted = plan_rows(supervised_masks(self.size, density), self.steps).targets
        counted = np.isin(pack.pack.plan.targets, wanted)
        return pack, torch.from_numpy(counted).to(self.device)

    def _measure(
        self, step: str, density: float, module: Any, pack: TrainingPack, targets: int, rounds: int
    ) -> dict[str, Any]:
        asked = {"draft": self.size.name, "unroll": self.steps, "step": step, "density": density}
        asked["attention"] = self.backend
        operations = sum(step_operations(self.draft.config, pack.pack.plan).values())

        def work() -> None:
            optimizer_step(module, module, [pack], targets, self.optimizers, 1.0, Processes(0, 1, 0))

        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            seconds = [timed(self.device, work) for _ in range(2 + rounds)][2:]  # the first ones compile
        except torch.OutOfMemoryError:
            return {**asked, "failed": "did not fit in the device's memory"}
        finally:
            self.draft.zero_grad(set_to_none=True)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        median = statistics.median(seconds)
        return {
            **asked,
            "ms": round(1000 * median, 2),
            "tokens_per_second": round(pack.tokens / median),
            "tera_operations": round(operations / 1e12, 4),
            "share_of_peak": round(operations / median / self.peak, 4),
            "peak_gib": round(torch.cuda.max_memory_allocated(self.device) / 2**30, 2)
            if self.device.type == "cuda"
            else None,
        }


def run_checks(device: torch.device) -> dict[str, Any]:
    """Check each backend that runs on the device; `passed` says which are right."""
    backends: list[AttentionBackend] = ["blocks", "flex"] if device.type == "cuda" else ["blocks"]
    found: dict[str, Any] = {}
    for backend in backends:
        try:
            errors = check(device, backend)
            found[backend] = {"errors": errors, "passed": max(errors.values()) < LIMIT}
        except Exception as error:  # a backend that does not run here is a finding; the other is still measured
            lines = str(error).strip().splitlines() or [""]
            found[backend] = {"failed": f"{type(error).__name__}: {lines[0][:200]}", "passed": False}
    return found


def measure(size: Size, arguments: argparse.Namespace, device: torch.device, backends: list[Any], peak: float) -> Any:
    """Yield the rows of a draft's table until the time is over."""
    rounds = 3 if device.type == "cuda" else 2
    for steps in arguments.unroll:
        for backend in backends:
            bench = Bench(size, device, steps, backend, peak)
            if arguments.small:
                yield {"draft": size.name, "unroll": steps, "disagreement": bench.disagreement(0.5)}
            jobs = [(bench.ours, density) for density in DENSITIES]
            # One dense step: it costs the same whatever is supervised. The second backend: one row, beside the first's.
            jobs = jobs[:1] if backend != backends[0] else [*jobs, (bench.dense, DENSITIES[0])]
            for job, density in jobs:
                if time.perf_counter() > arguments.deadline:
                    yield {"draft": size.name, "unroll": steps, "failed": f"left out: {arguments.seconds} s are over"}
                    return
                yield job(density, rounds)
            del bench, jobs


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "disagreement" in row:
        return f"{row['draft']}: the two steps' losses differ by {row['disagreement']:.1e}"
    if "failed" in row:
        return f"{row['draft']:13} K={row['unroll']} {row.get('step', ''):10} {row['failed']}"
    memory = "" if row["peak_gib"] is None else f"{row['peak_gib']:8.1f}"
    return (
        f"{row['draft']:13} K={row['unroll']} {row['step']:10} {row['attention']:6} {row['density']:7.0%} "
        f"{row['tokens_per_second']:12,} {row['ms']:10,.1f} {row['share_of_peak']:7.1%} {memory}"
    )


def main() -> None:
    """Print the checks and the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small sizes")
    parser.add_argument("--unroll", type=int, nargs="+", default=[3], help="numbers of unroll steps K")
    parser.add_argument("--seconds", type=int, default=270, help="begin no measurement after so long")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    arguments.deadline = time.perf_counter() + arguments.seconds
    device = torch.device(arguments.device)
    if device.type == "cpu" and not arguments.small:
        parser.error("no GPU here: the full sizes would take hours; --small measures small ones")
    say = (lambda _: None) if arguments.json else (lambda text: print(text, flush=True))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    say(f"{name}, torch {torch.__version__}")
    checks = run_checks(device)
    for backend, found in checks.items():
        errors = found.get("errors", {})
        said = found.get("failed") or ", ".join(f"{case} {error:.1e}" for case, error in errors.items())
        say(f"{'right' if found['passed'] else 'WRONG'}: attention = {backend}: {said} (limit {LIMIT:.0e})")
    peak = measure_peak(device, dtype, 1024 if arguments.small else 8192)
    say(f"measured peak: {peak / 1e12:,.2f} TFLOP/s in {str(dtype).removeprefix('torch.')}")
    say(f"{'draft':13} {'':3} {'step':10} {'':6} {'trained':>7} {'tokens/s':>12} {'ms':>10} {'share':>7} {'GiB':>8}")
    backends = [backend for backend in ("flex", "blocks") if checks.get(backend, {}).get("passed")]
    rows = []
    for size in SMALL if arguments.small else LARGE:
        for row in measure(size, arguments, device, backends, peak):
            rows.append(row)
            say(line(row))
    if arguments.json:
        result = {"device": name, "torch": torch.__version__, "checks": checks, "peak": peak, "rows": rows}
        print(json.dumps(result))
    wrong = [row for row in rows if row.get("disagreement", 0) > LIMIT]
    sys.exit(1 if wrong or not all(found["passed"] for found in checks.values()) else 0)


if __name__ == "__main__":
    main()
