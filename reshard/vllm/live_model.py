"""One vLLM rank's live model as the destination of a Plan.

Note "four kinds of parameters". Most live parameters are laid out as their loader wrote them: a Plan writes into them
where they are. Those in float8 that our quantising copy fills as vLLM does are filled by it, from the trainer's own
tensors where they live in this process, else from staging tensors in full precision. What vLLM computed from parameters
and keeps beside them (latent attention's absorbed projections) is computed anew, into the same memory, after each
update. What vLLM replaced or repacked after loading otherwise is *opaque*: the checkpoint tensors of such a layer
arrive whole in staging tensors of this rank, and vLLM's own reload takes them from there, into the same kernel tensors.
Which layers that are, and why, is logged once. On a CPU, a tied head keeps a packed copy of the embedding inside a
kernel's closure, which vLLM's own reload leaves stale: it is packed anew here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from reshard.errors import LayoutError
from reshard.layout import Address, Holding, Layout, TensorSpec
from reshard.loader_layout import LoadWeights
from reshard.names import is_dispensable
from reshard.region import Region
from reshard.strided_view import dense_strides
from reshard.torch_layout import dtype_of
from reshard.vllm.after_loading import method_of
from reshard.vllm.checkpoint import checkpoint_specs
from reshard.vllm.layout import EngineLayout, learn_layout
from reshard.vllm.quantised_update import Allocate, Lender, QuantisedUpdate
from reshard.vllm.quantiser import has_quantiser

logger = logging.getLogger(__name__)

_ORDERLY_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
_ORDERLY_EXPERTS = frozenset({"TRITON", "BATCHED_TRITON"})
STAGED = "reload:"
"""Storages of checkpoint tensors that vLLM's own reload takes."""
_NOT_IN_CHECKPOINTS = ("*_scale", "*.k_scale", "*.v_scale", "*zero_point", "*rotary_emb*", "*.inv_freq")


