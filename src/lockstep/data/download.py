"""Files from their home pages: resumable, checked, never half there under their final name."""

import hashlib
import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

from lockstep.bar import Bar
from lockstep.errors import UserError


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set: where it comes from and what its bytes must hash to."""

    url: str
    sha256: str


def fetch(remote: RemoteFile, target: Path, timeout: float = 30.0) -> None:
    """Download to `target.part`, going on where an earlier try stopped, check it, then rename."""
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        have = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(remote.url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            resumed = answer.status == 206
            length = int(answer.headers.get("Content-Length") or 0)
            with part.open("ab" if resumed else "wb") as out, _bar() as bar:
                done = have if resumed else 0
                task = bar.add_task(target.name, total=length + done or None, completed=done)
                while chunk := answer.read(1 << 16):
                    out.write(chunk)
                    bar.advance(task, len(chunk))
                    length -= len(chunk)
            if length > 0:
                raise ConnectionError(f"the connection broke off {length:,} bytes before the end; try again to go on")
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: the part is already the whole file
            raise _cannot_fetch(remote, target, error) from None
    except (OSError, http.client.HTTPException) as error:  # no network, time-out, full disk
        raise _cannot_fetch(remote, target, error) from None
    digest = sha256_of(part)
    if digest != remote.sha256:
        part.unlink()
        raise UserError(
            f"{remote.url}: the downloaded bytes have checksum {digest[:12]}…, expected {remote.sha256[:12]}…; "
            f"the download was discarded: try again, or put the right file at {target}"
        )
    part.replace(target)


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _bar() -> Bar:
    return Bar(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())


def _cannot_fetch(remote: RemoteFile, target: Path, error: Exception) -> UserError:
    return UserError(f"{remote.url} could not be downloaded ({error}); put the file at {target} yourself")
