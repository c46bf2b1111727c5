"""A run's figures in words, as the page and Markdown both show them."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.orchestrator.core.run_metrics import PARTS
from isthmus.orchestrator.evidence.bench.bench_tables import EMULATORS
from isthmus.orchestrator.evidence.record.run_timeline import Stall
from isthmus.orchestrator.evidence.report.run_facts import EventFacts, MachineFacts, RunFacts
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import Column, columns_of
from isthmus.orchestrator.evidence.view.formats import show
from isthmus.orchestrator.evidence.view.live import link_columns
from isthmus.orchestrator.runs.facts import SiteFacts, TotalFacts, ratio, to_json
from isthmus.protos import metrics
from isthmus.topology.spec.expected_devices import NO_DEVICE

DEFINITIONS = (
    (
        "Tokens per second",
        "the run's tokens over the time that the slowest site's steps took. Start-up is left out; "
        "an evaluation belongs to the step after it.",
    ),
    (
        "Exposed",
        "the time that a step waited for data to cross the WAN. What crossed during the backward "
        "pass is hidden, and no part of the step.",
    ),
    (
        "Throughput, use",
        "bytes sent over the time with a frame on the way; use is throughput over what is "
        "configured, busy the share of the run with a frame on the way.",
    ),
    ("Ratio", "float32 bytes of the gradients over the bytes that were sent for them."),
    (
        "Lost, dropped",
        "packets that the emulator lost as configured, and those for which its queue had no room.",
    ),
)
BENCH_DEFINITIONS = (
    (
        "Scaling efficiency",
        "tokens a second of all sites together over the sum of each site's by itself, which has "
        "the same share of the batch and exchanges nothing. Divided within each repeat; the "
        "interval holds the mean over repeats with 95 % confidence (Student's t).",
    ),
    (
        "A step",
        "compute + inside sites + WAN, exposed + waiting for others: the mean over sites and "
        "measured steps. What crossed while backward still computed is hidden, and no part of the "
        "step.",
    ),
    (
        "Utilisation",
        "bytes sent a step over what the link could have carried in the time of a step. Frames and "
        "their headers count, headers of packets do not.",
    ),
    (
        "Egress",
        "the topology's price for those bytes, for each 10⁹ tokens of all sites; a setting's is "
        "the sum over its links.",
    ),
    (
        "Predicted",
        "a step from the topology's figures alone: accelerators, links, sizes. Deviation is how "
        "much longer the measured step is.",
    ),
)


def title(facts: RunFacts) -> str:
    """Return what the run is called."""
    return facts.name or facts.run_id


def began(facts: RunFacts) -> str:
    """Return when it was submitted, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(facts.outcome.created_wall_s))


def headline(facts: RunFacts) -> list[tuple[str, str, str]]:
    """Return the run's figures: name, figure, and a line under it."""
    entropy = facts.totals.unigram_entropy
    spent = f"{facts.totals.steps} steps"
    if facts.totals.counts_tokens:
        spent = f"{formats.count(facts.totals.tokens)} tokens, {spent}"
    if facts.outcome.active_s:
        spent += f" in {formats.duration(facts.outcome.active_s)}"
    loss_below = "" if entropy is None else f"unigram entropy {formats.loss(entropy)}"
    fell = ""
    learns = facts.plan is None or facts.plan.compute != "modelled"
    if facts.loss.losses and facts.totals.loss is not None:
        fell = f"from {formats.loss(facts.loss.losses[0][1])} at the first step"
    factor = facts.totals.compression_ratio or 0.0
    saved = "" if factor < 1 else f"{formats.factor(factor)} less than float32"
    of_peak = "of all accelerators' peak"
    if facts.totals.mfu_estimate is not None:
        of_peak += ", at 6 FLOPs per token and parameter"
    steps_per_s = ratio(1.0, facts.totals.step_s)
    pace = (
        ("tokens per second", show(facts.totals.tokens_per_s, formats.count), spent)
        if facts.totals.counts_tokens
        else ("steps per second", show(steps_per_s, formats.count), spent)
    )
    found = [
        pace,
        ("MFU", formats.mfu(to_json(facts.totals)), of_peak),
        ("step time", show(facts.totals.step_s, formats.duration), "mean of the slowest site"),
        ("exposed WAN time", show(facts.totals.exposed_share, formats.share), "of all steps' time"),
        ("held-out loss", show(facts.totals.held_out_loss, formats.loss), loss_below),
        ("training loss", show(facts.totals.loss if learns else None, formats.loss), fell),
        ("sent over the WAN", show(facts.totals.sent_bytes, formats.size), saved),
    ]
    if facts.totals.noise_scale is not None:
        batch = facts.totals.tokens / facts.totals.steps if facts.totals.steps else 0.0
        figure = f"{formats.count(facts.totals.noise_scale)} tokens"
        found.append(("gradient noise scale", figure, f"a batch has {formats.count(batch)}"))
    if (egress := facts.egress) is not None and egress.usd is not None:
        below = f"{egress.in_words().partition(', ')[2]}, at the prices of the topology"
        if comparison := egress.comparison():
            below += f"; {comparison}"
        found.append(("egress", formats.dollars(egress.usd), below))
    if facts.outcome.verified_steps:
        checks = f"after {facts.outcome.verified_steps} steps, compared bit for bit"
        found.append(("parameters at all sites", "identical", checks))
    compared = facts.totals.compared_gradients
    if steps := compared["steps"]:
        took = formats.duration(compared["total_s"])
        cost = f"of one micro-batch, after {steps} steps; it took {took}"
        found.append((f"gradients at {compared['ranks']} ranks", "the same", cost))
    return [entry for entry in found if entry[1] != formats.UNKNOWN]


