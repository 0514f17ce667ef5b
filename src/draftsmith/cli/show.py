"""Results of the stages as a person reads them."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith.evaluate.server_page import difference_text
from draftsmith.pipeline import Outcome

PLACES = 3  # shown of each code
_BAR_WIDTH = 30


def show(outcome: Outcome, console: Console) -> None:
    """Print one stage's outcome."""
    state = "[dim]up to date[/dim]" if outcome.up_to_date else "done" if outcome.passed else "[red]not passed[/red]"
    _line(console, f"[bold]{outcome.stage}[/bold]: {state}  {outcome.folder}")
    _SHOW[outcome.stage](outcome.result, console)


def _show_prepare(counts: dict[str, Any], console: Console) -> None:
    _line(
        console,
        f"  {counts['rows']:,} rows -> {counts['samples']:,} samples ({counts['train']:,} train, "
        f"{counts['validation']:,} validation), {counts['tokens']:,} tokens, "
        f"{counts['supervised_tokens']:,} supervised; {counts['unfinished']:,} answers cut at the limit, "
        f"{counts['truncated']:,} samples truncated",
    )
    for key, what in (
        ("per_turn", "conversations with a sample per answer: the chat template renders earlier turns otherwise"),
        ("windowed", "samples divided into windows"),
        ("without_reasoning", "conversations whose reasoning the chat template does not write"),
    ):
        if counts[key]:
            _line(console, f"  {counts[key]:,} {what}")
    for mode, count in counts["template_modes"].items():
        _line(console, f"  [yellow]{count:,} conversations rendered with {mode}[/yellow]: serve with the same")
    for reason, count in counts["dropped"].items():
        _line(
            console,
            f"  [yellow]dropped {count:,}[/yellow]: {reason} (first: {counts['first_dropped'][reason]})",
        )
    if not counts["dropped"]:
        _line(console, "  dropped 0")
    if not counts["coverage"]:
        return
    _line(console, "  supervised tokens that a draft vocabulary of each size covers:")
    for size, share in counts["coverage"].items():
        _line(console, f"    {int(size):>7,} {'#' * round(_BAR_WIDTH * share):<{_BAR_WIDTH}} {share:.1%}")


def _show_extract(counts: dict[str, Any], console: Console) -> None:
    _line(
        console,
        f"  {counts['samples']:,} samples, {counts['tokens']:,} tokens in {counts['shards']:,} shards",
    )
    if "tokens_per_second" in counts:
        rate, start = counts["tokens_per_second"], counts["seconds_to_start"]
        _line(console, f"  {rate:,.0f} tokens/s, after {start:.0f} s in which the engine started")


def _show_validate(report: dict[str, Any], console: Console) -> None:
    if report["depth"] == "head":
        _show_head(report, console)
        return
    counts = f"{report['samples']:,} samples in {report['files']:,} files"
    tokens = f"{report['tokens']:,} tokens, {report['supervised_tokens']:,} supervised"
    _line(console, f"  {report['title']}: {counts}, {tokens}")
    _line(console, f"  boundaries {report['boundaries'] or 'not known'} (from: {report['boundaries_from'] or '-'})")
    _show_findings(report, console)
    if report.get("agreement"):
        table = Table(title="does the last state predict the next token?", title_justify="left")
        table.add_column("hypothesis")
        table.add_column("agreement", justify="right")
        for name, share in report["agreement"].items():
            table.add_row(name, f"{share:.1%}")
        console.print(table)
        _line(
            console,
            f"  {report['positions']:,} of {report['supervised_positions']:,} supervised positions looked at",
        )
    if report.get("spot"):
        spot = report["spot"]
        pairs = zip(spot["boundaries"], spot["relative_differences"], strict=True)
        held = ", ".join(f"{'none' if b is None else b} ({difference:.2%})" for b, difference in pairs)
        _line(console, f"  spot check on {spot['samples']} samples: boundaries held (difference): {held}")
    verdict = "passed" if report["passed"] else "did not pass"
    _line(console, f"  {verdict} at depth {report['depth']}")


