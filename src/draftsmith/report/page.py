"""The report of training runs as one page that opens offline: what each run was, its curves, its evaluation."""

from typing import Any

from draftsmith.html_page import document, escape, table
from draftsmith.report.curves import POINTS, RECENT, SMOOTHED
from draftsmith.report.figures import LOG_FROM, Figure, figures
from draftsmith.report.runs import TrainingRun

_STYLE = """
.legend { font-size: .85rem; color: var(--soft); } .legend span { margin-right: .8rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .3rem;
  vertical-align: -.1rem; }
.wide { overflow-x: auto; }
@media print { .legend i { print-color-adjust: exact; } }
"""


def training_page(runs: list[TrainingRun]) -> str:
    """Return the page; everything that comes from files is escaped."""
    summaries = [run.summary for run in runs]
    names = ", ".join(run.name for run in runs)
    parts = [
        f"<h1>Training of {escape(names)}</h1>",
        _head(summaries),
        _evaluations(summaries),
        *(_group(heading, found) for heading, found in figures(runs)),
        _explained(runs),
        _recipes(summaries),
    ]
    return document(f"Training of {names}", "\n".join(part for part in parts if part), _STYLE)


def _head(summaries: list[dict[str, Any]]) -> str:
    facts = [_facts(summary) for summary in summaries]
    if len(facts) == 1:
        cards = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in facts[0].items())
        where = f'<div class="soft">{escape(summaries[0]["run"])}</div>'
        return f'{where}\n<div class="facts">{cards}</div>\n{_dropped(summaries[0])}'
    rows = [[name, *(fact[name] for fact in facts)] for name in facts[0]]
    folders = [["folder", *(summary["run"] for summary in summaries)]]
    return _wide(["", *(summary["name"] for summary in summaries)], rows + folders) + "\n".join(
        _dropped(summary, summary["name"]) for summary in summaries
    )


def _facts(summary: dict[str, Any]) -> dict[str, str]:
    planned, best = summary["planned_steps"], summary["best"]
    steps = f"{summary['steps']:,}"
    if planned is not None:
        steps += f" of {planned:,}" + ("" if summary["steps"] == planned else f" ({summary['steps'] / planned:.0%})")
    lately = summary["lately"]
    return {
        "state": _state(summary),
        "optimizer steps": steps,
        "epoch": f"{summary['epochs']:,} of {_or_unknown(summary['recipe'].get('epochs'))}",
        "tokens seen": f"{summary['tokens_seen']:,}",
        "loss lately": _number(lately.get("loss")),
        "agreement lately, by unroll step": _numbers(lately.get("agreement")),
        "best acceptance length": f"{best['acceptance_length']:.3f} after step {best['step']:,}"
        if best
        else "not measured",
        "best conditional acceptance": _numbers(best.get("conditional_acceptance")) if best else "not measured",
        "draft": summary["draft"] or "none saved yet",
        "tokens/s": _number(summary["tokens_per_second"], ",.0f"),
        "waiting for data": _number(summary["wait_share"], ".1%"),
        "trained parameters": _number(summary["counts"].get("trained_parameters"), ",d"),
    }


def _state(summary: dict[str, Any]) -> str:
    if not summary["finished"]:
        return "unfinished"
    early = summary["planned_steps"] is not None and summary["steps"] < summary["planned_steps"]
    return "ended by patience" if early else "finished"


def _dropped(summary: dict[str, Any], name: str = "") -> str:
    dropped = summary["dropped"]
    said = [f"{count:,} rows: {reason}" for reason, count in dropped["rows"].items()]
    if dropped["samples_without_target"]:
        said.append(f"{dropped['samples_without_target']:,} samples without a target")
    if dropped["truncated"]:
        said.append(f"{dropped['truncated']:,} samples truncated")
    if dropped["share_outside_draft_vocabulary"]:
        share = (
            f"{dropped['share_outside_draft_vocabulary']:.2%} of the supervised tokens are outside the draft vocabulary"
        )
        said.append(share + (", and left out" if dropped["out_of_vocabulary"] == "drop" else ", and kept"))
    known = dropped["samples_without_target"] is not None
    text = "; ".join(said) or ("nothing" if known else "not known before the run is finished")
    return f"<p>{'Left out' if not name else f'{escape(name)} left out'}: {escape(text)}.</p>"