def split_columns(sites: Sequence[SiteFacts]) -> list[Column]:
    """Return where each site's step went."""
    headings = ["site", "tokens/s", "MFU", "MFU, planned", "step", *PARTS.values()]
    headings += ["WAN, hidden", "encode", "decode"]
    rows = [
        [
            site.site,
            show(site.tokens_per_s, formats.count),
            formats.mfu(to_json(site)),
            show(site.planned_mfu, formats.share),
            show(site.step_s, formats.duration),
            *(
                f"{formats.duration(site.parts_s[part])} "
                f"({formats.share(site.parts_s[part] / site.step_s)})"
                if site.step_s
                else formats.UNKNOWN
                for part in PARTS
            ),
            show(site.hidden_inter_s, formats.duration),
            show(site.encode_s, formats.duration),
            show(site.decode_s, formats.duration),
        ]
        for site in sites
    ]
    return columns_of(headings, rows)


def measured_links(facts: RunFacts) -> list[Column]:
    """Return every directed link: configured, and what was measured."""
    return link_columns([to_json(link) for link in facts.links])


def _codecs(of_trees: tuple[str, ...]) -> str:
    """Return what gradients cross as; where links have codecs of their own, by how many trees."""
    if len(set(of_trees)) == 1:
        words = {
            "fp32": "float32, as it is",
            "bf16": "bfloat16, as it is",
            "split": "float32 in byte planes, each compressed: lossless",
            "bf16-split": "bfloat16, exponents compressed",
        }
        return f"{of_trees[0]}: {words.get(of_trees[0], 'as the job says')}"
    count = Counter(of_trees).items()
    return ", ".join(f"{codec} in {number} of {len(of_trees)} trees" for codec, number in count)


def plan_lines(facts: RunFacts) -> list[tuple[str, str]]:
    """Return how gradients crossed, and why so; empty if it is not known."""
    plan = facts.plan
    if plan is None:
        return []
    schedules = {
        "overlap": "buckets cross while the backward pass goes on",
        "serial": "buckets cross after the backward pass, to measure what overlap is worth",
        "off": "nothing crosses: each site trains by itself",
    }
    verified = f"every {plan.verify_every} steps" if plan.verify_every else "never"
    return [
        ("regime", plan.regime),
        ("reduction", plan.reduction),
        ("exchange between", "; ".join(f"{a} and {b}" for a, b in plan.edges) or "nobody"),
        ("codec", _codecs(plan.codecs)),
        ("schedule", f"{plan.schedule}: {schedules.get(plan.schedule, 'as the job says')}"),
        (
            "bucket, chunk",
            f"{formats.size(plan.bucket_bytes)} of gradients start crossing together, "
            f"in chunks of {formats.size(plan.chunk_bytes)}",
        ),
        ("connections per link", str(plan.channels_per_link or "as many as it takes")),
        (
            "compute",
            "modelled: a step takes the topology's time"
            if plan.compute == "modelled"
            else plan.compute,
        ),
        ("parameters compared", verified),
        ("WAN", _wan(facts)),
    ]


