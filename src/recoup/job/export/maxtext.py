"""MaxText: ``remat_policy: custom`` with what to do with each tensor that it names.

The same for every layer. What has no name (normalizations, activations of the feed-forward network) is always recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from recoup.job.export.candidates import Setting, by_tensors
from recoup.job.job import Job
from recoup.job.workshop import layer_of

__all__ = ["settings"]

# MaxText's names, by the tensors here that are the same.
_NAMES = {
    "query_proj": ("q_rope", "q"), "key_proj": ("k_rope", "k"), "value_proj": ("v",), "context": ("mixed", "sums"), "out_proj": ("out",),
    "mlpwi": ("fc_wide",), "mlpwi_0": ("fc_gate",), "mlpwi_1": ("fc_up",), "mlpwo": ("down",),
}  # fmt: skip


def settings(job: Job) -> Iterator[Setting]:
    """Every map of its names to ``device`` or ``remat``; what enters a layer stays on the device."""
    made: set[str] = set()
    for kind in dict.fromkeys(job.model.kinds):
        layer = layer_of(job.shape, kind, job.device, job.numbers.product)
        made |= {tensor.name for row in layer.table.rows for tensor in row.makes}
    names = [name for name, tensors in _NAMES.items() if made & set(tensors)]
    # Keys and values go together: maps that part them differ by a small tensor.
    free = [name for name in names if name != "value_proj"]
    for bits in product((True, False), repeat=len(free)):
        on = dict(zip(free, bits, strict=True))
        if "value_proj" in names:
            on["value_proj"] = on.get("key_proj", True)
        kept = [tensor for name in names if on[name] for tensor in _present(_NAMES[name], made)]
        lines = [
            "remat_policy: 'custom'",
            "decoder_layer_input: 'device'",
            *(f"{name}: '{'device' if on[name] else 'remat'}'" for name in names),
        ]
        yield by_tensors(job, "\n".join(lines), kept, keep=True)


def _present(tensors: tuple[str, ...], made: set[str]) -> tuple[str, ...]:
    """Those of a name's tensors that are there; of a tensor before and after rotation only the one that attention reads."""
    found = tuple(tensor for tensor in tensors if tensor in made)
    return found[:1] if found and found[0].endswith("_rope") else found