def _evaluations(summaries: list[dict[str, Any]]) -> str:
    found = [summary for summary in summaries if summary["evaluation"]]
    if not found:
        return ""
    several = len(summaries) > 1
    positions = max(len(summary["evaluation"]["offline"]["conditional_acceptance"]) for summary in found)
    offline, real, notes = [], [], []
    for summary in found:
        evaluation, name = summary["evaluation"], f"{summary['name']}: " if several else ""
        figures = evaluation["offline"]
        offline.append([f"{name}conditional acceptance", *(f"{v:.3f}" for v in figures["conditional_acceptance"])])
        offline.append([f"{name}acceptance length", *(f"{v:.3f}" for v in figures["acceptance_length"].values())])
        real += [[name + row[0], *row[1:]] for row in _real(evaluation.get("real"))]
        if not evaluation["of_this_checkpoint"]:
            notes.append(f"{name}the evaluation measured another checkpoint than the one above.")
    body = _wide(["held-out, by draft position", *map(str, range(1, positions + 1))], offline)
    if real:
        body += "\n" + _wide(["greedy decoding", "acceptance length", "tokens/s", "speed-up", "same answers"], real)
    return "<h2>Evaluation</h2>\n" + "".join(f'<p class="warning">{escape(note)}</p>' for note in notes) + body


def _real(real: dict[str, Any] | None) -> list[list[str]]:
    rows = []
    for method in [*real["methods"], *([real["tree"]] if "tree" in real else [])] if real else []:
        drafted = f"draft length {method['draft_length']}" if method["draft_length"] else "plain"
        rows.append(
            [
                "tree of drafts" if "tree" in method else drafted,
                _number(method.get("acceptance_length")) if method["draft_length"] else "",
                f"{method['tokens_per_second']:.1f}",
                f"{method['speed_up']:.2f}",
                f"{method['identical_answers']}/{real['prompts']}" if real and method["draft_length"] else "",
            ]
        )
    return rows


def _group(heading: str, found: list[Figure]) -> str:
    return f'<h2>{escape(heading)}</h2>\n<div class="plots">{"".join(map(_figure, found))}</div>'


def _figure(figure: Figure) -> str:
    keys = "".join(f'<span><i style="background: {colour}"></i>{escape(name)}</span>' for colour, name in figure.legend)
    legend = f'<div class="legend">{keys}</div>' if keys else ""
    return f"<figure><figcaption>{escape(figure.title)}</figcaption>{legend}{figure.svg}</figure>"


def _explained(runs: list[TrainingRun]) -> str:
    widths = sorted({run.curves.width for run in runs})
    steps = " or ".join(f"{width:,}" for width in widths) + (" step" if widths == [1] else " steps")
    return (
        f'<p class="soft">A curve has at most {POINTS} points; here each stands for {steps}. Strong line: the running '
        f"mean, over a {SMOOTHED}th of the curve to either side, less near the ends. Pale: from the least to the "
        f"largest value of a point. Lately: the mean over the last {RECENT}th. An axis whose values span more than a "
        f"factor of {LOG_FROM:.0f} is logarithmic.</p>"
    )


def _recipes(summaries: list[dict[str, Any]]) -> str:
    """Show the recipes' train section, first the settings in which the runs differ."""
    recipes = [summary["recipe"] for summary in summaries]
    counts = [{key: value for key, value in s["counts"].items() if not isinstance(value, dict)} for s in summaries]
    names = ["", *(summary["name"] if len(summaries) > 1 else "" for summary in summaries)]
    parts = []
    differing = [row for row in _beside(recipes) if len(set(row[1:])) > 1]
    if differing:
        parts.append("<h2>What differs</h2>\n" + _wide(names, differing))
    for heading, found in (("Recipe: train", recipes), ("Counts", counts)):
        if any(found):
            parts.append(f"<details><summary>{heading}</summary>{_wide(names, _beside(found))}</details>")
    return "\n".join(parts)


def _beside(values: list[dict[str, Any]]) -> list[list[str]]:
    keys = dict.fromkeys(key for value in values for key in value)
    return [[key, *(_setting(value.get(key)) for value in values)] for key in keys]


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_setting, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "not known"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _wide(columns: list[str], rows: list[list[str]]) -> str:
    return f'<div class="wide">{table(columns, rows)}</div>'


def _number(value: float | None, form: str = ".3f") -> str:
    return "not known" if value is None else format(value, form)


def _numbers(values: list[float] | None) -> str:
    return ", ".join(map(_number, values)) if values else "not known"


def _or_unknown(value: int | None) -> str:
    return "not known" if value is None else f"{value:,}"
