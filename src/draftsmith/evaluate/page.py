"""The evaluation as a page: the figures, and each answer with its tokens coloured by how they came.

accepted draft 1, 2, 3 ...   ever darker green
the verifier's own           orange: the first draft that failed, or was not there, is replaced by it
bonus                        blue: every draft of the round was accepted, and the verifier adds one
"""

from dataclasses import dataclass
from typing import Any

from draftsmith.evaluate.decode import VERIFIERS, Answer
from draftsmith.evaluate.real import PLAIN, Decoded, Method
from draftsmith.evaluate.tree import TreeShape
from draftsmith.html_page import document, escape, table

_DEEPEST = 6  # drafts from here on share a colour
_STYLE = """
.answer { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; margin: .3rem 0; white-space: pre-wrap;
  line-height: 1.75; }
.answer span { border-radius: .2rem; padding: .08rem 0; }
.legend span { border-radius: .2rem; padding: .08rem .4rem; margin-right: .4rem; white-space: nowrap; }
.own { background: rgb(230 126 34 / .45); } .bonus { background: rgb(59 130 196 / .4); }
.d1 { background: rgb(38 160 80 / .16); } .d2 { background: rgb(38 160 80 / .28); }
.d3 { background: rgb(38 160 80 / .4); } .d4 { background: rgb(38 160 80 / .52); }
.d5 { background: rgb(38 160 80 / .64); } .d6 { background: rgb(38 160 80 / .76); }
@media print { .answer span, .legend span { print-color-adjust: exact; } }
"""


@dataclass(frozen=True)
class Way:
    """One answer to a prompt: how it was decoded, its tokens as text, and how each came."""

    name: str
    draft_length: int
    pieces: list[str]
    origins: list[int]
    acceptance_length: float | None


@dataclass(frozen=True)
class ShownAnswer:
    """A prompt and its answers."""

    prompt_id: str
    prompt: str
    ways: list[Way]


def shown_answers(decoded: Decoded, tokenizer: Any) -> list[ShownAnswer]:
    """Take the answers that the page shows: by the longest chain, and by the tree where there is one."""
    methods = [result.method for result in decoded.results]
    chains = [method for method in methods if not isinstance(method, TreeShape) and method != PLAIN]
    chosen: list[Method] = [max(chains)] if chains else []
    chosen += [method for method in methods if isinstance(method, TreeShape)]
    return [
        ShownAnswer(
            prompt_id,
            tokenizer.decode(prompt, skip_special_tokens=False),
            [_way(method, answers[method], tokenizer) for method in chosen],
        )
        for prompt_id, prompt, answers in decoded.answers
    ]


def _way(method: Method, answer: Answer, tokenizer: Any) -> Way:
    depth, name = (method.depth, str(method)) if isinstance(method, TreeShape) else (method, f"draft length {method}")
    emitted = [emitted for _, emitted in answer.rounds]
    mean = sum(emitted) / len(emitted) if emitted else None
    return Way(name, depth, pieces(answer.tokens, tokenizer), answer.origins, mean)


