"""Models, data and losses that come from elsewhere (`elsewhere.py`) train and verify under every data engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.cli import main
from lockstep.config import Config, Data, Own, Train
from lockstep.data import Batch, shard_batch
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.models.loss import IGNORED, OwnLoss, class_last, ignored_by, logits_of
from lockstep.verify.run import Request, verify
from lockstep.verify.scenarios import switch_off_dropout, user_scenarios
from tests.elsewhere import Vit
from tests.ranks import on_ranks

HERE = "tests.elsewhere:"
THEM = {
    "Vit": ("pictures", None),
    "bert": ("masked_text", None),
    "UNet": ("segments", None),
    "Lstm": ("streams", None),
    "t5": ("translations", f"{HERE}without_padding"),
}
ENGINES = ["bucketed", "zero1", "zero2", "zero3", "ddp", "fsdp"]


def config_of(model: str) -> Config:
    data, loss = THEM[model]
    return Config(model=Own(import_=HERE + model), data=Data(name="own", import_=HERE + data), train=Train(loss=loss))


def flags_of(model: str) -> list[str]:
    data, loss = THEM[model]
    user_loss = ["--train.loss", loss] if loss is not None else []
    return ["--model.import", HERE + model, "--data.import", HERE + data, *user_loss, "--train.lr", "1e-3"]


def verified(world: World) -> dict[str, list[str]]:
    """What was found wrong of each."""
    return {
        model: [said for v in verify(world, Request(ENGINES, 2, own=config_of(model))) for said in v.failures]
        for model in THEM
    }


@pytest.mark.slow
def test_all_of_them_verify_with_every_data_engine() -> None:
    pytest.importorskip("transformers")
    assert on_ranks(verified, 2) == [{model: [] for model in THEM}] * 2


@pytest.mark.parametrize("model", ["UNet", "Lstm"])
def test_they_train_and_go_on_and_tell_what_is_known(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one rank, in this process: two steps, then two more from the checkpoint."""
    command = [
        "train",
        *flags_of(model),
        "--train.batch-size",
        "6",
        "--train.log-every",
        "1",
        "--checkpoint.every",
        "2",
    ]
    run = str(tmp_path / "run")
    assert main([*command, "--train.steps", "2", "--run-dir", run]) == 0
    assert main([*command, "--train.steps", "4", "--resume", run]) == 0
    told = capsys.readouterr().out
    assert told.count("reached: train loss ") == 2
    assert "test loss" in told
    assert "MFU 0.0%" not in told


def test_a_pipeline_of_several_inputs_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["verify", *flags_of("t5"), "--strategies", "single,cp=2", "--world-size", "2"]) == 2
    assert "error" in capsys.readouterr().err


# ---- losses --------------------------------------------------------------------------------------------------------


def pads_with_zero(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=0)


