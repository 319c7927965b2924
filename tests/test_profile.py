"""`lockstep profile`: arithmetic on traces, the verdict, and a real trace of two ranks."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli import main
from lockstep.config import Config, Parallel, Train
from lockstep.intervals import covered
from lockstep.profile.diagnosis import DATA, STEP, diagnose, is_matrix_product, short_name, words
from lockstep.profile.trace import RankTrace, merged, self_times
from lockstep.results.record import read_record

HOOK = "autograd::engine::evaluate_function: AddBackward0"
spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=8)


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid, "pid": 7}


@given(spans, st.integers(0, 40), st.integers(0, 40))
def test_covered_counts_each_moment_once(found: list[tuple[int, int]], begin: int, length: int) -> None:
    moments = {m for ts, dur in found for m in range(ts, ts + dur) if begin <= m < begin + length}
    assert covered([(ts, ts + dur) for ts, dur in found], begin, begin + length) == len(moments)


def test_self_time_is_without_what_was_called() -> None:
    events = [event("linear", 0, 100), event("addmm", 10, 60), event("copy", 20, 10), event("relu", 100, 5)]
    assert self_times(events) == {"linear": 40, "addmm": 50, "copy": 10, "relu": 5}


def a_step(*operations: dict[str, Any], length: float = 1000.0, reading: float = 0.0) -> list[dict[str, Any]]:
    annotations = [event(STEP, 0, length, "user_annotation"), event(DATA, -reading, reading, "user_annotation")]
    return [*annotations, *operations]


@pytest.mark.parametrize(
    ("events", "exposed_ms", "bound"),
    [
        (a_step(event("aten::mm", 0, 900)), 0.0, "compute"),
        (a_step(event("aten::mm", 0, 200), event("aten::add_", 200, 600)), 0.0, "memory"),
        (a_step(event("aten::mm", 0, 300)), 0.6, "communication"),
        (a_step(event("aten::mm", 0, 500), reading=900.0), 0.0, "data"),
        (a_step(event(HOOK, 0, 900), event("aten::mm", 0, 100)), 0.5, "communication"),  # it waited in a hook
        (a_step(event("aten::mm", 0, 100), event("aten::mm", 0, 900, tid=2)), 0.0, "host"),
    ],
)
def test_what_a_step_is_bound_by(events: list[dict[str, Any]], exposed_ms: float, bound: str) -> None:
    found = diagnose(events, exposed_ms, on_gpu=False)
    assert found.bound_by == bound
    assert sum(found.shares.values()) == pytest.approx(1.0)
    lines = words(found, Config(parallel=Parallel(data="naive")), ranks=2)
    assert lines[0].startswith(f"bound by {bound}: ")
    assert any(line.startswith("try next: ") for line in lines)


def test_on_a_gpu_its_kernels_are_the_work() -> None:
    kernels = [event("sm90_gemm", 0, 600, "kernel"), event("ncclDevKernel", 0, 900, "kernel", 2)]
    found = diagnose(a_step(event("aten::mm", 0, 50), *kernels), 0.0, on_gpu=True)
    assert found.bound_by == "compute"
    assert found.shares["communication"] == pytest.approx(0.3)  # NCCL's kernel alone
    assert found.shares["host"] == pytest.approx(0.1)
    assert (found.exposed_ms, found.comm_ms) == pytest.approx((0.3, 0.9))


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *(
            (name, True)
            for name in ("aten::mm", "aten::addmm", "aten::bmm", "nvjet_sm90_tst_320x128_64x3", "sm90_gemm")
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", True),
        ("void at::native::GammaBetaBackwardCUDAKernelTemplate<float>", False),
        ("triton_poi_fused_addmm_gelu_view_9", False),
        ("void cudnn::fusion::convert_dq_to_16bits<true>", False),
        ("aten::add_", False),
    ],
)
def test_matrix_products_by_their_names(name: str, is_one: bool) -> None:
    assert is_matrix_product(name) == is_one


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten::addmm", "aten::addmm"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"),
        ("triton_poi_fused_" + "_to_copy" * 9, "triton_poi_fused__to_copy_to_..._to_copy_to_copy"),
        ("aten::_scaled_dot_product_attention_for_cpu_backward", "aten::_scaled_dot_product_att...for_cpu_backward"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("void at::native::(anonymous namespace)::Gamma<float, 32u>(long, float const*)", "Gamma"),
        ("void cutlass::Kernel2<cutlass_80_gemm_bf16>(cutlass_80_gemm_bf16::Params)", "cutlass_80_gemm_bf16"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float, 7>(float)", "gemvx"),
        (
            "void at::native::reduce_kernel<128, at::native::ReduceOp<at::native::sum_functor<float>::operator()()>>",
            "reduce_kernel (sum_functor)",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<at::native::BinaryFunctor<float, at::MulFunctor<float>>>",
            "vectorized_elementwise_kernel (MulFunctor)",
        ),
    ],
)
def test_a_kernel_has_a_short_name(name: str, short: str) -> None:
    assert short_name(name) == short


def test_forms_of_one_kernel_count_as_one() -> None:
    kernels = [event(f"void copy<{form}>(int)", 100 * form, 40, "kernel") for form in (1, 2)]
    found = diagnose(a_step(*kernels, event("other", 400, 50, "kernel")), 0.0, on_gpu=True)
    assert found.top == [("copy", pytest.approx(8 / 13)), ("other", pytest.approx(5 / 13))]


def test_a_shared_gpu_works_for_the_others_too() -> None:
    kernels = [event("sm90_gemm", 0, 300, "kernel")]
    found = diagnose(a_step(*kernels), 0.0, on_gpu=True, others=[(200, 500), (600, 700)])
    assert found.shares["others"] == pytest.approx(0.3)
    assert found.shares["host"] == pytest.approx(0.4)
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_their_work_beside_our_communication_is_not_theirs_alone() -> None:
    kernels = [event("sm90_gemm", 0, 300, "kernel"), event("ncclDevKernel", 300, 400, "kernel", 2)]
    found = diagnose(a_step(*kernels), 0.0, on_gpu=True, others=[(300, 700)])
    shares = {"compute": 0.3, "communication": 0.4, "host": 0.3, "others": 0.0}
    assert {kind: found.shares[kind] for kind in shares} == pytest.approx(shares)


def test_a_flag_that_is_set_is_not_advised() -> None:
    found = diagnose(a_step(event("aten::mm", 0, 300)), 0.6, on_gpu=False)
    config = Config(parallel=Parallel(data="bucketed", compression="bf16"), train=Train(accumulation=4))
    assert not [line for line in words(found, config, ranks=2) if line.startswith("try next")]


def test_ranks_are_put_on_one_time_base() -> None:
    late = merged([RankTrace(0, 1000.0, [event("a", 5, 1)]), RankTrace(1, 1100.0, [event("b", 5, 1)])])
    drawn = {e["name"]: (e["pid"], e["ts"]) for e in late["traceEvents"] if e["ph"] == "X"}
    assert drawn == {"a": (0, 0.0), "b": (1, 100.0)}


@pytest.mark.parametrize("strategy", [pytest.param("zero3", marks=pytest.mark.slow), "ddp"])
@pytest.mark.slow
def test_a_real_trace(strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model.name", "gpt", "--model.d-model", "32", "--model.layers", "3", "--model.heads", "2"]
    data = ["--data.name", "synthetic", "--data.samples", "64", "--train.batch-size", "8", "--device", "cpu"]
    flags = ["--nproc", "2", "--parallel.data", strategy, "--steps", "2", "--run-dir", str(tmp_path)]
    assert main(["profile", *model, *data, *flags]) == 0
    assert "bound by" in capsys.readouterr().out
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        names = {e["name"] for e in mine}
        assert {f"{way} of blocks.{i}" for way in ("forward", "backward") for i in range(3)} <= names
        wanted = "all-gather of blocks.1 (parameters)" if strategy == "zero3" else "all-reduce of bucket 0 (gradients)"
        assert wanted in names
        steps = [(e["ts"], e["ts"] + e["dur"]) for e in mine if e["name"] == STEP]
        assert len(steps) == 2
        for e in mine:
            if e["cat"] == "communication":  # within 5 ms: the ledger and the profiler read two clocks
                assert any(a - 5e3 <= e["ts"] <= b + 5e3 for a, b in steps), e
    starts = [[e["ts"] for e in events if e["name"] == STEP and e["pid"] == rank] for rank in (0, 1)]
    assert all(abs(a - b) < 1e5 for a, b in zip(*starts, strict=True))  # they begin together, behind a barrier
    record = read_record(tmp_path / "profile.json")
    assert [line["rank"] for line in record.result["timelines"]] == [0, 1]


def test_a_snapshot_of_a_gpu_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "cpu", "--nproc", "1", "--memory-snapshot", "--run-dir", str(tmp_path)]
    assert main(["profile", *flags]) == 2
    assert "--memory-snapshot shows a GPU's memory" in capsys.readouterr().err


def test_nvtx_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--device", "cpu", "--nproc", "1", "--nvtx"]) == 2
    assert "--nvtx marks what a GPU does" in capsys.readouterr().err
    assert main(["profile", "--nvtx", "--memory-snapshot"]) == 2
    assert "give one of the two" in capsys.readouterr().err
