"""The code of a job: what it is, what has changed since a run, and its way to a coordinator."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from isthmus.orchestrator.client.coordinator_client import Client
from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.packing import Packed, pack
from isthmus.orchestrator.run_folder.home import RunFolder, find_run, run_folders
from isthmus.orchestrator.run_folder.removal import UP
from isthmus.protos.blobs import Blobs, parts_of
from isthmus.protos.commits import commit_of
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import IsthmusError, NotFoundError
from isthmus.topology.spec.carried_folder import CarriedFolder, changes, digest_of
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.units import format_size

HERE_BYTES = 64 << 20
"""Limit on a folder that has a digest though it is not carried: hashing takes a moment."""
TEXT_BYTES = 256 << 10
"""Longest file that is kept here, so that the next launch can say which lines have changed."""
PROGRESS_BYTES = 8 << 20
"""What is carried within a moment needs no progress."""
KEPT_BYTES = 64 << 20
KEPT = "code"
"""Folder of HOME for them."""

Say = Callable[[str], object]


class JobCode:
    """The files of one job, as they are when it is launched."""

    def __init__(
        self, pair: Pair, home: Path, run_id: str, *, is_remote: bool, resumed: str | None = None
    ) -> None:
        """Pack them.

        Args:
            pair: The job.
            home: Where runs are kept.
            run_id: Of the run to come.
            is_remote: Its sites are given the files by a coordinator, unless they have them.
            resumed: The run whose checkpoint it goes on from; None: none.

        Raises:
            ConfigError: they are too large to be carried, or a link leads out of their folder.
        """
        self.message = control_pb2.Code()
        """What the coordinator is told."""
        self.packed: Packed | None = None
        """None: the job has no files, or too many to say what they are."""
        job = pair.job
        has_files = job.entrypoint is not None or job.trainer.data.files or job.working_folder
        if job.probe is not None or not has_files:
            return
        root = root_of(pair)
        has_takers = not all(site.job_folder for site in pair.topology.sites)
        self.message.is_carried = is_remote and has_takers
        self.message.source = str(root)
        try:
            limits = {} if self.message.is_carried else {"limit_bytes": HERE_BYTES}
            self.packed = pack(root, _outputs(pair, home), **limits)
        except OSError:
            if self.message.is_carried:
                raise
        except ConfigError as error:
            if self.message.is_carried:
                at = ("working_folder",) if job.working_folder else ("entrypoint",)
                pair.job_document.refuse([(at, error.problems[0].message)])
        if commit := commit_of(root):
            self.message.commit, self.message.is_changed = commit.name, commit.is_changed
        if self.packed is not None:
            folder = self.packed.folder
            self.message.digest = digest_of(folder.to_bytes())
            self.message.num_files, self.message.num_bytes = len(folder.files), folder.num_bytes
            self._require_script(pair)
            self._compare(Blobs(home / KEPT), _before(home, str(root), run_id, resumed))

    def remember(self, folder: RunFolder, home: Path) -> None:
        """Keep what the next launch compares with."""
        if self.packed is None:
            return
        texts = Blobs(home / KEPT)
        texts.put(self.packed.folder.to_bytes())
        for file in self.packed.folder.files:
            if file.num_bytes <= TEXT_BYTES and texts.missing([file.digest]):
                with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
                    texts.put((self.packed.root / file.path).read_bytes())
        texts.keep_within(KEPT_BYTES, ())
        folder.remember_code(self.message.digest, self.message.source)

    def carry(self, client: Client, say: Say) -> None:
        """Give a coordinator what it lacks of the files.

        Raises:
            IsthmusError: it does not answer, or a file has changed since it was packed.
            OSError: a file cannot be read any more.
        """
        if self.packed is None or not self.message.is_carried:
            return
        paths, listed = self.packed.paths, self.packed.folder.to_bytes()
        missing = client.missing_blobs([*paths, self.message.digest])
        sizes = {file.digest: file.num_bytes for file in self.packed.folder.files}
        total = sum(sizes.get(digest, 0) for digest in missing)
        files = [paths[digest] for digest in missing if digest in paths]
        if files:
            names = ", ".join(path.name for path in files[:3]) + (", …" if len(files) > 3 else "")
            say(f"carrying {format_size(total)}: {len(files)} of {len(paths)} files, {names}")
        client.put_blobs(_parts(missing, paths, self.message.digest, listed, total, say))

    def _require_script(self, pair: Pair) -> None:
        """Refuse a script that rules leave out of what is carried."""
        if self.packed is None or pair.job.entrypoint is None or not self.message.is_carried:
            return
        root, folder = self.packed.root, os.path.abspath(pair.job_path.parent)  # noqa: PTH100
        script = Path(os.path.normpath(Path(folder, pair.job.entrypoint)))
        is_ours = script.is_relative_to(root) and script.is_file()
        if is_ours and script not in {root / file.path for file in self.packed.folder.files}:
            why = f"{script} is left out of what is carried: see .gitignore and .isthmusignore"
            pair.job_document.refuse([(("entrypoint",), why)])

    def _compare(self, texts: Blobs, before: RunFolder | None) -> None:
        assert self.packed is not None
        if before is None:
            return
        try:
            old = CarriedFolder.from_bytes(texts.read(str(before.code["digest"])))
        except (IsthmusError, ConfigError, LookupError):  # it was forgotten
            return
        paths = self.packed.paths

        def read(digest: str) -> str | None:
            try:
                content = paths[digest].read_bytes() if digest in paths else texts.read(digest)
                return content.decode() if len(content) <= TEXT_BYTES else None
            except (OSError, IsthmusError, UnicodeDecodeError):
                return None

        self.message.since = before.run_id
        self.message.changes.extend(changes(old, self.packed.folder, read))


def root_of(pair: Pair) -> Path:
    """Return the folder of a job's files: that of the job, or one around it where it works."""
    folder = Path(os.path.abspath(pair.job_path.parent))  # noqa: PTH100 - a link stays as written
    if pair.job.working_folder is None:
        return folder
    works = Path(os.path.abspath(folder / pair.job.working_folder))  # noqa: PTH100
    return folder if works.is_relative_to(folder) else works