class LiveModel:
    """The live weights of this process's vLLM rank.

    Args:
        vllm_config: the engine's whole config.
        model: its live model; parameters are borrowed and never re-bound by this class.
        model_config: the part of the config that belongs to ``model``.
    """

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, model_config: ModelConfig) -> None:
        self._config, self._model, self._model_config = vllm_config, model, model_config
        self._staging: dict[str, torch.Tensor] = {}
        self._reloaded: list[nn.Module] = []
        self._derived: list[nn.Module] = []
        self._packed: list[nn.Module] = []
        self._quantised: QuantisedUpdate | None = None

    @property
    def staging_bytes(self) -> int:
        """Memory of the tensors that opaque and float8 layers' weights arrive in."""
        quantised = 0 if self._quantised is None else self._quantised.staging_bytes
        return quantised + sum(tensor.nbytes for tensor in self._staging.values())

    @property
    def quantised(self) -> QuantisedUpdate | None:
        """The float8 parameters that quantising copies fill; None where there are none."""
        return self._quantised

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Live parameters, buffers and staging tensors by the storage names of ``layout``."""
        quantised = {} if self._quantised is None else self._quantised.tensors
        return {**self._live, **self._staging, **quantised}

    @property
    def _live(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def layout(
        self,
        checkpoint: Iterable[TensorSpec],
        *,
        rank: int,
        allocate: Allocate | None = None,
        lender: Lender | None = None,
    ) -> Layout:
        """Learn this rank's Layout, ``rank`` being its number in it.

        ``allocate(name, shape, dtype)`` makes the staging tensors of opaque and float8 layers, where other processes
        are to write them; the device's own allocator does by default. ``lender`` is the trainer that lives in this
        process: float8 layers are quantised from its tensors where they can be.

        Raises:
            LayoutError: vLLM's loader refuses the checkpoint's tensors, parameters stay that none of them fills, or
                the engine holds some in a quantised form that can't be made from the trainer's.
        """
        specs = {spec.name: spec for spec in checkpoint}
        check_same_model(specs, self._model_config)
        try:
            learnt = learn_layout(
                self._config, specs.values(), rank=rank, live=self._model, quantised=has_quantiser(self._device)
            )
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            if isinstance(error, LayoutError):
                raise
            raise LayoutError(
                f"vLLM's loader of {type(self._model).__name__} refuses the trainer's tensors: "
                f"{type(error).__name__}: {error}; the trainer's model has another architecture, shape or vocabulary"
            ) from error
        self._check_complete(learnt)
        self._derived = self._modules_of(learnt.derived)
        self._packed = [module for module in self._model.modules() if _packs_embedding(module)]
        self._staging, self._reloaded, self._quantised = {}, [], None
        make = allocate or self._allocate
        by_rule = {rule.module for rule in learnt.quantised.values()}
        opaque = {**repacked_parameters(self._model, by_rule), **learnt.opaque}
        layout = self._with_staging(learnt, opaque, specs, rank, make) if opaque else learnt.layout
        if not learnt.quantised:
            return layout
        rules = learnt.quantised.values()
        self._quantised = QuantisedUpdate(rules, layout, rank=rank, live=self._live, allocate=make, lender=lender)
        return self._quantised.layout

    def finish(self) -> None:
        """Bring everything that depends on the new weights up to date; called after each transition."""
        if self._quantised is not None:
            self._quantised.run()
        if not (self._reloaded or self._derived or self._packed):
            return
        with torch.no_grad(), set_current_vllm_config(self._config):
            if self._reloaded:
                for module in self._reloaded:
                    _pack_anew(module)
                    initialize_layerwise_reload(module)
                load: LoadWeights = self._model.load_weights  # type: ignore[assignment]
                load((name.removeprefix(STAGED), tensor) for name, tensor in self._staging.items())
                for module in self._reloaded:
                    finalize_layerwise_reload(module, self._model_config)
            for module in self._derived:
                _recompute(module, self._model_config.dtype)
            for module in self._packed:
                vars(module)["quant_method"].process_weights_after_loading(module)

    def _check_complete(self, learnt: EngineLayout) -> None:
        missing = [
            name
            for name in learnt.unwritten
            if name not in learnt.opaque and not any(fnmatchcase(name, known) for known in _NOT_IN_CHECKPOINTS)
        ]
        if missing:
            raise LayoutError(
                f"the trainer's model lacks tensors that the engine needs: nothing fills {len(missing)} parameters of "
                f"{type(self._model).__name__}, {', '.join(missing[:8])}; pass all parameters by their checkpoint names"
            )
        if learnt.serialised:
            name = learnt.serialised[0]
            raise LayoutError(
                f"{len(learnt.serialised)} parameters of {type(self._model).__name__} come quantised in the engine's "
                f"checkpoint, and the trainer's are in full precision, first {name}: {learnt.opaque[name]}; start the "
                "engine from a checkpoint in full precision with quantization='fp8_per_block', or in float8 with "
                "128 x 128 blocks"
            )

    def _modules_of(self, names: Iterable[str]) -> list[nn.Module]:
        """Modules that own these tensors, each once, in the model's order; all of them can compute them anew."""
        owners = {name.rpartition(".")[0] for name in names}
        found = {name: module for name, module in self._model.named_modules() if name in owners}
        unable = sorted(name for name, module in found.items() if not isinstance(module, _Recomputes))
        if unable:
            raise LayoutError(
                f"vLLM computed tensors of {unable[:4]} from their weights after loading and has no public way to do "
                "it again: this model can't be updated in place; use vLLM's own weight-transfer backends for it"
            )
        return list(found.values())

    def _with_staging(
        self,
        learnt: EngineLayout,
        opaque: Mapping[str, str],
        specs: Mapping[str, TensorSpec],
        rank: int,
        make: Allocate,
    ) -> Layout:
        """The Layout with whole checkpoint tensors, in staging, for every layer that holds an opaque parameter."""
        owners = sorted({name.rpartition(".")[0] for name in opaque})
        inside = {name: found for name, found in learnt.sources.items() if name.rpartition(".")[0] in owners}
        needed = {source for found in inside.values() for source in found}
        sources = [name for name in specs if name in needed]
        modules = dict(self._model.named_modules())
        self._reloaded = [modules[owner] for owner in owners]
        logger.warning(
            "%d parameters of %s are not laid out as loaded (first: %s, %s); their layers take vLLM's own reload, "
            "which stages %d tensors",
            len(opaque),
            type(self._model).__name__,
            *next(iter(opaque.items())),
            len(sources),
        )
        kept = [h for h in learnt.layout.holdings(rank) if h.address.storage.rpartition(".")[0] not in owners]
        for name in sources:
            self._staging[STAGED + name] = make(STAGED + name, specs[name].shape, self._model_config.dtype)
        kept += [_whole(specs[name], self._staging[STAGED + name], rank) for name in sources]
        dtypes = {h.region.name: h.address.dtype for h in kept}
        used = [TensorSpec(name, specs[name].shape, dtype) for name, dtype in dtypes.items()]
        return Layout.from_holdings(used, kept, ranks=[rank])

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


