"""Everything that a run needs to go on bit for bit, and files that are whole or not there."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import torch

from gradstow._errors import GradstowError
from gradstow.train._randomness import Randomness, cuda_devices

if TYPE_CHECKING:
    from gradstow.train._fit import Fit
    from gradstow.train._step import TrainStep
    from gradstow.train._update import Update

FORMAT = 1


class Stateful(Protocol):
    """A data loader that knows its position."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


def run_state(step: TrainStep, update: Update, fit: Fit) -> dict[str, Any]:
    """See ``TrainStep.state_dict``."""
    return {
        "format": FORMAT,
        "made": _made(step),
        "model": step.model.state_dict(),
        "optimizers": [o.state_dict() for o in step.optimizers],
        "schedulers": [s.state_dict() for s in step.schedulers],
        "scaler": None if step.scaler is None else step.scaler.state_dict(),
        "clip": None if step.clip is None else step.clip.state_dict(),
        "fit": fit.state_dict(),
        "steps": update.steps,
        "skipped": update.skipped,
        "data": step.data if isinstance(step.data, int) else step.data.state_dict(),
        "random": Randomness.now(cuda_devices(step.model)).state_dict(),
    }


def load_run(step: TrainStep, update: Update, fit: Fit, state: Any, own: bool) -> None:
    """See ``TrainStep.load_state_dict``; ``own`` says that nobody else has the state's tensors."""
    _check(step, state)
    if step.clip is not None:
        step.clip.load_state_dict(state["clip"])
    for parameter in step.model.parameters():
        parameter.grad = None
    step.model.load_state_dict(state["model"])
    pairs = [*zip(step.optimizers, state["optimizers"], strict=True)]
    pairs += zip(step.schedulers, state["schedulers"], strict=True)
    for item, saved in pairs:  # optimizers of torch's take over the tensors that they load
        item.load_state_dict(saved if own else copy.deepcopy(saved))
    if step.scaler is not None:
        step.scaler.load_state_dict(state["scaler"])
    fit.load_state_dict(state["fit"])
    update.steps, update.skipped = state["steps"], state["skipped"]
    if isinstance(step.data, int):
        step.data = state["data"]
    else:
        step.data.load_state_dict(state["data"])
    Randomness.of(state["random"]).restore()


def _made(step: TrainStep) -> dict[str, Any]:
    """What a run and the one that goes on with it must have in common."""
    return {
        "precision": step.precision.name,
        "optimizers": [type(o).__name__ for o in step.optimizers],
        "schedulers": [type(s).__name__ for s in step.schedulers],
    }


_KEYS = ("made", "model", "optimizers", "schedulers", "scaler", "clip", "fit", "steps", "skipped", "data", "random")


def _check(step: TrainStep, state: Any) -> None:
    """Before anything is changed."""
    whole = isinstance(state, Mapping) and all(key in state for key in _KEYS)
    if not whole or state.get("format") != FORMAT:
        raise GradstowError(
            "this is no state of a TrainStep, or one of another format. Give what step.state_dict() returned, or load "
            "a file that step.save wrote."
        )
    for name, mine in (("optimizers", step.optimizers), ("schedulers", step.schedulers)):
        if len(state[name]) != len(mine):
            raise GradstowError(
                f"the saved run had {len(state[name])} {name} and this one has {len(mine)}. Make the TrainStep as it "
                "was made for the saved run."
            )
    for name, now in _made(step).items():
        if state["made"][name] != now:
            raise GradstowError(
                f"the saved run had {name} {state['made'][name]} and this one has {now}. Make the TrainStep as it was "
                "made for the saved run."
            )
    for name, one in (("scaler", step.scaler), ("clip", step.clip)):
        if (state[name] is None) != (one is None):
            had = "none" if state[name] is None else "one"
            raise GradstowError(
                f"the saved run had {had} for {name}=, unlike this one. Make the TrainStep as it was made for the "
                "saved run (precision=, clip=)."
            )


def write_state(state: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint, whole or not at all: a temporary file in the same folder, flushed to the disk, then renamed.

    A process that is killed at any moment leaves the old file or the new one. What may be left besides is one
    ``.NAME.part``, which the next save writes over.

    Raises:
        GradstowError: the file cannot be written, or another process writes it just now; the old one is unchanged.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise GradstowError(f"the checkpoint cannot be written: {path!r} is no path. Give a file's name.")
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.is_dir():
        raise GradstowError(f"the checkpoint cannot be written to {path}: it is a folder. Name a file in it.")
    part = target.with_name(f".{target.name}.part")
    try:
        with _alone(part) as file:
            try:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(part, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    part.unlink()
                raise
        _sync_folder(target.parent)
    except (OSError, RuntimeError) as error:  # torch's writer says RuntimeError for a full disk
        why = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
        raise GradstowError(f"the checkpoint cannot be written to {path}: {why}. Choose another place.") from error


@contextlib.contextmanager
def _alone(part: Path) -> Iterator[IO[bytes]]:
    """The temporary file, empty, as long as no other process writes it. The lock goes with the process."""
    while True:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with open(descriptor, "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(errno.EBUSY, "another process is writing it") from None
            if not _is_at(file, part):
                continue  # its writer renamed it between our opening and our lock
            file.truncate()
            yield file
            return


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """The rename itself outlasts a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_sums(path: str | os.PathLike[str]) -> None:
    """torch writes a checksum for each part of the file, and does not look at them."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise OSError(f"{broken} in it is damaged")


def read_state(path: str | os.PathLike[str], weights_only: bool) -> Any:
    """Read a checkpoint onto the CPU.

    Raises:
        GradstowError: missing, damaged, or with objects that ``weights_only`` does not allow.
    """
    try:
        _check_sums(path)
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    except FileNotFoundError as error:
        raise GradstowError(f"there is no checkpoint at {path}. Save one with step.save(path).") from error
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = " A file of your own with other objects in it loads with weights_only=False." if weights_only else ""
        raise GradstowError(f"the checkpoint {path} cannot be read: {why}. Save one with step.save.{hint}") from error
