"""Data sets, their files, and the cutting of batches."""

import functools
import gzip
import hashlib
import http.server
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep import UserError, shard_batch
from lockstep.config import GPT, MLP, Config, Data, Train
from lockstep.data import IGNORED, Batch, Sampler, Share, build_data, make_synthetic, read_share
from lockstep.data.download import RemoteFile, fetch
from lockstep.data.mnist import FILES

# ---- cutting -------------------------------------------------------------------------------------------


@given(length=st.integers(1, 200), batch=st.integers(1, 40), world=st.integers(1, 9), epoch=st.integers(0, 3))
def test_over_an_epoch_every_sample_is_read_exactly_once(length: int, batch: int, world: int, epoch: int) -> None:
    sampler = Sampler(length, batch, seed=3)
    seen = [int(i) for step in sampler.epoch(epoch) for r in range(world) for i in step[Share(r, world).of(len(step))]]
    assert sorted(seen) == list(range(length))


def test_the_order_changes_with_the_epoch_and_not_with_the_world() -> None:
    sampler = Sampler(50, 8, seed=1)
    assert sampler.order(0).tolist() != sampler.order(1).tolist()
    assert sampler.order(2).tolist() == Sampler(50, 8, seed=1).order(2).tolist()
    assert [b.tolist() for b in sampler.epoch(1, start=3)] == [b.tolist() for b in sampler.epoch(1)][3:]


@given(rows=st.integers(0, 30), world=st.integers(1, 8))
def test_shard_batch_cuts_any_nest_into_shares_of_nearly_one_size(rows: int, world: int) -> None:
    batch = {"x": torch.arange(rows), "rest": (torch.arange(rows) * 2, [torch.arange(rows) * 3])}
    shares = [shard_batch(batch, r, world) for r in range(world)]
    assert torch.cat([s["x"] for s in shares]).tolist() == list(range(rows))
    assert all((s["rest"][1][0] == 3 * s["x"]).all() for s in shares)
    sizes = [len(s["x"]) for s in shares]
    assert max(sizes) - min(sizes) <= 1


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_shard_batch_keeps_named_tuples() -> None:
    pair = shard_batch(Pair(torch.arange(4), torch.arange(4)), 1, 2)
    assert isinstance(pair, Pair)
    assert pair.y.tolist() == [2, 3]


def test_shard_batch_refuses_what_it_cannot_cut() -> None:
    with pytest.raises(UserError, match="given a str"):
        shard_batch("batch", 0, 2)
    with pytest.raises(UserError, match="rank 2 of 2"):
        shard_batch(torch.zeros(4), 2, 2)


@given(size=st.integers(1, 20), count=st.integers(1, 8))
def test_micro_batches_hold_every_sample_and_fill_up_with_fillers(size: int, count: int) -> None:
    batch = Batch(torch.arange(size), torch.arange(size))
    parts = batch.micro_batches(count)
    assert len(parts) == count
    assert [int(i) for part in parts if not part.filler for i in part.inputs] == list(range(size))
    assert sum(part.target_count() for part in parts) == size


def test_an_empty_share_reads_a_filler_that_counts_nothing() -> None:
    data = make_synthetic("images", (1, 4, 4), 3, samples=8)
    batch = read_share(data.train, torch.tensor([5]), Share(1, 2))
    assert (batch.filler, len(batch), batch.target_count()) == (True, 1, 0)


def test_padding_is_not_counted() -> None:
    targets = torch.tensor([[1, 2, IGNORED], [IGNORED, IGNORED, 3]])
    assert Batch(torch.zeros(2, 3), targets).target_count() == 3


# ---- data sets -----------------------------------------------------------------------------------------


def test_the_digits_are_the_real_ones() -> None:
    data = build_data(Config())
    assert (len(data.train), len(data.test)) == (1437, 360)
    images = torch.cat([data.train.inputs, data.test.inputs])
    assert tuple(images.shape) == (1797, 1, 8, 8)
    assert float(images.min()) >= 0
    assert float(images.max()) == 1
    assert torch.cat([data.train.targets, data.test.targets]).bincount().tolist()[:3] == [178, 182, 177]