def of_an_object(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def plain(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def test_which_target_a_loss_leaves_out_is_found_by_trying() -> None:
    assert ignored_by(plain, 6, "") == IGNORED
    assert ignored_by(pads_with_zero, 6, "") == 0
    assert ignored_by(of_an_object, 6, "") == -1
    assert ignored_by(nn.CrossEntropyLoss(ignore_index=4), 6, "") == 4
    assert ignored_by(lambda a, b: a.nothing, 6, "") == IGNORED
    with pytest.raises(UserError, match="returns the sum of the losses"):
        ignored_by(summed, 6, "my:loss")


def test_targets_that_are_left_out_weigh_nothing() -> None:
    loss = OwnLoss("tests.test_elsewhere:pads_with_zero", 6)
    logits, targets = torch.randn(8, 6), torch.tensor([0, 1, 2, 0, 0, 3, 4, 5])
    parts = [loss(logits[a:b], targets[a:b]) for a, b in ((0, 3), (3, 8))]
    counts = [Batch(logits[a:b], targets[a:b]).target_count(loss.ignored) for a, b in ((0, 3), (3, 8))]
    whole = pads_with_zero(logits, targets)
    torch.testing.assert_close(sum(parts) / sum(counts), whole)


def test_classes_stand_last_or_second() -> None:
    targets = torch.zeros(2, 4, 5, dtype=torch.long)
    assert class_last(torch.zeros(2, 4, 5, 3), targets).shape == (2, 4, 5, 3)
    assert class_last(torch.zeros(2, 3, 4, 5), targets).shape == (2, 4, 5, 3)
    assert class_last(torch.zeros(2, 7), torch.zeros(2)).shape == (2, 7)


def test_logits_are_found_in_what_models_return() -> None:
    logits = torch.zeros(2, 3)
    for outputs in (logits, {"logits": logits}, (logits, "state")):
        assert logits_of(outputs) is logits
    assert logits_of({"other": logits}) is None


# ---- verify --------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Random by something else than dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layer(images.flatten(1) + torch.randn(192))
        return logits


def test_dropout_is_switched_off_and_other_noise_is_one_line() -> None:
    model = Vit(0.5)
    assert switch_off_dropout(model) > 0
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(model(images), model(images))
    noisy = Config(
        model=Own(import_="tests.test_elsewhere:Noisy"), data=Data(name="own", import_=f"{HERE}pictures"), train=Train()
    )
    with pytest.raises(UserError, match="Noisy gives two outputs for the same inputs"):
        user_scenarios(noisy)


# ---- batches -------------------------------------------------------------------------------------------------------


def test_shard_batch_takes_nests_as_they_are() -> None:
    nest = {
        "a": torch.arange(6),
        "b": (torch.arange(12).view(6, 2), [torch.arange(6)]),
        "flag": True,
        "t": torch.ones(()),
    }
    mine: Any = shard_batch(nest, 1, 2)
    assert mine["a"].tolist() == [3, 4, 5]
    assert mine["b"][0].shape == (3, 2)
    assert mine["b"][1][0].tolist() == [3, 4, 5]
    assert (mine["flag"], float(mine["t"])) == (True, 1.0)
    with pytest.raises(UserError, match="tensors of 4 and 6 rows"):
        shard_batch((torch.zeros(6), torch.zeros(4)), 0, 2)


# ---- models of transformers, in a loop of one's own ----------------------------------------------------------------

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
LANGUAGE = {
    "LlamaForCausalLM": {**SIZES, **HEADS},
    "Qwen3ForCausalLM": {**SIZES, **HEADS, "head_dim": 8},
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 16},
    "MambaForCausalLM": {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 40},
    "T5ForConditionalGeneration": {
        "d_model": 16,
        "d_ff": 32,
        "d_kv": 8,
        "num_heads": 2,
        "num_layers": 2,
        "decoder_start_token_id": 0,
    },
}
DROPOUTS = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "dropout_rate")


def of_transformers(name: str) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**LANGUAGE[name])
    for dropout in DROPOUTS:
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    torch.manual_seed(2)
    model: nn.Module = kind(config).double()
    return model


def tokens_of(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, 40, (8, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def loop_of(model: Any, optimizer: torch.optim.Optimizer, share: tuple[int, int]) -> None:
    for step in range(2):
        optimizer.zero_grad()
        model(**shard_batch(tokens_of(step), *share)).loss.backward()
        optimizer.step()


def own_loops(world: World, names: list[str]) -> dict[str, float]:
    """How far each wrapper is from one process."""
    found = {}
    for name in names:
        whole = of_transformers(name)
        loop_of(whole, torch.optim.SGD(whole.parameters(), lr=0.05), (0, 1))
        for wrapper in ("bucketed", "zero2", "zero3"):
            model: Any = of_transformers(name)
            if wrapper == "zero2":
                sharded = lockstep.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
                optimizer: torch.optim.Optimizer = sharded
                model = lockstep.ShardedDataParallel(model, sharded)
            else:
                make: Any = lockstep.DataParallel if wrapper == "bucketed" else lockstep.FullyShardedDataParallel
                model = make(model)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            loop_of(model, optimizer, (world.rank, world.size))
            state = model.full_state_dict() if wrapper == "zero3" else model.module.state_dict()
            off = [float((state[key] - value).abs().max()) for key, value in whole.state_dict().items()]
            found[f"{name}, {wrapper}"] = max(off)
    return found


@pytest.mark.slow
def test_the_wrappers_are_right_for_models_of_transformers() -> None:
    pytest.importorskip("transformers")
    for found in on_ranks(own_loops, 2, list(LANGUAGE)):
        assert {what: off for what, off in found.items() if off > 1e-9} == {}
        assert len(found) == 3 * len(LANGUAGE)
