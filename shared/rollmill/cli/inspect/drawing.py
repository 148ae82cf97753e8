"""The view of a session as a tree for a terminal. Everything that colours show, text and marks show, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rollmill.cli.inspect.differences import Difference
from rollmill.cli.inspect.token_text import Pieces, ids_only
from rollmill.cli.inspect.views import Kind, LeftOut, Run, SessionView, TraceView, TurnView, reply_name

STYLES: dict[Kind, str] = {"prompt": "bright_black", "context": "cyan", "trained": "bold green", "excluded": "bold red"}
MARKS: dict[Kind, str] = {"prompt": "·", "context": "-", "trained": "█", "excluded": "x"}
STRIP = 64
"""Cells of a trace's mask; longer traces put several tokens into one."""
HEAD, TAIL = 24, 8
"""Tokens shown of a longer run."""

SAME_CONTEXT = ("fork", "sibling")
"""Breaks of a prompt that continues its parent's tokens exactly."""
DEEPEST = 4
"""Traces within traces that are drawn below each other."""

# What the builder's reason codes mean, in a sentence for people; other codes are shown as they are.
BREAKS = {
    "compaction": "a new conversation: the prompt continues no earlier call",
    "drift": "the prompt holds the reply in other tokens, and on_drift is fork",
    "drift_over_n": "the prompt holds the reply with too many other tokens",
    "end_of_turn_ambiguous": "where the reply ends in the prompt is not certain",
    "end_of_turn_missing": "the template wrote no end-of-turn token after the reply",
    "end_of_turn_unknown": "no end-of-turn token is configured, and the records show none",
    "fingerprint_changed": "tokenizer, template or model changed",
    "fork": "another call went on with the parent's trace",
    "history_shrunk": "the messages continue, but the prompt became shorter",
    "no_end_of_turn": "the prompt holds no end of the earlier reply",
    "over_long": "the trace had reached its limit; it continues here, with the end of the prompt only",
    "policy_changed": "another policy was asked",
    "prefix_rewritten": "the messages continue, but the prompt holds them in other tokens",
    "reasoning_stripped": "the prompt holds the reply without its reasoning",
    "reply_differs": "the prompt carries another reply than the sampled one",
    "reply_unverified": "the prompt holds the reply in other tokens, and nothing shows that it is the same",
    "scaffold_inserted": "the prompt holds tokens in front of the reply that were not sampled",
    "scaffold_removed": "the prompt lacks tokens that were in front of the earlier reply",
    "sibling": "the same prompt was answered more than once; another answer has the trace",
    "stop_string": "a stop string ended the reply, so its end in the prompt is not certain",
    "sub_agent": "a separate conversation, while another one continues",
    "system_changed": "the system prompt changed",
    "tool_arguments": "the prompt holds the reply with its tool arguments rewritten",
    "tools_changed": "the tools changed",
}

EXCLUSIONS = {
    "aux": "an auxiliary call, never trained",
    "builder_dropped": "the builder did not account for it",
    "client_gone": "the client left before the reply was whole",
    "empty_reply": "nothing was sampled",
    "error": "the call failed",
    "incomplete": "the reply was cut off",
    "late": "it came after the session's end",
    "logprob_unknown": "a log-prob is missing or no log-prob",
    "no_ids": "the engine gave no token ids",
    "no_logprobs": "the engine gave no log-probs",
    "no_prompt_ids": "the engine gave no prompt ids",
    "over_long": "it is beyond the limit of a trace",
    "retried": "the client sent the same request again, and never received this reply",
    "sibling": "another answer to the same prompt is used",
}


@dataclass(frozen=True)
class Pen:
    """How tokens are written."""

    pieces: Pieces = ids_only
    full: bool = False

    def tokens(self, ids: Sequence[int], style: str) -> Text:
        """Separated by blanks; of a long run the first and the last, and how many are between them."""
        if self.full or len(ids) <= HEAD + TAIL + 1:
            return Text(" ".join(self.pieces(ids)), style)
        text = Text(" ".join(self.pieces(ids[:HEAD])), style)
        text.append(f" … {len(ids) - HEAD - TAIL} more … ", "italic")
        return text.append(" ".join(self.pieces(ids[-TAIL:])))


def draw(view: SessionView, pen: Pen) -> Tree:
    tree = Tree(Group(*_heading(view)), guide_style="bright_black")
    waiting = list(view.traces)
    while waiting:
        waiting += _add_trace(tree, waiting.pop(0), view.traces_in_all, pen)
    if view.left_out:
        branch = tree.add(Text("in no trace", "bold"))
        for item in view.left_out:
            branch.add(_left_out(item))
    return tree


def _heading(view: SessionView) -> list[RenderableType]:
    title = Text.assemble(("session ", ""), (view.session_id, "bold"), f", attempt {view.attempt}: ")
    if view.open:
        title.append("no end yet (drawn as if it ended now)", "yellow")
    else:
        title.append(view.status, "bold green" if view.status == "COMPLETED" else "bold red")
    source = "as found in the topic built" if view.from_log else f"built here by {view.builder}"
    traces = f"{view.traces_in_all} trace{'' if view.traces_in_all == 1 else 's'}"
    what = f"{view.calls} call{'' if view.calls == 1 else 's'} became {traces}, {source}"
    lines = [title, Text(what if view.task is None else f"task {view.task}; {what}"), _account(view), _legend()]
    if view.error:
        lines.insert(1, Text(f"error: {view.error}", "red"))
    return [*lines, *(Text(f"note: {note}", "yellow") for note in view.notes)]


