"""A Llama of the transformers library: eval mode, a cache left on, validation without gradients."""

from __future__ import annotations

import pytest
import torch
from situations import GEARS, Result, Step, plan_equals_plain, planned
from torch import nn

from recoup.torch import apply

transformers = pytest.importorskip("transformers")


def llama(training: bool, use_cache: bool) -> tuple[nn.Module, Step]:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
    )
    model = transformers.LlamaForCausalLM(config).train(training)
    calls: list[int] = []
    model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.randint(0, 64, (2, 16))

    def step() -> Result:
        model.zero_grad()
        calls.clear()
        out = model(ids, use_cache=use_cache)
        loss = out.logits.float().square().mean()
        loss.backward()
        cache = out.past_key_values
        return {"loss": loss, "calls": len(calls), "length": cache.get_seq_length() if cache is not None else None}

    return model, step


@pytest.mark.parametrize(("training", "use_cache"), [(True, False), (False, False), (True, True)], ids=["train", "eval", "cache"])
@pytest.mark.parametrize("gear", GEARS)
def test_the_mode_and_the_cache_do_not_matter(training: bool, use_cache: bool, gear: str) -> None:
    report = plan_equals_plain(lambda: llama(training, use_cache), gear, steps=5)
    assert report.dropped_bytes > 0


def test_validation_costs_nothing_and_keeps_its_cache() -> None:
    model, _, plan = planned(lambda: llama(True, False), "live")
    calls: list[int] = []
    model.get_submodule("model.layers.0").register_forward_hook(lambda *_: calls.append(1))
    with apply(model, plan) as applied, torch.no_grad():
        out = model(torch.randint(0, 64, (2, 16)), use_cache=True)
        assert applied.report().live_calls == 0
    assert calls == [1]
    assert out.past_key_values.get_seq_length() == 16