def alternative_columns(facts: RunFacts) -> list[Column]:
    """Return the planner's alternatives beside its plan; empty: it told of none."""
    plan = facts.plan
    if plan is None or not plan.alternatives or not plan.predicted_step_s:
        return []
    rows = [
        [
            formats.words(each.what),
            formats.duration(each.step_s),
            formats.factor(each.step_s / plan.predicted_step_s),
            show(each.usd_per_step, formats.dollars),
        ]
        for each in plan.alternatives
    ]
    return columns_of(["instead", "step", "of the plan's", "per step"], rows)


def _wan(facts: RunFacts) -> str:
    about = EMULATORS.get(facts.place.emulator or "none", f"emulated by {facts.place.emulator}")
    return f"{about}. {facts.place.emulator_note}" if facts.place.emulator_note else about


def pace_unit(totals: TotalFacts) -> str:
    """Return what the pace counts: a script that counts no tokens has steps."""
    return "tokens" if totals.counts_tokens else "steps"


def pace_note(stalls: Sequence[Stall]) -> str:
    """Return what the chart of the pace shows beside it."""
    words = "The mean over equal intervals of time"
    if not stalls:
        return f"{words}. The run never stood still."
    total = formats.duration(sum(each.length_s for each in stalls))
    number = len(stalls)
    times = "once" if number == 1 else f"{number} times"
    return f"{words}. Shaded: the run stood still {times}, for {total} in all."


