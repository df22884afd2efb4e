"""One model, trained under one policy."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import everybit as eb
from everybit_cli.compare.model import ModelSize, Transformer, loss_of
from everybit_cli.compare.options import CompareOptions, optimizer_of
from everybit_cli.compare.results import Point, Probe, Record
from everybit_cli.machine import timed, wait_for
from everybit_torch.training.evaluation import evaluation_weights

WARMUP_SHARE = 0.1
FINAL_SHARE = 0.1  # of the highest learning rate
PROBE_EVERY = 10
UNTIMED_STEPS = 5  # the first ones allocate, compile, and fill caches


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
