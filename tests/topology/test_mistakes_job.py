"""Seeded mistakes in a job: each is told at its line and column, in these words.

Cases as in test_mistakes.py.
"""

import pytest

from tests.topology.documents import JOB, changed, told

JOB_MISTAKES: list[tuple[str, str, list[str]]] = [
    ("topology: topology.yaml\n", "", ["1:1 missing key 'topology' []"]),
    (
        "name: small",
        "name: ../small",
        ["2:7 want a name of letters, digits, '-' and '_', at most 63; got '../small' [name]"],
    ),
    (
        "codec: bf16",
        "codec: bf61",
        [
            "4:19 want 'fp32', 'bf16', 'split', 'bf16-split', 'int8', 'int8-zstd', 'int4', 'int4-zstd', 'fp8', 'fp8-zstd', 'topk', 'topk-zstd' or 'topk2', got 'bf61' (did you mean 'bf16'?) [exchange.codec]"
        ],
    ),
    (
        "codec: bf16",
        "codec: 16",
        [
            "4:19 want 'fp32', 'bf16', 'split', 'bf16-split', 'int8', 'int8-zstd', 'int4', 'int4-zstd', 'fp8', 'fp8-zstd', 'topk', 'topk-zstd' or 'topk2', got 16 [exchange.codec]"
        ],
    ),
    (
        "codec: bf16",
        "codec: topk2, error_feedback_decay: 0",
        ["4:48 want more than 0, got 0 [exchange.error_feedback_decay]"],
    ),
    (
        "codec: bf16",
        "codec: topk2, error_feedback_decay: 1.5",
        ["4:48 want at most 1, got 1.5 [exchange.error_feedback_decay]"],
    ),
    (
        "codec: bf16",
        "error_feedback: false, error_feedback_decay: 0.9",
        ["4:57 has no use without error_feedback: want 1 [exchange.error_feedback_decay]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "model: {flops_per_token: 0}",
        ["6:26 want more than 0, got 0 [model.flops_per_token]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "rate: sqrt",
        [
            "6:7 has no use with on_fewer_sites: keep, where the batch stays: want shrink for sqrt, "
            "or no rate [rate]"
        ],
    ),
    (
        "verify: {parameters_every: 5}",
        "noise_scale: true\nregime: delayed",
        ["6:14 compares sites' gradients in every step: want regime: sync [noise_scale]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "exporters: {prometheus: {port: 70000}, webhooks: {}, otlp: {every: 5}}",
        [
            "6:32 want at most 65535, got 70000 [exporters.prometheus.port]",
            "6:40 unknown key 'webhooks' (did you mean 'webhook'?) [exporters.webhooks]",
            "6:68 want a duration in ns, us, ms, s, min, h, as 80ms; got 5 without a unit "
            "[exporters.otlp.every]",
        ],
    ),
    (
        "verify: {parameters_every: 5}",
        "exporters: {webhook: {url: 'ftp://x', on: [end, ends, end]}}",
        [
            "6:28 want a URL, as https://host:port/path; got 'ftp://x' [exporters.webhook.url]",
            "6:49 want 'lost', 'returned', 'epoch', 'checkpoint', 'failure' or 'end', got 'ends' "
            "(did you mean 'end'?) [exporters.webhook.on.1]",
        ],
    ),
    (
        "verify: {parameters_every: 5}",
        "exporters: {webhook: {on: [end, lost, end]}}",
        ["6:27 'end' is there twice [exporters.webhook.on]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "checkpoint: {to: [here, 's3://there', here]}",
        ["6:18 names a store twice: want each once [checkpoint.to]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "exporters: {mlflow: {uri: 'https://me:secret@host'}}",
        [
            "6:27 has a password, and the job's file is no place for secrets: they go into the "
            "coordinator's environment; see docs/exporters.md [exporters.mlflow.uri]"
        ],
    ),
    (
        "verify: {parameters_every: 5}",
        "exporters: {wandb: {mode: of}}",
        ["6:27 want 'online' or 'offline', got 'of' [exporters.wandb.mode]"],
    ),
    ("chunk: 256KiB", "chunk: 32KiB", ["4:32 want 64KiB to 16MiB, got '32KiB' [exchange.chunk]"]),
    ("chunk: 256KiB", "chunk: 32MiB", ["4:32 want 64KiB to 16MiB, got '32MiB' [exchange.chunk]"]),
    (
        "chunk: 256KiB",
        "chunk: 100001B",
        ["4:32 want a multiple of 4 bytes (float32), got '100001B' [exchange.chunk]"],
    ),
    (
        "chunk: 256KiB",
        "chunk: 262144",
        [
            "4:32 want a size in B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, as 4MiB; got 262144 without a unit [exchange.chunk]"
        ],
    ),
    ("window: 8MiB", "window: 128KiB", ["4:62 want at least the chunk, 256KiB [exchange.window]"]),
    (
        "window: 8MiB",
        "channels_per_link: 0",
        ["4:73 want auto, or a whole number from 1 to 32; got 0 [exchange.channels_per_link]"],
    ),
    ("tree: star", "tree: gather", ["5:32 has no use with tree: gather [reduction.hub]"]),
    (
        "tree: star",
        "tree: stars",
        [
            "5:19 want 'auto', 'gather', 'star', 'ring' or 'hierarchy', got 'stars' "
            "(did you mean 'star'?) [reduction.tree]"
        ],
    ),
    (
        "parameters_every: 5",
        "parameters_every: -1",
        ["6:28 want at least 0, got -1 [verify.parameters_every]"],
    ),
    ("steps: 20", "steps: 0", ["8:10 want at least 1, got 0 [trainer.steps]"]),
    (
        "steps: 20",
        "steps: 20\n  step: 3",
        ["9:3 unknown key 'step' (did you mean 'steps'?) [trainer.step]"],
    ),
    (
        "global_batch: 96",
        "global_batch: 96.5",
        ["9:17 want a whole number, got 96.5 [trainer.global_batch]"],
    ),
    ("heads: 2", "heads: 3", ["10:39 want a multiple of heads, 3; got 64 [trainer.model.width]"]),
    ('files: ["*.txt"]', 'files: "*.txt"', ["11:17 want a list, got '*.txt' [trainer.data.files]"]),
    ('files: ["*.txt"]', 'files: [""]', ["11:18 must not be empty [trainer.data.files.0]"]),
    (
        "held_out: 10%",
        "held_out: 100%",
        ["11:38 must be less than 100%: nothing would be learnt [trainer.data.held_out]"],
    ),
    ("held_out: 10%", "held_out: 0", ["11:38 must be more than 0 [trainer.data.held_out]"]),
    (
        "learning_rate: 1e-3",
        "learning_rate: 1e-5",
        [
            "12:30 want at least min_learning_rate, 0.0006; got 1e-05 [trainer.optimizer.learning_rate]"
        ],
    ),
    (
        "learning_rate: 1e-3",
        "learning_rate: fast",
        ["12:30 want a number, got 'fast' [trainer.optimizer.learning_rate]"],
    ),
    (
        "learning_rate: 1e-3",
        "beta1: 1",
        ["12:22 want less than 1, got 1 [trainer.optimizer.beta1]"],
    ),
    ("version: 1", "version: '1'", ["1:10 want version: 1, got '1' [version]"]),
    ("verify: {parameters_every: 5}", "verify: true", ["6:9 want a mapping, got true [verify]"]),
    (
        "verify: {parameters_every: 5}",
        "env: {RANK: '1', ISTHMUS_SITE: a, A-B: c}\npass_env: [MASTER_ADDR, TORCHELASTIC_RUN_ID]",
        [
            "6:7 RANK is set by isthmus or torchrun for each rank: leave it out [env.RANK]",
            "6:18 ISTHMUS_SITE is set by isthmus or torchrun for each rank: leave it out "
            "[env.ISTHMUS_SITE]",
            "6:35 want letters, digits and '_', no digit first; got 'A-B' [env.A-B]",
            "7:12 MASTER_ADDR is set by isthmus or torchrun for each rank: leave it out "
            "[pass_env.0]",
            "7:25 TORCHELASTIC_RUN_ID is set by isthmus or torchrun for each rank: leave it out "
            "[pass_env.1]",
        ],
    ),
    (
        "verify: {parameters_every: 5}",
        "env: {A: b, C: 1}\npass_env: [A]",
        ["6:16 want a text, got 1: write it in quotes [env.C]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "env: {A: b}\npass_env: [A]",
        ["7:11 A has a value in env: want it in one of both [pass_env]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "entrypoint: train.py\narguments: [--lr, 0.1]",
        ["7:19 want a text, got 0.1: write it in quotes [arguments.1]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "verify: {parameters_every: 5, parameters: true}",
        ["6:31 unknown key 'parameters' (did you mean 'parameters_every'?) [verify.parameters]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "regime: delayd",
        [
            "6:9 want 'sync', 'delayed', 'local_sgd', 'diloco' or 'streaming', got 'delayd' "
            "(did you mean 'delayed'?) [regime.kind]"
        ],
    ),
    (
        "verify: {parameters_every: 5}",
        "regime: 30",
        ["6:9 want 'sync', 'delayed', 'local_sgd', 'diloco' or 'streaming', got 30 [regime.kind]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "regime: {sync_every: 30}",
        ["6:9 missing key 'kind' [regime]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "regime: {kind: diloco, every: 30}",
        ["6:24 unknown key 'every' (did you mean 'sync_every'?) [regime.every]"],
    ),
    (
        "verify: {parameters_every: 5}",
        "plan: {replan: {least_exact: fp32}}",
        [
            "6:7 replan.least_exact: want 'fp32', 'split', 'bf16', 'bf16-split', 'int8' or 'int4', in "
            "this order from exchange.codec on, which is bf16; got fp32 [plan]"
        ],
    ),
    (
        "verify: {parameters_every: 5}",
        "regime: delayed\nplan: {replan: {regime: follow}}",
        [
            "7:7 replan.regime: follow: the run begins in sync, and regime is delayed: leave one out "
            "[plan]"
        ],
    ),
    (
        "verify: {parameters_every: 5}",
        "plan: {replan: {regime: follows}}",
        [
            "6:25 want 'follow' or 'fixed', got 'follows' (did you mean 'follow'?) [plan.replan.regime]"
        ],
    ),
    (
        "verify: {parameters_every: 5}",
        "plan: {codecs: [int8], replan: {least_exact: int8}}",
        [
            "6:7 replan.least_exact has no use where codecs are chosen by link, or by the plan: want "
            "one exchange.codec [plan]"
        ],
    ),
    (
        "verify: {parameters_every: 5}",
        "plan: {replan: {least_exact: int7}}",
        [
            "6:30 want 'fp32', 'split', 'bf16', 'bf16-split', 'int8' or 'int4', got 'int7' (did you "
            "mean 'int8'?) [plan.replan.least_exact]"
        ],
    ),
    (
        "exchange: {codec: bf16, chunk: 256KiB, bucket: 1MiB, window: 8MiB}",
        'regime: diloco\nexchange: {schedule: "off"}',
        [
            "4:9 has no use with exchange.schedule: off, which exchanges nothing: want another "
            "schedule for diloco, or no regime [regime]"
        ],
    ),
]

REGIME_MISTAKES = [
    ("sync, sync_every: |1", "has no use with kind: sync, only with 'local_sgd', 'diloco' or 'streaming' [regime.sync_every]"),
    ("delayed, sync_every: |1", "has no use with kind: delayed, only with 'local_sgd', 'diloco' or 'streaming' [regime.sync_every]"),
    ("delayed, outer: |{}", "has no use with kind: delayed, only with 'diloco' or 'streaming' [regime.outer]"),
    ("diloco, look: |true", "has no use with kind: diloco, only with 'delayed' [regime.look]"),
    ("diloco, fragments: |1", "has no use with kind: diloco, only with 'streaming' [regime.fragments]"),
    ("diloco, delay: |1", "has no use with kind: diloco, only with 'streaming' [regime.delay]"),
    ("local_sgd, alpha: |0", "has no use with kind: local_sgd, only with 'streaming' [regime.alpha]"),
    ("local_sgd, outer: |{lr: 1}", "has no use with kind: local_sgd, only with 'diloco' or 'streaming' [regime.outer]"),
    ("diloco, sync_every: |0", "want at least 1, got 0 [regime.sync_every]"),
    ("diloco, sync_every: |30s", "want a whole number, got '30s' [regime.sync_every]"),
    ("diloco, outer: {lr: |0}", "want auto, or a number more than 0; got 0 [regime.outer.lr]"),
    ("diloco, outer: {lr: |fast}", "want auto, or a number more than 0; got 'fast' [regime.outer.lr]"),
    ("diloco, outer: {momentum: |1}", "want less than 1, got 1 [regime.outer.momentum]"),
    ("diloco, outer: {momentum: |-0.1}", "want at least 0, got -0.1 [regime.outer.momentum]"),
    ("diloco, outer: {ramp_steps: |-1}", "want at least 0, got -1 [regime.outer.ramp_steps]"),
    ("streaming, fragments: |31", "want at most sync_every, 30: a step sends one at most; got 31 [regime.fragments]"),
    ("streaming, fragments: |8", "want a divisor of sync_every, 30; got 8 [regime.fragments]"),
    ("streaming, fragments: 6, delay: |5", "want less than sync_every / fragments, 5: a fragment lands before the next one is sent; got 5 [regime.delay]"),
    ("streaming, sync_every: 4, delay: |1", "want less than sync_every / fragments, 1: a fragment lands before the next one is sent; got 1 [regime.delay]"),
    ("streaming, alpha: |1", "want less than 1, got 1 [regime.alpha]"),
    ("streaming, alpha: |-0.5", "want at least 0, got -0.5 [regime.alpha]"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), JOB_MISTAKES)
def test_a_mistake_in_a_job_is_told_at_its_place(old: str, new: str, expected: list[str]) -> None:
    assert told("job", changed(JOB, old, new)) == expected


@pytest.mark.parametrize(("written", "expected"), REGIME_MISTAKES)
def test_a_mistake_in_a_regime_is_told_at_its_place(written: str, expected: str) -> None:
    """The place is where `written` has a bar."""
    section = f"regime: {{kind: {written}}}"
    place = f"{JOB.count(chr(10)) + 1}:{section.index('|') + 1}"
    assert told("job", f"{JOB}{section.replace('|', '')}\n") == [f"{place} {expected}"]
