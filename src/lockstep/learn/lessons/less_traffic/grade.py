"""What each method gives, step by step, and what it sends."""

import torch
from torch import Tensor, nn

from lockstep.learn.rank import Rank

ROWS, COLUMNS, LOW, NUMBER, RANKS = 100, 50, 2, 8, 3


def facts() -> list[str]:
    """Numbers of the text."""
    return [
        f"PowerSGD of rank {LOW} on a matrix of {ROWS} by {COLUMNS} numbers of {NUMBER} bytes on {RANKS} ranks",
        f"{ROWS * COLUMNS * NUMBER:,} bytes",
    ]


def grade(rank: Rank) -> None:
    n = rank.size
    gradients = rank.of_all(64, seed=1, dtype=torch.float32)
    for gradient in gradients:
        gradient[7] *= 1e6
    with rank.recorder.during() as calls:
        got = rank.exercise.reduce_bf16(gradients[rank.rank].clone())
    sent = sum(call.nbytes for call in calls)
    rank.expect(sent <= 2 * 64, f"reduce_bf16: it still sends {sent // 64} bytes for each number; bfloat16 has 2")
    fits = isinstance(got, Tensor) and got.dtype == torch.float32 and got.shape == gradients[0].shape
    rank.expect(fits, "reduce_bf16: expected a float32 tensor of the gradient's shape back")
    mean, scale = torch.stack(gradients).mean(0), torch.stack(gradients).abs().amax(0)
    finite = bool(got.isfinite().all())
    rank.expect(finite, "reduce_bf16: infinite: float16 ends at 65,504; bfloat16 has float32's range, and fewer digits")
    off = ((got - mean).abs() / scale).argmax()
    near = bool((got - mean).abs()[off] <= 0.02 * scale[off])
    said = f"reduce_bf16[{int(off)}]: expected {float(mean[off]):.4g}, got {float(got[off]):.4g}"
    rank.expect(near, f"{said}: further from the mean than bfloat16's digits explain")

    top, k = rank.exercise.TopK(5), 5
    rests = [torch.zeros(40, dtype=torch.float64, device=rank.device) for _ in range(n)]
    for step in range(3):
        gradients = rank.of_all(40, seed=10 + step)
        right, forgetful = _top_k(gradients, rests, k), _top_k(gradients, [torch.zeros_like(r) for r in rests], k)[0]
        with rank.recorder.during() as calls:
            got = top.reduce(gradients[rank.rank].clone())
        mistakes = {
            "what was not sent is forgotten: add it to the next gradient": forgetful,
            "you summed, the mean is missing": right[0] * n,
            "the largest are chosen by size: a large negative number counts too (abs)": _top_k(
                gradients, rests, k, signed=True
            )[0],
        }
        rank.expect_tensor(f"TopK, step {step}: the result", got, right[0], mistakes)
        rests = right[1]
        most = n * k * (NUMBER + NUMBER)
        sent = sum(call.nbytes for call in calls)
        rank.expect(sent <= most, f"TopK: {sent:,} bytes are sent; indices and values are {most:,}")

    matrices, q = rank.of_all(ROWS, COLUMNS, seed=20), rank.same(COLUMNS, LOW, seed=21)
    with rank.recorder.during() as calls:
        got, after = rank.exercise.power_sgd(matrices[rank.rank].clone(), q.clone())
    mean = torch.stack(matrices).mean(0)
    p = torch.linalg.qr(mean @ q).Q
    rough = mean @ q * n
    mistakes = {
        "power_sgd: the columns of p are not orthonormal: sums of them are not projections": rough @ (mean.T @ rough).T,
        "power_sgd: you summed, the mean is missing": n * p @ (mean.T @ p).T,
    }
    sent = sum(call.elements for call in calls)
    most = (ROWS + COLUMNS) * LOW
    rank.expect(sent <= most, f"power_sgd: {sent:,} numbers were sent; p and q have {most}")
    rank.expect_tensor("power_sgd: the result", got, p @ (mean.T @ p).T, mistakes)
    spans = [torch.linalg.qr(one).Q for one in (after, mean.T @ p)]  # its length does not matter
    rank.expect_tensor("power_sgd: what the next q spans", spans[0] @ spans[0].T, spans[1] @ spans[1].T)
    rank.expect_calls(calls, {"all_reduce": 2})
    if n == RANKS:
        rank.guess("PREDICTED_BYTES", sum(call.sent for call in calls))
        share = sum(call.nbytes for call in calls) / (ROWS * COLUMNS * NUMBER)
        rank.note(f"PowerSGD sends {share:.1%} of what the whole gradient would be")

    model = nn.Linear(4, 3).double().to(rank.device)
    weights = rank.of_all(3, 4, seed=30)
    model.weight.data.copy_(weights[rank.rank])
    model.bias.data.zero_()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    rank.exercise.average_weights(model)
    mistakes = {"local SGD averages weights, not gradients: ranks have taken different steps": weights[rank.rank]}
    rank.expect_tensor("average_weights: the weight", model.weight.data, torch.stack(weights).mean(0), mistakes)

    start, momentum = rank.same(6, seed=40), torch.zeros(6, dtype=torch.float64, device=rank.device)
    right_momentum = momentum.clone()
    for turn in range(3):
        now = rank.same(6, seed=41 + turn)
        gradient = start - now
        right_momentum = 0.9 * right_momentum + gradient
        expected = start - 0.7 * (gradient + 0.9 * right_momentum)
        mistakes = {
            "the momentum of the rounds before is lost: change it in place": start - 0.7 * (gradient + 0.9 * gradient),
            "the step begins at the mean of the ranks, not where the round started": expected - start + now,
            "that is plain momentum: Nesterov's looks ahead, g + beta momentum": start - 0.7 * right_momentum,
            "the sign is wrong: start - now points uphill, like a gradient": 2 * start - expected,
        }
        got = rank.exercise.outer_step(start, now, momentum, 0.7, 0.9)
        rank.expect_tensor(f"outer_step, round {turn}", got, expected, mistakes)
        start = expected


def _top_k(gradients: list[Tensor], rests: list[Tensor], k: int, signed: bool = False) -> tuple[Tensor, list[Tensor]]:
    total, left = torch.zeros_like(gradients[0]), []
    for gradient, rest in zip(gradients, rests, strict=True):
        full = gradient + rest
        chosen = (full if signed else full.abs()).topk(k).indices
        total[chosen] += full[chosen]
        after = full.clone()
        after[chosen] = 0
        left.append(after)
    return total / len(gradients), left