def _show_head(report: dict[str, Any], console: Console) -> None:
    if "aux_boundaries" in report:
        _line(
            console,
            f"  {report['title']}, {report['format']} format: {report['tensors']} tensors, draft vocabulary "
            f"{report['draft_vocab_size']:,}, aux boundaries {report['aux_boundaries']}",
        )
    _show_findings(report, console)
    _line(console, "  passed" if report["passed"] else "  did not pass")


def _show_findings(report: dict[str, Any], console: Console) -> None:
    """Print a row per code with its count, and the first places with what was found."""
    if not report["counts"]:
        return
    first: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        first.setdefault(finding["code"], []).append(finding)
    for code, findings in first.items():
        colour = "red" if findings[0]["severity"] == "error" else "yellow"
        count = report["counts"][code]
        title = f"[{colour}]{code} {findings[0]['severity']}[/{colour}] {findings[0]['title']}: {count:,}"
        _line(console, f"  {title}")
        for finding in findings[:PLACES]:
            text = f"    {finding['where']}: wanted {finding['expected']}; found {finding['found']}"
            _line(console, text, markup=False)
        if count > PLACES:
            _line(console, f"    ... and {count - PLACES:,} more")
        _line(console, f"    to do: {findings[0]['todo']}", markup=False)


def _show_train(counts: dict[str, Any], console: Console) -> None:
    _line(
        console,
        f"  {counts['steps']:,} steps, {counts['epochs']:,} epochs of {counts['tokens_per_epoch']:,} tokens "
        f"({counts['targets_per_epoch']:,} targets), last loss {counts['final_loss']:.4f}",
    )
    _line(
        console,
        f"  draft vocabulary {counts['draft_vocab_size']:,} covers {counts['vocabulary_coverage']:.2%} of the "
        f"supervised tokens; {counts['trained_parameters'] / 1e6:.1f} M trained parameters; packs are "
        f"{counts['pack_fill']:.1%} full",
    )

    if counts.get("best"):
        best = counts["best"]
        _line(
            console,
            f"  best on held-out samples: acceptance length {best['acceptance_length']:.3f} after step {best['step']:,}"
            + (f"; stopped early, {counts['planned_steps']:,} steps planned" if _stopped_early(counts) else ""),
        )


def _stopped_early(counts: dict[str, Any]) -> bool:
    return bool(counts["steps"] < counts["planned_steps"])


def _show_evaluate(result: dict[str, Any], console: Console) -> None:
    offline = result["offline"]
    _line(
        console,
        f"  offline: {offline['chains']:,} chains on {offline['samples']:,} held-out samples; "
        f"{offline['targets_outside_draft_vocabulary']:,} targets outside the draft vocabulary",
    )
    positions = range(1, len(offline["reached"]) + 1)
    table = Table(title="acceptance by draft position, held-out conversations", title_justify="left")
    for column in ("", *(f"{k}" for k in positions)):
        table.add_column(column, justify="right" if column else "left")
    shares = [f"{share:.3f}" for share in offline["conditional_acceptance"]]
    lengths = [f"{length:.3f}" for length in offline["acceptance_length"].values()]
    table.add_row("conditional, offline", *shares)
    table.add_row("length up to here, offline", *lengths)
    real = result.get("real")
    if real:
        longest = max(real["methods"], key=lambda method: int(method["draft_length"]))
        decoded = [_number(share) for share in longest["conditional_acceptance"]]
        table.add_row("conditional, decoded", *decoded, *[""] * (len(shares) - len(decoded)))
    console.print(table)
    if real:
        _show_decoding(real, console)


