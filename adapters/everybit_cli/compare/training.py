"""Models trained side by side, each under its policy: a step goes to every model in turn, so that a busy machine slows all alike."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import everybit as eb
from everybit_cli.compare.corpus import Batches, Corpus, even_windows
from everybit_cli.compare.model import ModelSize, Transformer, loss_of
from everybit_cli.compare.options import CompareOptions, Plan, optimizer_of
from everybit_cli.compare.results import Point, Probe, Record
from everybit_cli.machine import timed, wait_for
from everybit_cli.policies import AUTOCAST
from everybit_torch.evaluation import evaluation_weights

WARMUP_SHARE = 0.1
FINAL_SHARE = 0.1  # of the highest learning rate
PROBE_EVERY = 10
UNTIMED_STEPS = 5  # the first ones allocate, compile, and fill caches
VALIDATIONS = 10
VALIDATION_BYTES = 16384


class Trainee:
    """A model, its optimizer, and the records of its training.

    Args:
        name: The name that the policy is shown under.
        policy: The formats of the optimizer, and the dtype of the model.
        size: The size of the model.
        seed: The seed of the weights, and of stochastic rounding.
        options: The optimizer and its hyperparameters.
        device: Where the model lives.
        autocast: Compute in bfloat16 where ``torch.autocast`` does.
    """

    def __init__(
        self, name: str, policy: eb.Policy, *, size: ModelSize, seed: int, options: CompareOptions, device: torch.device,
        autocast: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.seed, self._autocast = name, seed, autocast
        self.model = new_model(size, seed).to(device=device, dtype=getattr(torch, policy.model_dtype))
        # By name: some optimizers tell embeddings and the head from other matrices.
        named = dict(self.model.named_parameters())
        matrices = [(name, p) for name, p in named.items() if p.ndim > 1]
        gains = [(name, p) for name, p in named.items() if p.ndim <= 1]
        chosen = optimizer_of(options)
        exempt = {"weight_decay": 0.0} if "weight_decay" in chosen.algorithm.hyperparameters() else {}
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": gains, **exempt}]
        self.optimizer = chosen.algorithm.build(groups, policy=policy, compile=options.compile, seed=seed)
        self._averages = chosen.entry.has_evaluation_weights
        self._predicted = _bytes_predicted(chosen.algorithm.transform(), policy, dict([*matrices, *gains]))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_share(step, options.steps)
        )
        self._steps, self._clip = options.steps, options.clip
        self._losses: list[float] = []
        self._validation: list[Point] = []
        self._probes: list[Probe] = []
        self._seconds: list[float] = []
        self._training_seconds: list[float] = []
        self._bytes: dict[str, float] = {}

    def train(self, windows: Tensor) -> float:
        """One step on ``windows``, (batch, context + 1); returns the loss before it, in nats per byte."""
        wait_for(windows.device)
        start = time.perf_counter()
        loss = self._loss(windows)
        torch.autograd.backward(loss)
        if self._clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        step = len(self._losses) + 1
        probed = step % PROBE_EVERY == 0 or step == self._steps  # measured, and not timed
        self.optimizer.metrics_enabled = probed
        seconds = timed(self.optimizer.step, windows.device)
        self._schedule.step()
        if probed:
            self._probes.append(_probe(step, self.optimizer.metrics()))
        elif step > UNTIMED_STEPS:
            self._seconds.append(seconds)
            self._training_seconds.append(time.perf_counter() - start)
        if not self._bytes:  # after a step, before the gradients go: everything is there
            parameters = sum(p.numel() for p in self.model.parameters())
            self._bytes = {use: size / parameters for use, size in self.optimizer.bytes_table().items()}
        self.optimizer.zero_grad()
        self._losses.append(float(loss.detach()))
        return self._losses[-1]

    def validate(self, windows: Tensor, batch: int) -> float:
        """Mean loss over ``windows``, (count, context + 1), taken ``batch`` at a time, in nats per byte; it is recorded."""
        total = 0.0
        weights = evaluation_weights(self.optimizer) if self._averages else nullcontext()
        with torch.no_grad(), weights:
            for some in torch.split(windows, batch):
                total += float(self._loss(some)) * len(some)
        loss = total / len(windows)
        self._validation.append(Point(len(self._losses), loss))
        return loss

    def _loss(self, windows: Tensor) -> Tensor:
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=self._autocast):
            return loss_of(self.model, windows)

    def record(self) -> Record:
        """Return everything that was recorded so far."""
        return Record(
            policy=self.name, seed=self.seed, losses=tuple(self._losses), validation=tuple(self._validation),
            probes=tuple(self._probes), optimizer_seconds=tuple(self._seconds), training_seconds=tuple(self._training_seconds),
            bytes_measured=dict(self._bytes), bytes_predicted=self._predicted,
        )  # fmt: skip


def _bytes_predicted(
    transform: eb.Transform[Any], policy: eb.Policy, parameters: dict[str, nn.Parameter]
) -> dict[str, float]:
    """Bytes per parameter by use, without counters, from shapes and the policy."""
    table = eb.with_policy(transform, policy).bytes_table(parameters)
    elements = sum(parameter.numel() for parameter in parameters.values())
    return {use: size / elements for use, size in table.items() if use != "counters"}


def new_model(size: ModelSize, seed: int) -> Transformer:
    """A float32 model with weights that depend on ``seed`` only. torch's global generator is left unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs as well
        return Transformer(size)


