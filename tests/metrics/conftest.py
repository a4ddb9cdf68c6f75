"""Run folders made by a small batching model, through the real table builders: queues, chunks, preemptions, several replicas and tenants."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from vajra_py.contract import BatchFeatures
from vajra_py.contract.observer import EndReason
from vajra_py.metrics.comparison.compared_settings import OVERALL
from vajra_py.metrics.comparison.comparison import Comparison
from vajra_py.metrics.comparison.metrics import METRICS
from vajra_py.metrics.definitions import gap_statistics
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.summary.summary import summarise
from vajra_py.metrics.tables.request_row import RequestRow
from vajra_py.metrics.tables.requests import RequestsBuilder, TbtBuilder, write_parquet
from vajra_py.metrics.tables.steps import StepRow, StepsBuilder
from vajra_py.runtime.records.decision_log import DecisionLog
from vajra_py.runtime.requests.running_set import NO_CHANGES
from vajra_py.runtime.step.plan import PlannedChunk, StepPlan
from vajra_py.runtime.support.clock import to_ticks

NAN = float("nan")
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """Parameters of a generated run."""

    name: str = "run"
    num_requests: int = 60
    rate_per_s: float = 4.0
    num_replicas: int = 2
    num_blocks: int = 500
    chunk_tokens: int = 256
    shortest_first: bool = False
    horizon_at: float = float("inf")
    seed: int = 0
    ttft_slo_s: float | None = 1.0
    tenants: tuple[str, ...] = ("acme", "beta", "gamma")
    classes: tuple[str, ...] = ("interactive", "batch")
    manifest: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Job:
    """A request in the model."""

    index: int
    arrived_at: float
    prompt: int
    output: int
    tenant: str
    slo_class: str
    replica: int = -1
    computed: int = 0
    generated: int = 0
    preemptions: int = 0
    admitted_at: float = NAN
    ended_at: float = NAN
    resumed: bool = False
    token_at: list[float] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return f"req-{self.index:05d}"


class Model:
    """Replicas that serve round-robin, each with chunked prefills, recompute preemption, and a step time linear in its tokens."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.jobs = make_jobs(setting)
        self.steps, self.tbt = StepsBuilder(), TbtBuilder()
        self.decisions: list[dict[str, Any]] = []
        self.waiting: list[list[Job]] = [[] for _ in range(setting.num_replicas)]
        self.running: list[list[Job]] = [[] for _ in range(setting.num_replicas)]

    def run(self) -> None:
        arrivals = list(self.jobs)
        events = [(self.jobs[0].arrived_at if self.jobs else 0.0, i, 0) for i in range(self.setting.num_replicas)]
        while events:
            now, replica, step_index = heapq.heappop(events)
            if now > self.setting.horizon_at:
                continue
            while arrivals and arrivals[0].arrived_at <= now:
                job = arrivals.pop(0)
                job.replica = job.index % self.setting.num_replicas
                self.waiting[job.replica].append(job)
            if self.waiting[replica] or self.running[replica]:
                ended_at = self.step(replica, step_index, now)
                heapq.heappush(events, (ended_at, replica, step_index + 1))
            elif arrivals:
                heapq.heappush(events, (max(arrivals[0].arrived_at, now), replica, step_index))

    def used(self, replica: int) -> int:
        return sum(-(-job.computed // BLOCK_TOKENS) for job in self.running[replica])

    def step(self, replica: int, step_index: int, now: float) -> float:
        setting, running, waiting = self.setting, self.running[replica], self.waiting[replica]
        preempted = []
        while len(running) > 1 and self.used(replica) + len(running) > setting.num_blocks:
            victim = running.pop()
            victim.computed, victim.preemptions, victim.resumed = 0, victim.preemptions + 1, True
            waiting.insert(0, victim)
            preempted.append([victim.request_id, "recompute"])
        chunks: list[tuple[Job, int, int, str]] = []
        budget = setting.chunk_tokens
        for job in running:
            todo = job.prompt + job.generated - job.computed
            if min(todo, budget) > 0:
                chunks.append((job, min(todo, budget), job.computed, "running"))
                budget -= min(todo, budget)
        if setting.shortest_first:
            waiting.sort(key=lambda job: (job.prompt, job.index))
        while waiting and budget > 0 and not preempted and len(running) < 32:
            job = waiting[0]
            need = -(-(job.prompt + job.generated) // BLOCK_TOKENS)
            if running and self.used(replica) + need + len(running) > setting.num_blocks:
                break
            waiting.pop(0)
            running.append(job)
            if np.isnan(job.admitted_at):
                job.admitted_at = now
            tokens = min(job.prompt + job.generated, budget)
            chunks.append((job, tokens, 0, "resumed" if job.resumed else "admitted"))
            budget -= tokens
        return self.apply(replica, step_index, now, (chunks, preempted))

    def apply(self, replica: int, step_index: int, now: float, plan: tuple[list[Any], list[Any]]) -> float:
        chunks, preempted = plan
        running = self.running[replica]
        decodes = [c for c in chunks if c[1] == 1 and c[2] >= c[0].prompt]
        prefill = sum(c[1] for c in chunks) - len(decodes)
        ended_at = now + 0.012 + 6e-5 * prefill + 3e-4 * len(decodes)
        finished = []
        num_running = len(running)
        for job, tokens, _, _ in chunks:
            job.computed += tokens
            if job.computed < job.prompt + job.generated:
                continue
            if job.token_at:
                self.tbt.add("chat", job.slo_class, ended_at - job.token_at[-1], 1)
            job.token_at.append(ended_at)
            job.generated += 1
            if job.generated == job.output:
                job.ended_at = ended_at
                running.remove(job)
                finished.append([job.request_id, "stop"])
        used = self.used(replica)
        free = self.setting.num_blocks - used
        self.steps.append(
            StepRow(
                "chat", replica, step_index, now, ended_at - now, len(decodes), len(chunks) - len(decodes), len(decodes), prefill,
                sum(c[2] for c in decodes), num_running, len(self.waiting[replica]), free, used / self.setting.num_blocks,
                len(preempted), len(finished),
            )
        )  # fmt: skip
        self.decisions.append(
            {
                "replicaset": "chat", "replica_id": replica, "step": step_index, "formed_at": now, "ended_at": ended_at,
                "chunks": [[job.request_id, tokens, before, kind] for job, tokens, before, kind in chunks],
                "preempted": preempted, "finished": finished, "free_blocks": free,
            }
        )  # fmt: skip
        return ended_at

    def requests(self) -> RequestsBuilder:
        builder = RequestsBuilder()
        for job in sorted(self.jobs, key=lambda job: (np.nan_to_num(job.ended_at, nan=np.inf), job.index)):
            builder.append(request_row(job, self.setting))
        return builder


def make_jobs(setting: Setting) -> list[Job]:
    rng = np.random.default_rng(setting.seed)
    arrived_at = np.cumsum(rng.exponential(1 / setting.rate_per_s, setting.num_requests))
    prompts = np.clip(rng.lognormal(5.5, 1.2, setting.num_requests), 4, 6000).astype(int)
    outputs = np.clip(rng.lognormal(3.3, 0.7, setting.num_requests), 1, 300).astype(int)
    shares = np.arange(len(setting.tenants), 0, -1, dtype=float)
    tenants = rng.choice(len(setting.tenants), setting.num_requests, p=shares / shares.sum())
    return [
        Job(
            i,
            float(arrived_at[i]),
            int(prompts[i]),
            int(outputs[i]),
            setting.tenants[tenants[i]],
            setting.classes[i % len(setting.classes)],
        )
        for i in range(setting.num_requests)
    ]


def request_row(job: Job, setting: Setting) -> RequestRow:
    gaps = gap_statistics(np.array(job.token_at))
    return RequestRow(
        request_id=job.request_id,
        index=job.index,
        replicaset="chat",
        replica_id=job.replica,
        tenant=job.tenant,
        slo_class=job.slo_class,
        session_id="",
        priority=0,
        num_prompt_tokens=job.prompt,
        num_output_tokens=job.generated,
        num_cached_tokens=0,
        num_preemptions=job.preemptions,
        arrived_at=job.arrived_at,
        admitted_at=job.admitted_at,
        first_token_at=job.token_at[0] if job.token_at else NAN,
        ended_at=job.ended_at,
        reason="unfinished" if np.isnan(job.ended_at) else "stop",
        detail="",
        tbt_p50_s=gaps.p50_s,
        tbt_p99_s=gaps.p99_s,
        tbt_max_s=gaps.max_s,
        ttft_slo_s=setting.ttft_slo_s,
        tpot_slo_s=None,
        deadline_at=None,
    )


def write_decisions(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a decision log with these rows, in the format of a real run."""
    log = DecisionLog(path)
    requests: dict[str, Any] = {}
    for row in rows:
        for name in [entry[0] for entry in (*row["chunks"], *row["preempted"], *row["finished"])]:
            if name not in requests:
                requests[name] = SimpleNamespace(request_id=name, index=len(requests))
                log.on_arrival(requests[name], 0.0)
        shape, formed = BatchFeatures(), to_ticks(row["formed_at"])
        chunks = tuple(PlannedChunk(requests[name], *facts) for name, *facts in row["chunks"])
        counts = (row["free_blocks"], row.get("num_waiting", 0), row.get("num_running", 0))
        preempted = tuple((requests[name], mode) for name, mode in row["preempted"])
        plan = StepPlan(
            row["step"], row["replica_id"], formed, shape, chunks, None, 0, *counts, len(chunks), preempted=preempted
        )
        log.on_plan(row["replicaset"], plan, NO_CHANGES)
        if chunks and row["ended_at"] is not None:
            finished = [(requests[name], EndReason(reason)) for name, reason in row["finished"]]
            log.on_plan_end(row["replicaset"], plan, finished, to_ticks(row["ended_at"]))
    log.close()


@pytest.fixture(name="write_decisions")
def decisions_writer() -> Callable[[Path, list[dict[str, Any]]], None]:
    return write_decisions


def write_run(folder: Path, setting: Setting) -> Path:
    """Make a run and write its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Model(setting)
    model.run()
    requests = model.requests()
    write_parquet(requests, folder / "requests.parquet")
    write_parquet(model.steps, folder / "steps.parquet")
    write_parquet(model.tbt, folder / "tbt.parquet")
    write_decisions(folder / "decisions.parquet", model.decisions)
    summary = summarise(requests.to_table(), model.steps.to_table(), model.tbt.to_table())
    (folder / "summary.json").write_text(summary.to_json())
    manifest = {"name": setting.name, "status": "finished", "seed": setting.seed, "versions": {"vajra-py": "0.1.0"}}
    (folder / "manifest.json").write_text(json.dumps(manifest | setting.manifest))
    config = {
        "version": 1,
        "seed": setting.seed,
        "scheduling": {
            "request_prioritizer": {"policy": "spt" if setting.shortest_first else "fcfs"},
            "replicaset_scheduler": {"policy": "round_robin"},
            "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_tokens": setting.chunk_tokens}},
        },
        "workload": {
            "arrivals": {"kind": "poisson", "rate_per_s": setting.rate_per_s},
            "num_requests": setting.num_requests,
        },
    }
    with (folder / "config.yaml").open("w") as text:
        YAML(typ="safe", pure=True).dump(config, text)
    return folder


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunData]:
    """A loaded run of a `Setting` with these fields; equal settings are made once."""
    root = tmp_path_factory.mktemp("runs")
    made: dict[str, Path] = {}

    def make(**fields: Any) -> RunData:
        setting = Setting(**fields)
        key = repr(setting)
        if key not in made:
            made[key] = write_run(root / f"{len(made):03d}" / setting.name, setting)
        return RunData.load(made[key])

    return make


@pytest.fixture(scope="session")
def comparison_of() -> Callable[..., Comparison]:
    """Make a comparison of settings by name, each with the values of its seeds by metric."""

    def make(
        values: Mapping[str, Mapping[str, Sequence[float]]],
        primary: Sequence[str] = ("ttft_p99_s",),
        **fields: Sequence[str],
    ) -> Comparison:
        names = tuple(values)
        samples = {
            metric.key: tuple(
                {str(seed): value for seed, value in enumerate(values[name].get(metric.key, ()))} for name in names
            )
            for metric in METRICS
        }
        rows = {
            key: tuple(float(np.mean(list(one.values()))) if one else None for one in own)
            for key, own in samples.items()
        }
        counts = tuple(max(map(len, values[name].values())) for name in names)
        return Comparison(
            names=names,
            stability=tuple(fields.get("stability", ("stable",) * len(names))),
            values={OVERALL: rows},
            loads=tuple(fields.get("loads", ("",) * len(names))),
            samples={OVERALL: samples} if max(counts) > 1 else {},
            replications=counts,
            primary=tuple(primary),
            one_sample=tuple(fields.get("one_sample", ())),
        )

    return make