def _account(view: SessionView) -> Text:
    excluded = sum(tokens for _, tokens in view.excluded)
    reasons = ", ".join(f"{reason} {tokens}" for reason, tokens in view.excluded)
    text = Text(f"{view.captured} tokens sampled = {view.trained} trained + {excluded} excluded")
    text.append(f" ({reasons})" if reasons else "")
    if view.unaccounted:
        text.append(f" + {view.unaccounted} that the builder did not account for", "bold red")
    return text


def _legend() -> Text:
    text = Text("legend: ")
    for kind, mark in MARKS.items():
        text.append(f"{mark} {kind}", STYLES[kind])
        text.append("  ")
    return text.append("≈ repaired drift", "yellow")


def _add_trace(tree: Tree, trace: TraceView, of: int, pen: Pen, depth: int = 0) -> list[TraceView]:
    """Returns the traces that are nested too deeply: they are drawn at the margin, and name their parents."""
    node = tree.add(Group(*_trace_lines(trace, of, pen)))
    left: list[TraceView] = []
    for place, turn in enumerate(trace.turns):
        below = node.add(Group(*_turn_lines(turn, pen, None if place else trace.difference)))
        for branch in turn.branches:
            left += [branch] if depth == DEEPEST else _add_trace(below, branch, of, pen, depth + 1)
    return left


def _trace_lines(trace: TraceView, of: int, pen: Pen) -> list[RenderableType]:
    lines: list[RenderableType] = [_trace_title(trace, of)]
    if trace.break_reason:
        lines.append(Text(f"why: {explained(trace.break_reason, BREAKS)}", "yellow"))
    if trace.difference is not None and trace.break_reason not in SAME_CONTEXT:
        lines.append(_difference(trace.difference, pen))
    return [*lines, _strip(trace)]


def _trace_title(trace: TraceView, of: int) -> Text:
    title = Text(f"trace {trace.number} of {of}", "bold")
    if trace.parent is not None:
        title.append(f", from {trace.parent}")
    counts = [(kind, trace.count(kind)) for kind in MARKS]
    title.append(": " + ", ".join(f"{count} {kind}" for kind, count in counts if count), "not bold")
    if trace.drift:
        title.append(f", {trace.drift} repaired", "not bold yellow")
    if trace.reward is not None:
        title.append(f", reward {trace.reward:g}", "not bold")
    return title.append(f", branch {trace.branch}" if trace.branch else "", "bright_black")


def _difference(item: Difference, pen: Pen) -> RenderableType:
    """Side by side: what the nearest call goes on with, and what this prompt has there."""
    name = reply_name(item.call, item.choice)
    if not item.before:
        return Text(f"     it begins with {name}'s prompt and reply, {item.same} tokens", "yellow")
    verb = "sampled" if item.in_reply else "has"
    grid = _grid()
    grid.add_row(Text(f"     after {item.same} tokens {name} {verb}"), pen.tokens(item.before, "green"))
    grid.add_row(Text("     this prompt has"), pen.tokens(item.after, "red"))
    return grid


def _strip(trace: TraceView) -> Text:
    """The mask as a row of marks, the most frequent kind of each cell."""
    kinds = [run.kind for turn in trace.turns for run in turn.runs for _ in run.ids]
    size = max(ceil(len(kinds) / STRIP), 1)
    text = Text()
    for start in range(0, len(kinds), size):
        cell = kinds[start : start + size]
        kind = max(MARKS, key=cell.count)
        text.append(MARKS[kind], STYLES[kind])
    return text.append(f"  (a mark is {size} tokens)" if size > 1 else "", "bright_black")


def _turn_lines(turn: TurnView, pen: Pen, shared: Difference | None) -> list[RenderableType]:
    """``shared``: the call that the prompt begins like, where the turn shows a prompt; None: it begins like none."""
    title = Text(reply_name(turn.completion_id, turn.choice), "bold")
    title.append(f"  {turn.finish_reason or 'no finish reason'}", "not bold")
    if turn.versions:
        title.append(f"  version {_versions(turn.versions)}", "not bold magenta")
    if turn.repaired:
        title.append("  ≈ the next prompt holds it in other tokens", "not bold yellow")
    if turn.excluded is not None:
        title.append(f"  {explained(turn.excluded, EXCLUSIONS)}", "not bold red")
    grid = _grid()
    for run in turn.runs:
        known = shared if run.kind == "prompt" and not pen.full else None
        grid.add_row(Text(f"{run.kind} {len(run.ids)}", STYLES[run.kind]), _tokens(run, pen, known))
    return [title, grid]


def _tokens(run: Run, pen: Pen, shared: Difference | None) -> Text:
    if shared is None:
        return pen.tokens(run.ids, STYLES[run.kind])
    text = Text(f"({shared.same} as in {reply_name(shared.call, shared.choice)}) ", "italic bright_black")
    return text.append_text(pen.tokens(run.ids[shared.same :], STYLES[run.kind]))


def _versions(runs: Sequence[tuple[str, int]]) -> str:
    if len(runs) == 1:
        return runs[0][0]
    return ", then ".join(f"{version} for {tokens}" for version, tokens in runs)


def _grid() -> Table:
    return Table.grid(padding=(0, 2))


def _left_out(item: LeftOut) -> Text:
    text = Text(reply_name(item.completion_id, item.choice), "bold")
    text.append(f"  {explained(item.reason, EXCLUSIONS)}", "not bold red")
    text.append(f", {item.tokens} tokens", "not bold")
    return text.append("" if item.detail is None else f" ({item.detail})", "not bold")


def explained(reason: str, meanings: dict[str, str]) -> str:
    """``reason``, with its meaning where it is known."""
    meaning = meanings.get(reason)
    return reason if meaning is None else f"{reason}: {meaning}"