def _whole(spec: TensorSpec, tensor: torch.Tensor, rank: int) -> Holding:
    address = Address(STAGED + spec.name, 0, dense_strides(spec.shape), dtype_of(tensor.dtype))
    return Holding(rank, Region(spec.name, (0,) * len(spec.shape), spec.shape), address)


def repacked_parameters(model: nn.Module, known: Collection[str] = ()) -> dict[str, str]:
    """Parameters that vLLM's kernels may reorder after loading without a change of shape, each with the reason.

    Plain linear layers, embeddings and Triton's experts keep the order that they were loaded in; any other way of
    holding weights (quantised ones, experts of other kernels) is taken not to, unless the module is one of ``known``.
    """
    found = {}
    for name, module in model.named_modules():
        method = method_of(module)
        if name in known or method is None or _keeps_order(method):
            continue
        reason = f"{type(method).__name__} may reorder it after loading"
        found.update({f"{name}.{leaf}": reason for leaf, _ in module.named_parameters(recurse=False)})
    return found


def _keeps_order(method: object) -> bool:
    backend = vars(method).get("unquantized_backend")
    if backend is not None:
        return str(backend.name) in _ORDERLY_EXPERTS and not current_platform.is_rocm()
    return type(method).__name__ in _ORDERLY_METHODS


def check_same_model(given: Mapping[str, TensorSpec], model_config: ModelConfig) -> None:
    """Compare a trainer's tensors with those of the checkpoint that the engine's config describes.

    Raises:
        LayoutError: names that are missing or too many, or shapes that differ, all in one message.
    """
    try:
        expected = checkpoint_specs(model_config.hf_config.to_dict(), dtype=model_config.dtype)
    except LayoutError:
        logger.info("no list of tensors for %s: only its loader checks the trainer's", model_config.architecture)
        return
    shapes = {spec.name: spec.shape for spec in expected}
    lacking = [name for name in shapes if name not in given]
    added = [name for name in given if name not in shapes and not is_dispensable(name)]
    differing = [
        f"{name} is {list(spec.shape)}, the engine's {list(shapes[name])}"
        for name, spec in given.items()
        if name in shapes and spec.shape != shapes[name]
    ]
    told = [
        f"{len(names)} {what} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
        for what, names in (("missing", lacking), ("unknown", added), ("of another shape", differing))
        if names
    ]
    if told:
        raise LayoutError(
            f"the trainer's tensors do not fit the engine's {model_config.architecture}: {'; '.join(told)}; pass "
            "the parameters of the same architecture and vocabulary, by their checkpoint names"
        )


@runtime_checkable
class _Recomputes(Protocol):
    """A layer of vLLM that computes tensors from its weights after loading."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...


def _pack_anew(module: nn.Module) -> None:
    """On a CPU: let experts be packed for their kernel again; vLLM does it at the first load only."""
    method = method_of(module)
    if current_platform.is_cpu() and isinstance(method, UnquantizedFusedMoEMethod):
        method.moe_kernel = None


def _packs_embedding(module: nn.Module) -> bool:
    """Whether a head runs on a packed copy of its weight (on a CPU)."""
    return isinstance(method_of(module), UnquantizedEmbeddingMethod) and "cpu_linear" in vars(module)


def _recompute(module: nn.Module, dtype: torch.dtype) -> None:
    """Let ``module`` compute its derived tensors anew; they stay where captured graphs look for them."""
    before = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    assert isinstance(module, _Recomputes)
    module.process_weights_after_loading(dtype)
    for name, old in before.items():
        new = vars(module)[name]
        if new is not old and new.data_ptr() != old.data_ptr():
            old.copy_(new)
            vars(module)[name] = old