def _outputs(pair: Pair, home: Path) -> list[Path]:
    """Return the folders into which isthmus itself writes."""
    job, folder = pair.job, pair.job_path.absolute().parent
    found = [home, home / "runs", home / UP, home / KEPT]
    if job.checkpoint is not None:
        found += [folder / store for store in job.checkpoint.to if "://" not in store]
    if job.exporters.tensorboard is not None and job.exporters.tensorboard.folder is not None:
        found.append(folder / job.exporters.tensorboard.folder)
    return [Path(os.path.abspath(each)) for each in found]  # noqa: PTH100


def _before(home: Path, source: str, run_id: str, resumed: str | None) -> RunFolder | None:
    """Return the run to compare with: the resumed one, else the last from the same folder."""
    if resumed is not None:
        try:
            return find_run(home, resumed)
        except NotFoundError:
            return None
    runs = (each for each in run_folders(home) if each.run_id != run_id)
    return next((each for each in runs if each.code.get("source") == source), None)


def _parts(
    missing: list[str],
    paths: dict[str, Path],
    digest: str,
    listed: bytes,
    total: int,
    say: Say,
) -> Iterator[control_pb2.BlobPart]:
    """Yield contents in parts, that of the list of files last, and tell of every tenth."""
    done, next_bytes = 0, total // 10
    for each in missing:
        if each == digest:
            continue
        with paths[each].open("rb") as file:
            for part in parts_of(each, file):
                yield part
                done += len(part.data)
                if done >= next_bytes and total > PROGRESS_BYTES:
                    say(f"carried {format_size(done)} of {format_size(total)}")
                    next_bytes += total // 10
    if digest in missing:
        yield from parts_of(digest, io.BytesIO(listed))