@pytest.mark.parametrize(("kind", "shape"), [("images", (1, 6, 6)), ("tokens", (12,)), ("regression", (5,))])
def test_synthetic_data_depend_on_the_seed_alone(kind: str, shape: tuple[int, ...]) -> None:
    one, same, other = (make_synthetic(kind, shape, 7, samples=16, seed=s) for s in (4, 4, 5))
    assert torch.equal(one.train.inputs, same.train.inputs)
    assert torch.equal(one.train.targets, same.train.targets)
    assert not torch.equal(one.train.inputs, other.train.inputs)


def test_synthetic_regression_is_x_times_w_plus_noise() -> None:
    data = make_synthetic("regression", (6,), 2, samples=500)
    weight = torch.linalg.lstsq(data.train.inputs, data.train.targets).solution
    error = data.test.inputs @ weight - data.test.targets
    assert 0.05 < float(error.std()) < 0.2


def test_text_is_the_bytes_of_the_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"B" * 300)
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    config = Config(model=GPT(context=9), data=Data(name="text", path=str(tmp_path)))
    batch = build_data(config).train.batch(torch.tensor([0, 1]))
    assert batch.inputs[1].tolist() == list(range(9, 18))
    assert torch.equal(batch.targets[:, :-1], batch.inputs[:, 1:])


def test_the_default_text_is_there_offline() -> None:
    data = build_data(Config(model=GPT(context=64), data=Data(name="text", max_bytes=100_000)))
    assert len(data.train) > 1000
    with pytest.raises(UserError, match="needs at least"):
        build_data(Config(model=GPT(context=64), data=Data(name="text", max_bytes=100)))


def test_a_model_that_cannot_read_the_data_says_what_can() -> None:
    with pytest.raises(
        UserError, match=r"gpt does not read images \(data.name digits\); use data.name text, tokens, synthetic"
    ):
        build_data(Config(model=GPT()))


def test_an_mlp_reads_images_and_regression() -> None:
    assert build_data(Config(model=MLP())).spec.kind == "images"
    assert build_data(Config(model=MLP(), data=Data(name="synthetic"), train=Train())).spec.kind == "regression"


# ---- files -----------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    header = b"\x00\x00\x08" + bytes([array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, count: int = 20) -> Path:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in FILES:
        shape = (count, 28, 28) if "images" in name else (count,)
        content = idx(random.integers(0, 256 if "images" in name else 10, shape))
        if "t10k" in name:
            (raw / name).write_bytes(content)  # plain
        else:
            (raw / f"{name}.gz").write_bytes(gzip.compress(content))
    return raw


def mnist(path: Path) -> Config:
    return Config(data=Data(name="mnist", path=str(path), download=False))


