"""Plans that offload, made by hand, and small models to run them on."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor, nn

import recoup
from recoup.cost import OffloadLink
from recoup.graph import StepGraph
from recoup.plan import Decision, Plan, Traffic
from recoup.simulate import offloadable, simulate, simulate_plan
from recoup.simulate.index import replays

LINK = OffloadLink(
    target="disk", write_bytes_per_second=1e9, read_bytes_per_second=1e9, latency_seconds=1e-4, staging_bytes=(2 << 20) + 4096, shared=True
)


class Block(nn.Module):
    """A residual block with a norm, a wide inner layer, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.back(torch.nn.functional.gelu(self.wide(self.norm(x)))))


def model_and_step(blocks: int = 3, width: int = 32, rows: int = 64) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A chain of blocks and a step on it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    x = torch.randn(rows, width)

    def step() -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return model, step


def offloading(
    graph: StepGraph, gear: str = "live", *, windows: int = 2, recompute: Plan | None = None, link: OffloadLink = LINK, least_bytes: int = 1
) -> Plan:
    """A plan that offloads all that it can and that ``recompute`` does not drop; windows in multiples of the largest storage."""
    index = replays(graph)
    rebuilt = recompute.recompute_sites if recompute else frozenset()
    chosen = [v for v in sorted(offloadable(index)) if index.bytes[v] >= least_bytes and graph.storages[v].site not in rebuilt]
    window = windows * max(index.bytes[v] for v in chosen)
    base = simulate(graph)
    plan = Plan(
        frontend=graph.frontend,
        fingerprint=graph.fingerprint,
        signature=graph.signature,
        gear=gear,  # type: ignore[arg-type]
        strategy="by hand",
        peak_bytes=1,
        step_seconds=1.0,
        unplanned_peak_bytes=base.peak_bytes,
        unplanned_step_seconds=base.step_seconds,
        root_calls=graph.root_calls,
        traffic=Traffic(
            link=link,
            write_window_bytes=window,
            read_window_bytes=window,
            offloaded_bytes=sum(-(-index.bytes[v] // 4096) * 4096 for v in chosen),
        ),
        decisions=(
            *(recompute.decisions if recompute else ()),
            *(Decision(site=graph.storages[v].site, action="offload", bytes=index.bytes[v], target=link.target) for v in chosen),
        ),
    )
    simulated = simulate_plan(graph, plan)
    return msgspec.structs.replace(plan, peak_bytes=simulated.peak_bytes, step_seconds=simulated.step_seconds)


def recorded(**sizes: int) -> tuple[nn.Module, Callable[[], Tensor], StepGraph]:
    """A model, its step, and the recorded step."""
    model, step = model_and_step(**sizes)
    return model, step, recoup.record(step, model=model)