def pieces(tokens: list[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds; a character of several tokens stands with the last of them."""
    texts, before = [], ""
    for end in range(1, len(tokens) + 1):
        after = tokenizer.decode(tokens[:end], skip_special_tokens=False)
        if after.endswith("\ufffd") and end < len(tokens):
            texts.append("")
        elif after.startswith(before):
            texts.append(after[len(before) :])
            before = after
        else:  # this tokenizer's text of a beginning is not the beginning of its text
            texts.append(tokenizer.decode(tokens[end - 1 : end], skip_special_tokens=False))
            before = after
    return texts


def kinds(origins: list[int], draft_length: int) -> list[tuple[str, str]]:
    """Return (CSS class, description) of each token."""
    found, before = [], -1
    for origin in origins:
        if origin != VERIFIERS:
            found.append((f"d{min(origin, _DEEPEST)}", f"accepted draft {origin}"))
        elif before < 0:
            found.append(("own", "the verifier's first token, of the prompt alone"))
        elif before == draft_length:
            found.append(("bonus", "bonus after a round of accepted drafts"))
        else:
            found.append(("own", f"the verifier's, where draft {before + 1} failed"))
        before = origin
    return found


def evaluation_page(result: dict[str, Any], answers: list[ShownAnswer], head: str) -> str:
    """Return the page; everything that comes from models and files is escaped."""
    parts = [f"<h1>Acceptance of {escape(head)}</h1>", _offline(result["offline"])]
    if "real" in result:
        parts.append(_real(result["real"]))
    if answers:
        longest = max(way.draft_length for answer in answers for way in answer.ways)
        parts += ["<h2>Where drafts fail</h2>", _legend(longest), *map(_answer, answers)]
    return document(f"Acceptance of {head}", "\n".join(parts), _STYLE)


def _legend(longest: int) -> str:
    drafts = "".join(
        f'<span class="d{k}">draft {k}{" and on" if k == _DEEPEST else ""}</span>'
        for k in range(1, min(longest, _DEEPEST) + 1)
    )
    return (
        f'<p class="legend">accepted: {drafts} <span class="bonus">bonus: all drafts were accepted</span>'
        '<span class="own">the verifier\'s own: a draft failed here</span></p>'
    )


def _answer(answer: ShownAnswer) -> str:
    ways = []
    for way in answer.ways:
        spans = "".join(
            f'<span class="{css}" title="token {number}: {escape(what)}">{_shown(piece)}</span>'
            for number, (piece, (css, what)) in enumerate(
                zip(way.pieces, kinds(way.origins, way.draft_length), strict=True), 1
            )
        )
        length = f": acceptance length {way.acceptance_length:.2f}" if way.acceptance_length is not None else ""
        ways.append(f'<div class="soft">{escape(way.name)}{length}</div>\n<div class="answer">{spans}</div>')
    prompt = f'<details><summary>the prompt</summary><div class="answer">{_lines(answer.prompt)}</div></details>'
    return f"<h2>{escape(answer.prompt_id)}</h2>\n{prompt}\n" + "\n".join(ways)


def _shown(piece: str) -> str:
    """Show a line's end too, so that its token has something to colour."""
    return _lines(piece).replace("\n", "\u23ce\n") or "\u00b7"


def _lines(text: str) -> str:
    """Escape text, and whatever in it is not printable; keep the ends of lines."""
    return "\n".join("\t".join(escape(part) if part else "" for part in line.split("\t")) for line in text.split("\n"))


def _offline(offline: dict[str, Any]) -> str:
    positions = range(1, len(offline["reached"]) + 1)
    rows = [
        ["conditional acceptance", *(f"{share:.3f}" for share in offline["conditional_acceptance"])],
        ["acceptance length up to here", *(f"{length:.3f}" for length in offline["acceptance_length"].values())],
    ]
    counts = f"{offline['chains']:,} chains on {offline['samples']:,} held-out samples"
    title = f'<h2>Offline, by draft position</h2>\n<p class="soft">{counts}</p>'
    return title + table(["", *map(str, positions)], rows)


def _real(real: dict[str, Any]) -> str:
    rows = []
    for method in [*real["methods"], *([real["tree"]] if "tree" in real else [])]:
        name = f"draft length {method['draft_length']}" if method["draft_length"] else "plain"
        if "tree" in method:
            name = str(TreeShape(**method["tree"]))
        length = method.get("acceptance_length")
        rows.append(
            [
                name,
                f"{length:.3f}" if length is not None else "",
                f"{method['tokens_per_second']:.1f}",
                f"{method['speed_up']:.2f}",
                f"{method['identical_answers']}/{real['prompts']}" if method["draft_length"] else "",
            ]
        )
    verdict = "" if real["lossless"] else '<p class="error">Some answers are not plain decoding\'s.</p>'
    title = f"<h2>Greedy decoding of {real['prompts']} held-out prompts</h2>\n{verdict}"
    return title + table(["", "acceptance length", "tokens/s", "speed-up", "same answers"], rows)