def learning_rate_share(step: int, steps: int) -> float:
    """The share of the highest learning rate that step number ``step``, counted from 0, uses: a line up, a cosine down."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


def _probe(step: int, metrics: eb.Metrics) -> Probe:
    found = (metrics.lost_share, metrics.edq, metrics.update_norm, metrics.gradient_norm)
    return Probe(step, *map(float, found))


class Watcher(Protocol):
    """Receives losses as training goes on."""

    def trained(self, policy: str, loss: float) -> None:
        """A step of this policy's model, and the training loss."""

    def validated(self, policy: str, loss: float) -> None:
        """Its loss on the held-out text."""


def run(plan: Plan, corpus: Corpus, watcher: Watcher) -> tuple[list[Record], bool]:
    """Train every policy from every seed.

    Returns:
        The records, and whether Ctrl-C ended the run. Then they are of the finished seeds; without a finished seed, of the steps that all
        policies of the first seed have in common: up to the last step after which each of them was validated.

    Raises:
        KeyboardInterrupt: Before anything was validated.
    """
    finished: list[Record] = []
    for seed in plan.seeds:
        found, interrupted = _run_seed(plan, corpus, watcher, seed)
        if interrupted:
            if not finished and not found:
                raise KeyboardInterrupt
            return finished or found, True
        finished += found
    return finished, False


def validation_steps(steps: int) -> frozenset[int]:
    """Return the steps, counted from 1, after which models are validated: evenly spread, the last one always."""
    return frozenset(-(-steps * part // VALIDATIONS) for part in range(1, VALIDATIONS + 1))


def _run_seed(plan: Plan, corpus: Corpus, watcher: Watcher, seed: int) -> tuple[list[Record], bool]:
    """Train models on the same batches, step by step, and validate them now and then."""
    options = plan.options
    trainees = [
        Trainee(name, policy, size=plan.size, seed=seed, options=options, device=plan.device, autocast=name == AUTOCAST)
        for name, policy in plan.policies.items()
    ]
    batches = Batches(corpus.training, batch=options.batch, context=options.context, seed=seed)
    count = max(1, VALIDATION_BYTES // options.context)
    held_out = even_windows(corpus.held_out, count=count, context=options.context).to(plan.device)
    when = validation_steps(options.steps)
    try:
        for step in range(1, options.steps + 1):
            windows = batches.next().to(plan.device)
            for trainee in trainees:
                watcher.trained(trainee.name, trainee.train(windows))
                if step in when:
                    watcher.validated(trainee.name, trainee.validate(held_out, 4 * options.batch))
    except KeyboardInterrupt:
        return _in_common([trainee.record() for trainee in trainees]), True
    return [trainee.record() for trainee in trainees], False


def _in_common(records: list[Record]) -> list[Record]:
    """Records of runs that were interrupted, each up to the last step that all of them were validated after."""
    count = min(len(record.validation) for record in records)
    if not count:
        return []
    return [record.until(record.validation[count - 1].step) for record in records]
