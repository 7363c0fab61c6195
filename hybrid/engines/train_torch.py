"""The `torch` train engine: a Transformers model in fp32 master weights, AdamW, packed micro-batches.

Dropout is off in every pass, so the log-probs of one set of weights are one set of numbers. Logits exist only at the
places that predict response tokens, and their log-softmax is in fp32. A mini-batch is cut into micro-batches whose
losses share the mini-batch's denominators, so the gradient does not depend on the cut.
"""

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hybrid.batch import loss_mask, select, validate
from hybrid.engines.model_io import load_model, named_tensors
from hybrid.engines.optim import OptimConfig, learning_rate
from hybrid.engines.packing import PACKINGS, Packing
from hybrid.engines.scorer import Scorer
from hybrid.totals import Totals

__all__ = ["LossFunction", "OptimConfig", "TorchTrainEngine"]

LossFunction = Callable[
    [torch.Tensor, torch.Tensor, TensorDict, Totals], tuple[torch.Tensor, Mapping[str, torch.Tensor]]
]
_logger = logging.getLogger(__name__)


class TorchTrainEngine:
    """Trains a causal language model, or only scores with it (`optim=None`: a frozen reference).

    Memory: 4 bytes a parameter for the weights; with an optimizer 4 more for gradients during `update` and 8 for
    AdamW's state from the first update on. Activations and fp32 logits are those of one micro-batch.
    """

    def __init__(
        self,
        model: str | Path | PretrainedConfig,
        *,
        optim: OptimConfig | None,
        device: str | torch.device = "cpu",
        compute_dtype: torch.dtype = torch.float32,
        packing: Packing = "shared_prefix",
        max_tokens_per_micro_batch: int | None = 4096,
        micro_batch_size: int | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Load `model` with fp32 weights.

        Args:
            model: a model folder, or a config for random weights.
            optim: AdamW and schedule; None freezes the weights and leaves `log_probs` alone to use.
            device: "cpu" or one GPU.
            compute_dtype: fp32, or bf16 for matrix products under autocast; the weights stay fp32.
            packing: see `hybrid.engines.packing`.
            max_tokens_per_micro_batch: limit on a micro-batch's tokens after packing; None for no limit.
            micro_batch_size: limit on a micro-batch's samples; None for no limit.
            gradient_checkpointing: compute each layer's activations a second time in backward, to hold fewer.

        Raises:
            FileNotFoundError: there is no model folder at that path.
            ValueError: a limit below 1, an unknown packing, or a model whose attention can't be packed.
        """
        limits = {"max_tokens_per_micro_batch": max_tokens_per_micro_batch, "micro_batch_size": micro_batch_size}
        for name, limit in limits.items():
            if limit is not None and limit < 1:
                raise ValueError(f"Expected {name} >= 1 or None, but got {limit}.")
        if packing not in PACKINGS:
            raise ValueError(f"Unknown packing {packing!r}; use one of {', '.join(PACKINGS)}.")
        self.device = torch.device(device)
        self._model = load_model(model, dtype=torch.float32, device=self.device)
        self._scorer = Scorer(
            self._model,
            compute_dtype=compute_dtype,
            packing=packing,
            max_tokens=max_tokens_per_micro_batch,
            max_samples=micro_batch_size,
        )
        self._optim = optim
        self._num_updates = 0
        self._optimizer: torch.optim.AdamW | None = None
        if optim is None:
            self._model.requires_grad_(False)
        else:
            self._optimizer = torch.optim.AdamW(
                self._model.parameters(),
                lr=learning_rate(optim, 0),
                betas=optim.betas,
                eps=optim.eps,
                weight_decay=optim.weight_decay,
                fused=True,
            )
        if gradient_checkpointing:
            _checkpoint_layers(self._model)

    @property
    def config(self) -> PretrainedConfig:
        """The model's Transformers config."""
        return self._model.config

    @property
    def num_updates(self) -> int:
        """Calls of `update` so far, those that were skipped included; the schedule goes by it."""
        return self._num_updates

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live fp32 weights by canonical name, tied ones once."""
        return named_tensors(self._model)

    def log_probs(self, batch: TensorDict, *, temperature: float) -> TensorDict:
        """Score the responses of `batch` under the present weights, without gradient.

        Args:
            batch: see docs/batch.md; not changed.
            temperature: the one that the tokens were sampled at.

        Returns:
            `log_probs` and `entropy` (in nats, of the whole distribution at that temperature), fp32 [B, R] on the
            batch's device; 0 where there is no token.
        """
        validate(batch)
        home = batch["response_ids"].device
        host = batch.to("cpu")
        results = {name: torch.zeros(batch["response_ids"].shape, device=home) for name in ("log_probs", "entropy")}
        with torch.no_grad():
            for samples in self._scorer.split(host):
                log_probs, entropy = self._scorer.score(select(host, samples), temperature=temperature)
                width = log_probs.shape[1]
                index = torch.tensor(samples, device=home)
                results["log_probs"][index, :width] = log_probs.to(home)
                results["entropy"][index, :width] = entropy.to(home)
        return TensorDict(results, batch_size=batch.batch_size)

    def update(self, batch: TensorDict, loss: LossFunction, *, temperature: float) -> dict[str, float]:
        """Take one optimizer step on the mini-batch `batch`.

        Args:
            batch: see docs/batch.md, with whatever fields `loss` reads; not changed.
            loss: called as loss(log_probs, entropy, micro_batch, totals) for each micro-batch, all of them [B, R] of
                that micro-batch (its rows may be in another order). It returns this micro-batch's share of the loss
                and of each metric: what it sums over tokens or sequences it must divide by `totals`, which count
                the whole mini-batch, so that shares add up.
            temperature: the one that the tokens were sampled at.

        Returns:
            The sums of the metrics' shares, with `grad_norm` (before clipping), `lr`, `num_micro_batches` and
            `update_skipped`: 1.0 where the norm was not finite, in which case the weights and AdamW's state are as
            they were and a warning was logged.

        Raises:
            ValueError: the engine is frozen, or the batch is not valid.
        """
        if self._optimizer is None or self._optim is None:
            raise ValueError("This engine was made with optim=None and can't update; pass an OptimConfig.")
        validate(batch)
        host = batch.to("cpu")
        totals = Totals.of(loss_mask(host))
        micro_batches = self._scorer.split(host)
        self._optimizer.zero_grad(set_to_none=True)
        sums: dict[str, torch.Tensor] = {}
        for samples in micro_batches:
            micro_batch = select(host, samples).to(self.device)
            log_probs, entropy = self._scorer.score(micro_batch, temperature=temperature)
            share, metrics = loss(log_probs, entropy, micro_batch, totals)
            if share.requires_grad:
                share.backward()
            for name, value in metrics.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        result = {name: float(value) for name, value in sums.items()}
        return {**result, **self._step(self._optimizer, self._optim), "num_micro_batches": float(len(micro_batches))}

    def _step(self, optimizer: torch.optim.AdamW, optim: OptimConfig) -> dict[str, float]:
        """Clip the gradients, apply them at the schedule's learning rate, and drop them."""
        lr = learning_rate(optim, self._num_updates)
        self._num_updates += 1
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        grad_norm = float(norm)
        is_finite = math.isfinite(grad_norm)
        if is_finite and parameters:
            if grad_norm > optim.clip_grad:
                torch.nn.utils.clip_grads_with_norm_(parameters, optim.clip_grad, norm)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        elif not is_finite:
            _logger.warning(
                "Update %d was skipped: the gradient's norm is %s; the weights are unchanged.",
                self._num_updates,
                grad_norm,
            )
        optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "lr": lr, "update_skipped": float(not is_finite)}

    def state_dict(self) -> dict[str, Any]:
        """Return all that an exact continuation needs: weights, AdamW's state, schedule and torch's random state.

        Made of tensors and plain containers (`torch.load(weights_only=True)` reads it). The tensors are the live ones:
        save or copy them before the next update.
        """
        return {"model": self.tensors(), **self.optimizer_state_dict()}

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return `state_dict()` less the weights, for a checkpoint that holds those as a model folder."""
        return {
            "optimizer": self._optimizer.state_dict() if self._optimizer is not None else {},
            "schedule": {"num_updates": self._num_updates},
            "rng": {
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; the weights are copied into the live tensors.

        Raises:
            ValueError: the names or shapes of the weights differ from the model's.
        """
        live, saved = self.tensors(), state["model"]
        different = sorted(set(live) ^ set(saved))
        if different:
            raise ValueError(
                f"Expected the weights of this model, but {', '.join(different[:3])} are on one side only."
            )
        for name, tensor in live.items():
            if tensor.shape != saved[name].shape:
                raise ValueError(
                    f"Expected {name} of shape {list(tensor.shape)}, but the state has {list(saved[name].shape)}."
                )
            tensor.copy_(saved[name])
        self.load_optimizer_state_dict(state)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `optimizer_state_dict` returned; the weights stay as they are."""
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        self._num_updates = int(state["schedule"]["num_updates"])
        torch.set_rng_state(state["rng"]["cpu"].cpu())
        if state["rng"]["cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng"]["cuda"].cpu(), self.device)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the fp32 weights and the config as a folder that Transformers loads."""
        self._model.save_pretrained(folder)


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Turn gradient checkpointing on; the layers go into training mode, which it asks for, without dropout."""
    with warnings.catch_warnings():  # newer releases rename this call, and keep it until Transformers 6
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
            for name, value in list(vars(module).items()):
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)
