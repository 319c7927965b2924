"""Networks: sizes, shapes, FLOPs against torch's counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config import CNN, GPT, MLP, Model, ResNet
from lockstep.data import DataSpec
from lockstep.errors import UserError
from lockstep.models import build_model, forward_flops, parameter_count, training_flops

IMAGES, TOKENS = DataSpec("images", (3, 16, 16), 10), DataSpec("tokens", (24,), 61)
LLAMA = GPT(d_model=32, layers=2, heads=4, kv_heads=2, context=24, norm="rmsnorm", position="rope", activation="swiglu")
MODELS: list[tuple[Model, DataSpec]] = [
    (MLP(width=32), DataSpec("regression", (8,), 3)),
    (MLP(layers=1), IMAGES),
    (CNN(channels=(8, 16, 4), hidden=12), IMAGES),
    (CNN(channels=(8, 8, 8, 8, 8, 8)), IMAGES),
    (ResNet(depth=18, width=8), IMAGES),
    (ResNet(depth=34, width=4, norm="group"), IMAGES),
    (ResNet(depth=50, width=4), IMAGES),
    (ResNet(depth=20, width=3), IMAGES),
    (ResNet(stages=(1, 2), width=5), IMAGES),
    (GPT(d_model=32, layers=2, heads=4, context=24), TOKENS),
    (LLAMA, TOKENS),
    (GPT(d_model=32, layers=1, heads=2, context=24, tied=False, vocabulary=64), TOKENS),
]


def inputs_for(spec: DataSpec, batch: int) -> torch.Tensor:
    if spec.kind == "tokens":
        return torch.randint(spec.classes, (batch, *spec.shape))
    return torch.randn(batch, *spec.shape)


@pytest.mark.parametrize(("config", "spec"), MODELS, ids=[m.name for m, _ in MODELS])
def test_flops_match_the_flop_counter(config: Model, spec: DataSpec) -> None:
    model, batch = build_model(config, spec, seed=0), 2
    inputs = inputs_for(spec, batch)
    # The counter knows attention only as its matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(inputs)
    assert counter.get_total_flops() == batch * forward_flops(model, spec)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(inputs).sum().backward()
    # Backward needs no gradient of the first layer's input, so it may fall short of twice forward; never exceed it.
    assert 0.6 * batch * training_flops(model, spec) < counter.get_total_flops() <= batch * training_flops(model, spec)


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080), ("xl", 1_557_611_200)],
)
def test_gpt_sizes_are_gpt2s(size: str, parameters: int) -> None:
    with torch.device("meta"):
        model = build_model(GPT(size=size, context=1024), DataSpec("tokens", (1024,), 50257))
    assert parameter_count(model) == parameters


def test_the_2_7b_size_is_about_that() -> None:
    with torch.device("meta"):
        model = build_model(GPT(size="2.7b", context=1024), DataSpec("tokens", (1024,), 50257))
    assert 2.6e9 < parameter_count(model) < 2.8e9


def test_an_mlp_has_16_linear_layers_by_default() -> None:
    model = build_model(MLP(), DataSpec("regression", (8,), 3))
    assert sum(isinstance(m, torch.nn.Linear) for m in model.modules()) == 16


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_one_alone() -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    one, same, other = (build_model(CNN(), IMAGES, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_tied_head_is_one_parameter() -> None:
    tied, untied = (build_model(GPT(tied=t), TOKENS) for t in (True, False))
    assert parameter_count(untied) - parameter_count(tied) == 61 * 128


@pytest.mark.parametrize("config", [GPT(d_model=32, layers=2, heads=4, context=24), LLAMA])
def test_a_gpt_does_not_look_ahead(config: GPT) -> None:
    model = build_model(config, TOKENS, seed=0).double()
    tokens = inputs_for(TOKENS, 1)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_rope_sees_distances_and_not_positions() -> None:
    """With one layer and no learned positions, the last token's output over a repeated context does not change."""
    config = GPT(d_model=32, layers=1, heads=4, context=24, position="rope")
    model = build_model(config, TOKENS, seed=0).double()
    one, two = torch.full((1, 12), 7), torch.full((1, 24), 7)
    assert torch.allclose(model(one)[0, -1], model(two)[0, -1], atol=1e-12)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT(d_model=30, heads=4), "model.d_model 30 must be a multiple of model.heads 4"),
        (GPT(heads=4, kv_heads=3), "model.heads 4 must be a multiple of model.kv_heads 3"),
        (GPT(vocabulary=10), "model.vocabulary is 10, but the data set has 61"),
        (GPT(d_model=12, heads=4, position="rope"), "heads of an even size"),
    ],
)
def test_impossible_sizes_are_refused(config: GPT, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(config, TOKENS)
