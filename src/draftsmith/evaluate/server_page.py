"""The figures of a server as a page: agreement first, then each set of prompts three ways."""

from typing import Any

from draftsmith.html_page import document, escape, table


def server_page(result: dict[str, Any]) -> str:
    """Return the page; everything that comes from models and files is escaped."""
    agrees = all(row["agreement"]["agrees"] and not row["look_at"] for row in result["sets"])
    verdict = '<b class="good">agree</b>' if agrees else '<b class="error">do not agree</b>'
    parts = [
        f"<h1>{escape(result['head'])} in vLLM</h1>",
        f"<p>Training and serving {verdict}. Draft length {result['draft_length']}, greedy answers of at most "
        f"{result['max_new_tokens']} tokens, {escape(result['dtype'])}.</p>",
        _speed(result["sets"]),
        *map(_set, result["sets"]),
    ]
    return document(f"{result['head']} in vLLM", "\n".join(parts))


def _speed(sets: list[dict[str, Any]]) -> str:
    rows = []
    for row in sets:
        rates, own = row["tokens_per_second"], row["decoded"]
        rows.append(
            [
                f"{row['set']} ({row['prompts']})",
                number(row["acceptance_length"]),
                number(rates.get("plain"), 1),
                number(rates["speculative"], 1),
                number(row["speed_up"], 2),
                number(own["speed_up"], 2),
                f"{row['identical_answers']}/{row['prompts']}",
            ]
        )
    columns = [
        "prompts",
        "acceptance length",
        "tokens/s plain",
        "with head",
        "speed-up",
        "own speed-up",
        "same answers",
    ]
    return "<h2>Acceptance and speed</h2>" + table(columns, rows)


def _set(row: dict[str, Any]) -> str:
    agreement = row["agreement"]
    lengths = agreement["acceptance_length"]
    rows = [["acceptance length", *(number(lengths[way]) for way in ("offline", "decoded", "vllm")), "5%"]]
    for position in agreement["conditional"]:
        shares = [number(position[way]) for way in ("offline", "decoded", "vllm")]
        rows.append([f"conditional acceptance {position['position']}", *shares, number(position["tolerance"])])
    parts = [
        f"<h2>{escape(row['set'])}</h2>",
        table(["", "offline", "own decoding", "vLLM", "may differ by"], rows),
    ]
    if row["look_at"]:
        advice = "".join(f"<li><b>{escape(a['cause'])}</b>: {escape(a['text'])}</li>" for a in row["look_at"])
        parts.append(f"<p>Look at, likeliest first:</p><ol>{advice}</ol>")
    if row["differences"]:
        same = f"{row['identical_answers']} of {row['prompts']} answers are those of {row['compared_with']}"
        lines = "".join(f"<li>{escape(difference_text(d))}</li>" for d in row["differences"])
        parts.append(f"<p>{escape(same)}. The others:</p><ul>{lines}</ul>")
    return "\n".join(parts)


def difference_text(difference: dict[str, Any]) -> str:
    """Say where two answers part, in one line."""
    where = f"{difference['prompt']}: from token {difference['token']} on"
    if not difference["tokens"]:
        return f"{where}, {difference['cause']}"
    one, other = difference["tokens"]
    return f"{where}, {one!r} or {other!r}, logits {difference['logit_gap']:.1e} apart: {difference['cause']}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure as text; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