def test_mnist_is_read_plain_and_gzipped(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    data = build_data(mnist(tmp_path))
    assert (data.spec.shape, len(data.train), len(data.test)) == ((1, 28, 28), 20, 20)
    random = np.random.default_rng(0)  # as the files were made: one after the other
    for name in FILES:
        split = data.test if "t10k" in name else data.train
        batch = split.batch(torch.arange(20))
        if "images" in name:
            written = random.integers(0, 256, (20, 28, 28)).astype(np.float32) / 255
            assert batch.inputs.dtype == torch.float32
            assert torch.equal(batch.inputs, torch.from_numpy(written)[:, None])
        else:
            assert batch.targets.tolist() == random.integers(0, 10, 20).tolist()


@pytest.mark.parametrize("damage", ["truncated", "garbage", "header", "mismatch"])
def test_a_damaged_mnist_file_is_named(tmp_path: Path, damage: str) -> None:
    raw = write_mnist(tmp_path)
    victim = raw / "train-images-idx3-ubyte.gz"
    good = victim.read_bytes()
    content = {
        "truncated": good[: len(good) // 2],
        "garbage": b"not a gzip file",
        "header": gzip.compress(gzip.decompress(good)[:-100]),
        "mismatch": gzip.compress(idx(np.zeros((3, 28, 28)))),
    }[damage]
    victim.write_bytes(content)
    with pytest.raises(UserError, match="train"):
        build_data(mnist(tmp_path))


def test_missing_files_offline_say_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz is missing.*put the four MNIST files into"):
        build_data(mnist(tmp_path))
    with pytest.raises(UserError, match=r"lacks data_batch_1.*put cifar-10-python.tar.gz into"):
        build_data(Config(data=Data(name="cifar10", path=str(tmp_path), download=False)))


def write_cifar10(folder: Path, per_batch: int = 4) -> Path:
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        record = {b"data": np.full((per_batch, 3072), 7, np.uint8), b"labels": list(range(per_batch))}
        (batches / name).write_bytes(pickle.dumps(record, protocol=2))
    return batches


def test_cifar10_is_read_from_its_batches(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    data = build_data(Config(data=Data(name="cifar10", path=str(tmp_path), download=False)))
    assert (len(data.train), len(data.test), data.spec.shape) == (20, 4, (3, 32, 32))


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 + 1",)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({b"data": 3}), pickle.dumps(Exploit())])
def test_a_damaged_or_hostile_cifar10_batch_is_named_and_not_run(tmp_path: Path, content: bytes) -> None:
    (write_cifar10(tmp_path) / "data_batch_3").write_bytes(content)
    with pytest.raises(UserError, match="data_batch_3 is corrupt"):
        build_data(Config(data=Data(name="cifar10", path=str(tmp_path), download=False)))


# ---- downloads -------------------------------------------------------------------------------------------

CONTENT = bytes(range(256)) * 1000


class RangeServer(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT, honours Range, and remembers what was asked for."""

    asked: list[str | None]

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start:])

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def server() -> Iterator[tuple[str, list[str | None]]]:
    asked: list[str | None] = []
    handler = type("Handler", (RangeServer,), {"asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=functools.partial(httpd.serve_forever, 0.05), daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}/file", asked
        httpd.shutdown()


GOOD = hashlib.sha256(CONTENT).hexdigest()


def test_a_download_is_checked_and_renamed(tmp_path: Path, server: tuple[str, list[str | None]]) -> None:
    fetch(RemoteFile(server[0], GOOD), tmp_path / "sub" / "file")
    assert (tmp_path / "sub" / "file").read_bytes() == CONTENT
    assert [f.name for f in (tmp_path / "sub").iterdir()] == ["file"]


@pytest.mark.parametrize("have", [1, 1000, len(CONTENT)])
def test_a_broken_off_download_goes_on_where_it_stopped(
    tmp_path: Path, server: tuple[str, list[str | None]], have: int
) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:have])
    fetch(RemoteFile(server[0], GOOD), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server[1] == [f"bytes={have}-"]


class BreakingServer(RangeServer):
    """Promises everything, sends half, hangs up."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // 2])


def test_a_connection_that_breaks_keeps_what_it_brought(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), BreakingServer) as httpd:
        threading.Thread(target=functools.partial(httpd.serve_forever, 0.05), daemon=True).start()
        url = f"http://127.0.0.1:{httpd.server_address[1]}/file"
        with pytest.raises(UserError, match="could not be downloaded"):
            fetch(RemoteFile(url, GOOD), tmp_path / "file")
        httpd.shutdown()
    assert (tmp_path / "file.part").read_bytes() == CONTENT[: len(CONTENT) // 2]


def test_wrong_bytes_are_discarded(tmp_path: Path, server: tuple[str, list[str | None]]) -> None:
    with pytest.raises(UserError, match="checksum"):
        fetch(RemoteFile(server[0], "0" * 64), tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_offline_says_where_to_put_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"could not be downloaded.*put the file at {tmp_path}/file yourself"):
        fetch(RemoteFile("http://127.0.0.1:9/file", GOOD), tmp_path / "file", timeout=2)