def _show_decoding(real: dict[str, Any], console: Console) -> None:
    table = Table(title=f"greedy decoding of {real['prompts']} held-out prompts", title_justify="left")
    for column in ("draft length", "acceptance length", "tokens/s", "speed-up", "same answers"):
        table.add_column(column, justify="right")
    methods = [*real["methods"], *([real["tree"]] if "tree" in real else [])]
    for method in methods:
        length = method["draft_length"]
        table.add_row(
            _method(method),
            _number(method["acceptance_length"]) if length else "",
            f"{method['tokens_per_second']:.1f}",
            f"{method['speed_up']:.2f}",
            f"{method['identical_answers']}/{real['prompts']}" if length else "",
        )
    console.print(table)
    for method in methods:
        for difference in method["differences"]:
            cause = "a tie within rounding" if difference["rounding_tie"] else "[red]NOT a rounding tie[/red]"
            _line(
                console,
                f"  draft length {_method(method)}, {difference['prompt']}: differs from token "
                f"{difference['token']} on, where the two best logits are {difference['logit_gap']:.1e} apart: {cause}",
            )
    best = real["fastest_draft_length"]
    _line(console, f"  fastest here: {f'draft length {best}' if best else 'plain decoding'}")


def show_server(result: dict[str, Any], console: Console) -> None:
    """Print what a server measured, three ways, and what to look at."""
    _line(console, f"{result['head']} in vLLM ({result['dtype']}), draft length {result['draft_length']}")
    table = Table(title="acceptance length, conditional acceptance by position", title_justify="left")
    for column in ("prompts", "", "length", "by position", "tokens/s plain", "with head", "speed-up", "same"):
        table.add_column(column, justify="right" if column not in ("prompts", "", "by position") else "left")
    for row in result["sets"]:
        for way, figures in (("offline", row["offline"]), ("own decoding", row["decoded"]), ("vLLM", row)):
            rates = figures.get("tokens_per_second", {})
            table.add_row(
                f"{row['set']} ({row['prompts']})" if way == "offline" else "",
                way,
                _number(figures["acceptance_length"]),
                " ".join(_number(share) for share in figures["conditional_acceptance"]),
                f"{rates['plain']:.1f}" if "plain" in rates else "",
                f"{rates['speculative']:.1f}" if rates else "",
                f"{figures['speed_up']:.2f}" if figures.get("speed_up") else "",
                f"{figures['identical_answers']}/{row['prompts']}" if rates else "",
            )
    console.print(table)
    for row in result["sets"]:
        agreement = row["agreement"]
        strictly = "" if agreement["within_0.03"] else ", a position differs by more than 0.03, on few drafts"
        verdict = f"agree{strictly}" if agreement["agrees"] else "[red]do not agree[/red]"
        _line(console, f"  {row['set']}: training and serving {verdict}")
        for advice in row["look_at"]:
            _line(console, f"    look at {advice['cause']}: {advice['text']}", markup=False)
        for difference in row["differences"]:
            _line(console, f"    {difference_text(difference)}", markup=False)


def _method(method: dict[str, Any]) -> str:
    if "tree" in method:
        shape = method["tree"]
        return f"tree {shape['depth']}/{shape['width']}/{shape['total']}"
    return str(method["draft_length"] or "plain")


def _line(console: Console, text: str, markup: bool = True) -> None:
    """Print one line, whole, however narrow the terminal."""
    console.print(text, markup=markup, highlight=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _show_export(counts: dict[str, Any], console: Console) -> None:
    _line(
        console,
        f"  {counts['format']} format, {counts['dtype']}, aux layer ids {counts['eagle_aux_hidden_state_layer_ids']} "
        f"({counts['numbering']} numbering), draft length {counts['speculative_tokens']}, for {counts['verifier']}",
    )


_SHOW: dict[str, Callable[[dict[str, Any], Console], None]] = {
    "prepare": _show_prepare,
    "extract": _show_extract,
    "validate": _show_validate,
    "train": _show_train,
    "evaluate": _show_evaluate,
    "export": _show_export,
}
