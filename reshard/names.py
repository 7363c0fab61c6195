"""Names of training parameters, brought back to the checkpoint's own."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from reshard.errors import LayoutError

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model.")
_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


_DISPENSABLE = ("lm_head.weight", "*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")


def is_dispensable(name: str) -> bool:
    """Whether an engine may leave a tensor of this name aside: a head tied to the embedding, a constant table."""
    return any(fnmatchcase(name, pattern) for pattern in _DISPENSABLE)


def canonical_name(name: str) -> str:
    """``name`` without what compiling, FSDP, DDP, checkpointing and adapters put into it.

    ``_orig_mod.model.layers.0.q_proj.base_layer.weight`` is ``model.layers.0.q_proj.weight``; ``modules_to_save`` of
    adapters give the name of the module that they replace.
    """
    for wrapper in _WRAPPERS:
        name = _without(name, wrapper)
    name = name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
    return name


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Canonical name by given name, for all names of one model.

    Originals that adapters replaced (``original_module``) are left out, as generation never sees them.

    Raises:
        LayoutError: two names become one, or adapters are still beside their base weights (merge them first).
    """
    found: dict[str, str] = {}
    owner: dict[str, str] = {}
    adapters = []
    for name in names:
        if any(part in _ADAPTERS for part in name.split(".")):
            adapters.append(name)
            continue
        if ".original_module." in name:
            continue
        short = canonical_name(name)
        if short in owner:
            raise LayoutError(f"{owner[short]!r} and {name!r} are both {short!r}: pass each tensor under one name")
        owner[short] = name
        found[name] = short
    if adapters:
        raise LayoutError(
            f"{len(adapters)} adapter tensors are not merged, first {adapters[0]!r}: their base weights alone are not "
            "the model; merge the adapters into a copy (or into the weights) and pass the merged tensors"
        )
    return found


def _without(name: str, wrapper: str) -> str:
    """Take ``wrapper`` out where it begins the name or follows a dot."""
    while name.startswith(wrapper):
        name = name[len(wrapper) :]
    return name.replace("." + wrapper, ".")
