"""The reference workloads: each trains, repeats itself under one seed, and grows with its knobs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.peer_strategies import PEERS, Inapplicable, blocks_of, chains_of
from benchmarks.workloads import WORKLOADS, load
from recoup.errors import MissingExtra, UsageError

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(WORKLOADS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients(model: torch.nn.Module, step: Callable[[], torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    step()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_a_finite_detached_float(name: str) -> None:
    _, step = load(name, tiny=True)
    loss = step()
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert not loss.requires_grad
    assert torch.isfinite(loss)
    assert loss > 0


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_one_gradient(name: str) -> None:
    model, step = load(name, tiny=True)
    first, second = gradients(model, step, 3), gradients(model, step, 3)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(value.abs().sum() > 0 for value in first.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_trainable_parameter_gets_a_gradient_and_no_frozen_one_does(name: str) -> None:
    model, step = load(name, tiny=True)
    found = gradients(model, step, 3)
    trainable = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    # A router may send no token to an expert, and then autograd leaves its weights alone.
    assert found.keys() == trainable or (name == "mixtral" and found.keys() <= trainable)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"llama", "mixtral"}))
def test_dropout_is_on(name: str) -> None:
    model, step = load(name, tiny=True)
    first, second = gradients(model, step, 3), gradients(model, step, 4)
    assert any(not torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_leaves_the_gradients_of_that_step_alone(name: str) -> None:
    model, step = load(name, tiny=True)
    once = gradients(model, step, 3)
    step()
    assert all(torch.equal(value, once[key]) for key, value in gradients(model, step, 3).items())


@pytest.mark.parametrize("name", NAMES)
def test_more_layers_make_a_larger_model(name: str) -> None:
    small, _ = load(name, tiny=True)
    large, step = load(name, tiny=True, layers=3 if name != "chain" else 4)
    assert size(large) > size(small)
    assert torch.isfinite(step())


@pytest.mark.parametrize("name", NAMES)
def test_building_leaves_the_default_generator_alone(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load(name, tiny=True)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_chooses_the_weights(name: str) -> None:
    first, second, third = (load(name, tiny=True, seed=seed)[0].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], third[key]) for key in first)


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_loads_from_its_file_alone(name: str) -> None:
    path = ROOT / "benchmarks" / "workloads" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"workload_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, step = module.workload(**module.TINY)
    assert torch.isfinite(step())


def test_digits_are_images_with_labels() -> None:
    pytest.importorskip("sklearn")
    from benchmarks.workloads.vit import digits

    images, labels = digits(20, 32)
    assert images.shape == (20, 1, 32, 32)
    assert images.min() >= 0
    assert images.max() <= 1
    assert labels.tolist()[:10] == list(range(10))
    _, step = load("vit", tiny=True, data="digits")
    assert torch.isfinite(step())
    with pytest.raises(UsageError, match="1797"):
        load("vit", tiny=True, data="digits", batch=2000)


def test_digits_without_scikit_learn_name_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match="pip install scikit-learn"):
        load("vit", tiny=True, data="digits")


def test_text_is_python_source_and_can_be_drawn_anew() -> None:
    from benchmarks.workloads.text import library_text

    assert b"import" in bytes(library_text(1 << 14).tolist())
    _, fixed = load("text", tiny=True, dropout=0.0)
    assert torch.equal(fixed(), fixed())
    _, fresh = load("text", tiny=True, dropout=0.0, fresh=True)
    assert not torch.equal(fresh(), fresh())


def test_training_on_text_lowers_the_loss() -> None:
    model, step = load("text", tiny=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    losses = []
    for _ in range(30):
        losses.append(step().item())
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


def test_mistakes_are_named() -> None:
    with pytest.raises(UsageError, match="gpt2"):
        load("gpt7")
    with pytest.raises(UsageError, match="noise"):
        load("vit", tiny=True, data="photographs")


def shape_of(model: torch.nn.Module) -> list[tuple[str, ...]]:
    return [tuple(sorted(vars(module))) for module in model.modules()]


@pytest.mark.parametrize("peer", sorted(PEERS))
@pytest.mark.parametrize("name", NAMES)
def test_a_peer_keeps_the_gradients_and_leaves_the_model_as_it_was(name: str, peer: str) -> None:
    model, step = load(name, tiny=True)
    plain, before = gradients(model, step, 3), shape_of(model)
    notes: list[str] = []
    try:
        with PEERS[peer](model, step, notes):
            assert peer == "plain" or shape_of(model) != before
            under = gradients(model, step, 3)
    except Inapplicable:
        assert peer == "attention core"
        assert name in {"resnet", "unet", "chain"}
    else:
        assert under.keys() == plain.keys()
        assert all(torch.equal(under[key], plain[key]) for key in plain)
        assert bool(notes) == (peer.startswith("sqrt") and name in {"t5", "unet"})
    assert shape_of(model) == before


def test_square_root_recomputes_segments_of_several_blocks() -> None:
    model, step = load("gpt2", tiny=True, layers=4)
    blocks = [block for group in blocks_of(model) for block in group]
    place = {id(next(block.children())): number for number, block in enumerate(blocks)}
    order: list[int] = []

    with PEERS["sqrt(n) segments"](model, step, []):
        # A block's first part runs once in the forward and once in the recomputation of its segment.
        hooks = [next(block.children()).register_forward_pre_hook(lambda module, _: order.append(place[id(module)])) for block in blocks]
        step()
    for hook in hooks:
        hook.remove()
    # All segments forward, then the last segment again, then the first, each in order.
    assert order == [0, 1, 2, 3, 2, 3, 0, 1]


def test_blocks_are_found_and_chained() -> None:
    model, step = load("gpt2", tiny=True, layers=3)
    assert [len(group) for group in blocks_of(model)] == [3]
    assert chains_of(model, step) == blocks_of(model)
    model, step = load("unet", tiny=True)
    assert chains_of(model, step) is None
