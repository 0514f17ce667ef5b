"""Which objective gives the longest held-out acceptance at equal compute: the same runs over several seeds.

    python benchmarks/objectives.py --data runs/benchmark/run/store             # made by benchmarks/train.py
    python benchmarks/objectives.py --data STORE --objectives kl lk --seeds 5 --set train.epochs=10 --jobs 2

Every run is `draftsmith train` and `draftsmith evaluate` on the store's own split, with one thread; only objective and
seed differ. The last draft of each run is measured on the whole validation split (offline, see docs/evaluate.md); the
length is that of the longest of evaluate.draft_lengths. Printed: mean, and smallest to largest over the seeds; CPU
seconds of training.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
RECIPE = """run_dir = "{run_dir}"
seed = {seed}

[verifier]
model = "{verifier}"

[data]
path = "{data}"

[train]
objective = "{objective}"
accept_unvalidated = true
measure_samples = 0

[evaluate]
prompts = 0
"""


def draftsmith(verb: str, recipe: Path, assignments: list[str]) -> tuple[dict[str, Any], float]:
    """Run a verb in a process of its own; return its JSON and its CPU seconds."""
    settings = [part for assignment in assignments for part in ("--set", assignment)]
    log = recipe.with_name(f"{verb}.log")
    with log.open("w") as errors, recipe.with_name(f"{verb}.json").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "draftsmith", verb, str(recipe), "--json", *settings],
            stdout=output,
            stderr=errors,
            env={**os.environ, **ONE_THREAD},
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"draftsmith {verb} failed:\n{log.read_text(errors='replace')[-2000:]}")
        output.seek(0)
        return json.load(output), used.ru_utime + used.ru_stime


def one_run(folder: Path, objective: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and measure one draft."""
    folder.mkdir()
    recipe = folder / "recipe.toml"
    values = {"run_dir": folder / "run", "seed": seed, "objective": objective, "verifier": arguments.verifier}
    recipe.write_text(RECIPE.format(data=arguments.data.resolve(), **values))
    _, cpu_seconds = draftsmith("train", recipe, arguments.set)
    offline = draftsmith("evaluate", recipe, arguments.set)[0]["offline"]
    return {
        "objective": objective,
        "seed": seed,
        "acceptance": offline["conditional_acceptance"][0],
        "acceptance_length": list(offline["acceptance_length"].values())[-1],
        "cpu_seconds": round(cpu_seconds, 1),
    }


def table(runs: list[dict[str, Any]], objectives: list[str]) -> str:
    """Return one line per objective."""
    lines = [f"{'':4} {'first position':>14} {'of seeds':>18} {'length':>8} {'of seeds':>18} {'CPU s':>7}"]
    for objective in objectives:
        own = [run for run in runs if run["objective"] == objective]
        first = [run["acceptance"] for run in own]
        length = [run["acceptance_length"] for run in own]
        seconds = statistics.mean(run["cpu_seconds"] for run in own)
        spreads = [f"{min(values):.4f} to {max(values):.4f}" for values in (first, length)]
        lines.append(
            f"{objective:4} {statistics.mean(first):14.4f} {spreads[0]:>18} {statistics.mean(length):8.4f} "
            f"{spreads[1]:>18} {seconds:7.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a hidden-state store")
    parser.add_argument("--verifier", default="smollm2", help="the verifier of the store")
    parser.add_argument("--objectives", nargs="+", default=["kl", "ce", "tv", "lk"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of draftsmith")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    wanted = [(objective, seed) for seed in range(arguments.seeds) for objective in arguments.objectives]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.jobs) as pool:
        runs = list(pool.map(lambda one: one_run(Path(temporary) / f"{one[0]}-{one[1]}", *one, arguments), wanted))
    print(json.dumps(runs) if arguments.json else table(runs, arguments.objectives))


if __name__ == "__main__":
    main()