def pace_columns(points: Sequence[tuple[float, float]], unit: str) -> list[Column]:
    """Return some dozens of the pace's points."""
    stride = -(-len(points) // 40)
    rows = [
        [formats.duration(at_s), formats.count(amount)]
        for at_s, amount in [*points[:-1:stride], points[-1]]
    ]
    return columns_of(["after", f"{unit} per second"], rows)


def points_of(columns: Mapping[str, Any]) -> str:
    """Return how many steps a point of a series has."""
    return "one step" if columns["width"] == 1 else f"the mean of {columns['width']} steps"


def step_columns(columns: Mapping[str, Any]) -> list[Column]:
    """Return the parts of some dozens of steps, and the longest of each point."""
    steps = columns["step"]
    none = [None] * len(steps)
    stride = max(1, -(-len(steps) // 40))
    rows = [
        [
            str(steps[at]),
            *(
                show((columns.get(name, {}).get("mean") or none)[at], formats.duration)
                for name in PARTS
            ),
            show(columns[metrics.STEP_S]["max"][at], formats.duration),
        ]
        for at in range((len(steps) - 1) % stride, len(steps), stride)
    ]
    return columns_of(["step", *PARTS.values(), "longest step"], rows)


def event_columns(happened: Sequence[EventFacts]) -> list[Column]:
    """Return what happened, with the number of each mark on the charts."""
    rows = [
        [
            "" if each.mark is None else str(each.mark),
            show(each.at_s if each.at_s is None or each.at_s >= 0 else None, formats.duration),
            formats.words(each.where),
            formats.words(each.what),
            str(each.step),
            formats.clock(each.wall_s),
        ]
        for each in happened
    ]
    headings = ["mark", "after", "where", "what", "step", "time"]
    return columns_of(headings, rows, num_text=6)


def machine_columns(facts: RunFacts) -> list[Column]:
    """Return what each site ran on; what no site reported is left out."""
    rows = [
        [
            each.site,
            each.host or formats.UNKNOWN,
            show(each.num_ranks, str),
            _device(each) or formats.UNKNOWN,
            each.cores or formats.UNKNOWN,
            each.python or formats.UNKNOWN,
            each.torch or formats.UNKNOWN,
            each.build or formats.UNKNOWN,
            _commit(each) or formats.UNKNOWN,
        ]
        for each in facts.place.machines
    ]
    headings = [
        "site",
        "host",
        "ranks",
        "device",
        "cores",
        "Python",
        "PyTorch",
        "isthmus",
        "commit",
    ]
    return columns_of(headings, rows, num_text=9)


def _device(machine: MachineFacts) -> str:
    return machine.cpu if machine.device in {"", NO_DEVICE} else machine.device


def _commit(machine: MachineFacts) -> str:
    changed = " + changes" if machine.is_changed else ""
    return f"{machine.commit[:_COMMIT_DIGITS]}{changed}" if machine.commit else ""


_COMMIT_DIGITS = 10


def unlike_commits(facts: RunFacts) -> str:
    """Return a warning if sites ran different code; empty: they did not, or nothing is known."""
    commits = {(each.commit, each.is_changed) for each in facts.place.machines if each.commit}
    builds = {each.build for each in facts.place.machines if each.build}
    if len(commits) > 1:
        return "Sites ran different commits of the script."
    if len(builds) > 1:
        return "Sites ran different versions of isthmus."
    return ""


def launch_lines(facts: RunFacts) -> list[tuple[str, str]]:
    """Return what was launched, and how."""
    launched = facts.place.launched
    lines = [
        ("job", launched.job),
        ("topology", launched.topology),
        ("script", launched.script or "the trainer that ships"),
        ("arguments", " ".join(map(shlex.quote, launched.arguments)) or "none"),
        *_code_lines(launched.code),
        ("changed with --set", " ".join(map(shlex.quote, launched.overrides)) or "nothing"),
        ("certificates at the end", launched.certificates),
        ("run folder", facts.folder),
    ]
    return [(name, words) for name, words in lines if words]


def _code_lines(code: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the job's files were, and what had changed since the run before."""
    lines = []
    if code.get("commit"):
        changed = ", with changes" if code["is_changed"] else ""
        lines.append(("commit", f"{code['commit'][:12]}{changed}"))
    if code.get("digest"):
        way = "carried to the sites" if code["is_carried"] else "as they were when it was launched"
        size = formats.size(code["num_bytes"])
        files = f"{code['digest'][:12]}: {code['num_files']} files, {size}, {way}"
        lines.append(("files", files))
    if code.get("since"):
        changes = "; ".join(line.strip() for line in code["changes"]) or "nothing"
        lines.append((f"changed since run {code['since']}", changes))
    return lines


def loss_title(is_shipped: bool) -> str:
    """Return the loss's axis: only the shipped trainer's unit is known."""
    return "loss, nats per byte" if is_shipped else "loss"


SLOW_LEAD = (
    "Who kept others waiting: a site the other sites, a rank the other ranks of its site. Who is "
    "late waits least: the cost is how much longer the others wait, on average, less what they "
    "cost. Listed is who cost 2% of the time or more, and 30 s; why, where measured facts say."
)


def slow_columns(facts: RunFacts) -> list[Column]:
    """Return which site kept the others waiting, since when, and what that cost them."""
    rows = [
        [
            each.who,
            str(each.since_step),
            str(each.last_step) if each.is_over else "the end",
            formats.duration(each.cost_s),
            formats.share(each.share),
            formats.duration(each.total_s),
            formats.words(each.why) or formats.UNKNOWN,
        ]
        for each in facts.time.slow
    ]
    headings = ["who", "from step", "to step", "cost per step", "share", "in all", "why"]
    return [
        *columns_of([*headings[:-1]], [row[:-1] for row in rows]),
        Column(headings[-1], [row[-1] for row in rows], is_text=True),
    ]


def comparison(runs: Sequence[RunFacts]) -> list[Column]:
    """Return the runs beside each other, a row a figure."""
    plans = [dict(plan_lines(run)) for run in runs]
    figures = [{name: figure for name, figure, _ in headline(run)} for run in runs]
    names = dict.fromkeys(name for each in figures for name in each)
    rows = [
        ["state", *(run.outcome.state for run in runs)],
        *([name, *(each.get(name, formats.UNKNOWN) for each in figures)] for name in names),
        ["steps", *(str(run.totals.steps) for run in runs)],
        ["ratio", *(show(run.totals.compression_ratio, formats.factor) for run in runs)],
        *(
            [name, *(plan.get(name, formats.UNKNOWN).partition(":")[0] for plan in plans)]
            for name in ("reduction", "codec", "schedule", "compute")
        ),
    ]
    known = [row for row in rows if any(cell != formats.UNKNOWN for cell in row[1:])]
    return columns_of(["", *labels(runs)], known)


def labels(runs: Sequence[RunFacts]) -> list[str]:
    """Return a name for each run: the job's if that tells them apart, else the run's id."""
    names = [title(run) for run in runs]
    return names if len(set(names)) == len(names) else [run.run_id for run in runs]


def no_timelines(facts: RunFacts) -> str:
    """Return why there is no timeline."""
    if not facts.totals.steps:
        return "No step was done."
    return (
        f"Run {facts.run_id} kept no buckets' times: `timeline: {{every: …}}` in the job says for "
        "which steps they are kept."
    )


STATE_CLASSES = {
    "SUCCEEDED": "good",
    "SUCCEEDED WITH LOSSES": "bad",
    "FAILED": "bad",
    "CANCELLED": "bad",
}
"""The colour of how a run ended."""
PART_CLASSES = {
    metrics.COMPUTE_S: "compute",
    metrics.INTRA_S: "rs",
    metrics.EXPOSED_INTER_S: "wan",
    metrics.WAIT_S: "wait",
}
"""The colour of each part of a step."""
