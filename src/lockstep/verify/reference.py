"""One process on the whole global batches of a scenario: what every strategy is held against.

Plain PyTorch, with nothing of `strategies` in it: the mean loss, one backward, one clip, one optimizer step. A fault in
the worker cannot hide on both sides.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.user_code import imported
from lockstep.data import IGNORED, Batch, called_with
from lockstep.layout import ALONE, World
from lockstep.models.experts import mixtures_in
from lockstep.models.loss import class_last, logits_of
from lockstep.models.matrices import matrices_in
from lockstep.parallel.holding import held_in
from lockstep.parallel.optimizer.average import averages, evaluation_weights
from lockstep.parallel.optimizer.muon import Muon
from lockstep.training.optimizer import optimizer_factory
from lockstep.verify.activations import Activations
from lockstep.verify.scenarios import Scenario


@dataclass
class Moment:
    """Where training stands after one step."""

    loss: float
    correct: float | None
    """Correct predictions; None where that is not defined (regression, a user's loss)."""
    norm: float
    """Of the gradients, before they are clipped."""
    gradients: dict[str, Tensor]
    """After clipping, as the optimizer gets them."""
    weights: dict[str, Tensor]
    """And buffers."""
    evaluation: tuple[float, float | None]
    """Mean loss and accuracy over the scenario's test samples."""
    auxiliary: float = 0.0
    """What experts add to the loss for their balance."""
    load: dict[str, list[int]] = field(default_factory=dict)
    """How many tokens took each expert, by mixture."""
    activations: dict[str, Tensor] = field(default_factory=dict)
    """Of this step's forward, by module."""


class Reference:
    """Computed once and held against every strategy. A model too large to remember at every step is trained anew beside
    each strategy.
    """

    MEMORY = 256 * 1024 * 1024

    def __init__(self, world: World, scenario: Scenario, steps: int, precision: str, optimizer: str) -> None:
        self.world, self.scenario, self.precision = world, scenario, precision
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        self.make_optimizer = optimizer_factory(scenario.train(optimizer))
        self.lr = scenario.train(optimizer).lr
        self._restart()
        model_bytes = sum(p.nbytes for p in self._model.parameters())
        self._steps = steps
        self._remembers = 2 * steps * model_bytes <= self.MEMORY
        self._moments: list[Moment] = []
        self.initial = self._weights()
        self.idle = {name for name, module in self._model.named_modules() if not module.training}
        """Modules that the model itself keeps out of training."""

    def _restart(self) -> None:
        self._model = self.scenario.build(seed=0).to(self.world.device, self.dtype)
        self._optimizer = self.make_optimizer(p for p in self._model.parameters() if p.requires_grad)
        if isinstance(self._optimizer, Muon):
            self._optimizer.assign_held(held_in(self._model), matrices_in(self._model), ALONE)

    def learning_rate(self, step: int) -> float:
        """Another one at each step: a rate that does not reach the optimizer shows."""
        return self.lr * (1.0 - 0.5 * (step % 5) / 5)

    def after(self, step: int) -> Moment:
        """The reference after `step`; steps must be asked for in order, from 0 again for each strategy."""
        if step < len(self._moments):
            return self._moments[step]
        if step == 0 and not self._remembers:
            self._restart()
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        moment = self._take(self.scenario.global_batch(step).to(self.world.device, self.dtype))
        if step == 0 and self._steps * sum(t.nbytes for t in moment.activations.values()) > self.MEMORY:
            self._remembers = False
        if self._remembers:
            self._moments.append(moment)
        return moment

    def _take(self, batch: Batch) -> Moment:
        self._optimizer.zero_grad()
        with Activations(self._model) as activations:
            outputs = called_with(self._model, batch.inputs)
        loss, correct = self._measure(outputs, batch.targets)
        mixtures = mixtures_in(self._model)
        load = {name: mixture.load.tolist() for name, mixture in mixtures.items()}
        balance = [mixture.auxiliary_loss for mixture in mixtures.values()]
        auxiliary = torch.stack(balance).sum() if balance else torch.zeros_like(loss)
        (loss + auxiliary).backward()
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        for parameter in parameters:
            parameter.grad = (
                parameter.grad.to_dense() if parameter.grad is not None else None
            )  # torch clips no sparse one
        limit = self.scenario.clip_norm
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
        gradients = {n: p.grad.clone() for n, p in self._model.named_parameters() if p.grad is not None}
        self._optimizer.step()
        return Moment(
            loss.item(),
            correct,
            norm.item(),
            gradients,
            self._weights(),
            self._evaluate(),
            auxiliary.item(),
            load,
            activations.whole(),
        )

    def _measure(self, outputs: Any, targets: Tensor) -> tuple[Tensor, float | None]:
        user_loss = self.scenario.user_loss
        if user_loss is not None:
            return imported(user_loss, "train.loss")(outputs, targets), None
        outputs = logits_of(outputs)
        if self.scenario.spec.kind == "regression":
            return F.mse_loss(outputs, targets), None
        outputs = class_last(outputs, targets)
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
        return loss, float((outputs.argmax(-1) == targets).sum())

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, float | None]:
        batch = self.scenario.test_batch().to(self.world.device, self.dtype)
        self._model.eval()
        with evaluation_weights(self._optimizer, lambda: None) if averages(self._optimizer) else nullcontext():
            loss, correct = self._measure(called_with(self._model, batch.inputs), batch.targets)
        self._model.train()
        return loss.item(), None if correct is None else correct / int(batch.target_count())

    def _weights(self) -> dict[str, Tensor]:
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named if name not in self.scenario.local_buffers}
